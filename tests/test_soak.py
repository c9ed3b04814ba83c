"""The soak: exact while everything changes, and able to fail; on a CPU with a tiny model."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_benchmarks import BENCHMARKS

from poros_core.host_store import HostStore

TINY = ("--shape", "tiny", "--layers", "2", "--seq-len", "8", "--minutes", "5")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    names = ("soak", "soak_draws", "soak_record")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        found = SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        found.soak.set_imports_aside()
        yield found


def run(bench: Any, path: Path, *line: str) -> tuple[int, dict[str, Any]]:
    """Run a soak; return its exit status and its record."""
    file = path / "soak.json"
    status = bench.soak.main([*TINY, *line, "--json", str(file)])
    record: dict[str, Any] = json.loads(file.read_text())
    return status, record


@pytest.mark.slow
def test_every_step_is_exact_and_nothing_grows(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--steps", "25", "--phase", "5", "--exception-every", "6", "--seed", "5")
    status, record = run(bench, tmp_path, *line)
    assert (status, record["verdict"], record["error"]) == (0, "exact", None), record["grew"]
    assert record["kind"] == "soak"
    assert record["steps_compared"] == 25
    assert [phase["steps"] for phase in record["phases"]] == [[n, n + 4] for n in range(1, 25, 5)]
    assert len(record["exceptions"]) == 4
    assert "KeyboardInterrupt" in {found["type"] for found in record["exceptions"]}
    assert all(phase["streamed"]["bytes_streamed"] for phase in record["phases"])
    assert any(phase["streamed"]["resident_units"] for phase in record["phases"])
    bare = record["memory"]["unprepared"]
    assert bare["host_buffer_bytes"]["highest"] == 0
    assert bare["live_tensor_bytes"]["first"] > 0
    assert "exact: 25 of 25 steps compared, 4 exceptions" in capsys.readouterr().out


@pytest.mark.slow
def test_other_draws_at_length(bench: Any, tmp_path: Path) -> None:
    line = ("--layers", "4", "--steps", "80", "--phase", "8", "--exception-every", "7")
    status, record = run(bench, tmp_path, *line)
    assert (status, record["verdict"], record["error"]) == (0, "exact", None), record["grew"]
    assert {found["place"] for found in record["exceptions"]} == set(bench.soak_draws.PLACES)
    ways = record["phases"]
    assert {way["budget"] for way in ways} == {"none", "auto", "bytes"}
    assert len({way["block_size"] for way in ways}) > 1
    assert {way["copy_ahead"] for way in ways} == {True, False}
    assert len({way["streamed"]["resident_units"] for way in ways}) > 1


def test_a_flipped_bit_ends_the_run(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = run(bench, tmp_path, "--steps", "4", "--phase", "2", "--plant-fault")
    assert (status, record["verdict"]) == (1, "diverged")
    assert record["planted_fault"]["bit"] == 6
    assert record["divergence"]["step"] == record["steps_compared"] <= 2
    assert "first divergence" in capsys.readouterr().out


def test_memory_that_stays_ends_the_run(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host store of every preparation is kept, as a cycle or a cache would."""
    kept: list[HostStore] = []
    restore = HostStore.restore

    def leak(self: HostStore, device: torch.device | None) -> None:
        kept.append(self)
        restore(self, device)

    monkeypatch.setattr(HostStore, "restore", leak)
    status, record = run(bench, tmp_path, "--steps", "3", "--phase", "1")
    assert (status, record["verdict"]) == (1, "grew")
    assert any("unprepared: host_buffer_bytes rose" in text for text in record["grew"])
    assert record["divergence"] is None


def test_a_budget_that_is_too_small_is_raised(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.soak.Soak, "_fitting", lambda self, way: max(self._sizes))
    line = ("--steps", "4", "--phase", "2", "--exception-every", "9")
    monkeypatch.setattr(bench.soak, "in_rounds", lambda draw, ways, phases: _budgeted(ways))
    status, record = run(bench, tmp_path, *line)
    assert (status, record["error"]) == (0, None)
    assert record["phases"][1]["refused_budgets"] > 0


def _budgeted(ways: list[Any]) -> list[Any]:
    import attrs

    return [ways[0], attrs.evolve(ways[0], number=1, budget="bytes")]


def test_growth_is_told_from_noise(bench: Any) -> None:
    def level(fixed: int, settling: int) -> dict[str, int]:
        return {"device_allocated_bytes": fixed << 20, "device_used_bytes": settling << 20}

    growth, grown = bench.soak_record.growth, bench.soak_record.grown
    calm = [level(10, 100), level(11, 400), level(12, 400), level(10, 600)]
    memory = growth(calm, {0: calm[:1], 1: [level(60, 0), level(80, 0)]}, first_round=2)
    assert grown(memory) == []
    series = memory["unprepared"]["device_used_bytes"]
    assert (series["first"] >> 20, series["highest"] >> 20, series["last"] >> 20) == (100, 600, 600)
    rising = [level(10, 100), level(13, 100), level(10, 357)]
    memory = growth(rising, {1: [level(60, 0), level(125, 0)]}, first_round=2)
    assert [text.split(" rose")[0] for text in grown(memory)] == [
        "unprepared: device_allocated_bytes",
        "unprepared: device_used_bytes",
        "prepared, way 1: device_allocated_bytes",
    ]


def test_what_is_drawn(bench: Any) -> None:
    draws = bench.soak_draws
    for seed in range(20):
        draw = random.Random(seed)
        ways = draws.draw_ways(draw, 10, depth=24, shortest=64, longest=512)
        assert ways[0].lengths[0] == 512
        assert all(64 <= length <= 512 for way in ways for length in way.lengths)
        plan = draws.in_rounds(draw, ways, 20)
        assert plan[:10] == ways
        assert sorted(way.number for way in plan[10:]) == list(range(10))
        mishaps = draws.draw_mishaps(draw, steps=500, every=50, phase=25, ways=plan)
        assert [(step - 1) // 50 for step in mishaps] == list(range(10))
        assert {mishap.kind for mishap in mishaps.values()} == set(draws.KINDS)
        assert {mishap.place for mishap in mishaps.values()} == set(draws.PLACES)
        for step in mishaps:
            assert plan[(step - 1) // 25].budget == "none" or (step - 1) % 25 >= 5
        steps = draws.draw_steps(draw, plan[3], 25)
        assert len(steps) == 25
        firsts = [lengths[0] for lengths in steps]
        assert all(firsts.count(length) >= 2 for length in plan[3].lengths)
