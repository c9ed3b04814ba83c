"""What loading costs: the figures, records and table of the benchmark, on a CPU."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_benchmarks import BENCHMARKS

FIELDS = {
    *("kind", "method", "strategy", "family", "shape", "precision", "settings", "run_id"),
    *("command", "stack", "date", "outcome", "error", "device_peak_bytes", "host_peak_bytes"),
    *("host_steady_bytes", "seconds", "floor_seconds", "disk_bytes_per_second", "packed_bytes"),
    *("unquantised_bytes", "measured_how"),
}
_MODULES = ("load_cost", "load_floors", "load_generated", "load_measure", "load_memory")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = SimpleNamespace(**{name: importlib.import_module(name) for name in _MODULES})
    monkeypatch.setattr(found.load_measure, "_warm_up", lambda work, device, pool: None)
    monkeypatch.setattr(
        found.load_measure, "Pool", functools.partial(found.load_generated.Pool, nbytes=1 << 20)
    )
    monkeypatch.setattr(found.load_measure, "_BESIDES", 0)
    for name in ("write_rate", "hash_rate", "generate_rate"):
        whole = getattr(found.load_floors, name)
        small = lambda *a, whole=whole: whole(*a, nbytes=1 << 20)  # noqa: E731
        monkeypatch.setattr(found.load_measure, name, small)
    return found


def works(bench: Any, tmp_path: Path, *argv: str) -> list[Any]:
    line = ["--shape", "tiny", "--layers", "1", "--folder", str(tmp_path), *argv]
    found: list[Any] = bench.load_cost.works(bench.load_cost.arguments(line))
    return found


def test_every_method_of_a_run_is_recorded(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ensure(work: Any) -> None:
        if not (Path(work.checkpoint) / "config.json").is_file():
            bench.load_measure.write_checkpoint(work)

    methods = "cache-read,cache-write,cache-read,mmap,bf16,generated"
    todo = works(bench, tmp_path, "--methods", methods, "--cold", "--verify")
    records = bench.load_cost.run(
        todo,
        runner=lambda work: json.loads(json.dumps(bench.load_measure.outcome(work))),
        ensure=ensure,
        json_dir=tmp_path / "out",
        command="python benchmarks/load_cost.py",
    )
    written = [json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()]
    checked = [record for record in written if record["kind"] == "load-bytes"]
    written = [record for record in written if record["kind"] == "load-cost"]
    assert len(written) == len(records) == 6
    assert all(record.keys() >= FIELDS for record in written)
    assert sorted(r["runs"][0]["way"] for r in checked) == sorted(
        ["cache-read", "cache-write", "generated", "mmap"]
    )
    assert all(r["mismatched"] == 0 and r["verdict"] == "exact" for r in checked)
    assert {r["tensors"] for r in checked} == {29}
    early, first, second, mapped, plain, generated = records
    assert early["outcome"] == "refused"
    assert "measure cache-write before" in early["error"]
    assert [r["outcome"] for r in records[1:]] == ["loaded"] * 5
    assert [r["source"] for r in (first, second, mapped)] == ["checkpoint", "cache", "cache"]
    assert mapped["host"] == "mmap"
    same = ("packed_bytes", "unquantised_bytes", "host_store_bytes")
    assert [first[key] for key in same] == [second[key] for key in same]
    assert first["packed_bytes"] == generated["packed_bytes"] > 0 == plain["packed_bytes"]
    assert plain["unquantised_bytes"] > first["unquantised_bytes"]
    assert set(first["stage_seconds"]) == {"read", "quantise", "write"}
    assert set(generated["stage_seconds"]) == {"read", "quantise"}
    assert second["floor_seconds"] == second["stage_seconds"]["read"]
    assert first["seconds_over_floor"] == first["seconds"] / first["floor_seconds"]
    assert first["host_peak_bytes"] >= first["host_steady_bytes"]
    shown = capsys.readouterr().out
    assert "refused: The cache has no such base" in shown
    assert "cache-write" in shown


def test_generated_weights_are_a_load_s_own(bench: Any, tmp_path: Path) -> None:
    (work,) = works(bench, tmp_path, "--methods", "generated")
    bench.load_measure.write_checkpoint(work)
    holes = [path.stat() for path in Path(work.checkpoint).glob("*.safetensors")]
    assert sum(stat.st_blocks * 512 for stat in holes) < sum(stat.st_size for stat in holes)
    pool = bench.load_generated.Pool(0, torch.device("cpu"), nbytes=1 << 20)
    model = bench.load_measure._load(work, pool=pool)
    weights = [model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.gate_proj.weight]
    assert not torch.equal(weights[0].data, weights[1].data)
    assert len(weights[0].data.unique()) > 100
    device = torch.device("cpu")
    found = bench.load_measure._verified(work, model, device, pool=pool)
    assert found["mismatched"] == 0
    weights[1].data[5] ^= 1
    found = bench.load_measure._verified(work, model, device, pool=pool)
    assert found["mismatched"] == 1
    assert found["first"]["tensor"] == "model.layers.0.mlp.gate_proj.weight:data"


def test_mapped_files_of_a_memory_disk_are_left_out(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mmap

    memory = bench.load_memory
    monkeypatch.setattr(memory, "memory_disk", lambda path: True)
    counted = 100 << 20
    monkeypatch.setattr(memory, "_counted", lambda: counted)
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 << 20))
    with memory.HostMemoryWatch(tmp_path) as watch, file.open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert watch.now() == counted - (8 << 20)
    assert watch.before == counted
    assert watch.peak == 0


def test_a_method_that_ends_badly_is_reported(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work,) = works(bench, tmp_path, "--methods", "streamed")
    for code, outcome in ((1, "failed"), (-9, "killed"), (None, "too slow")):
        monkeypatch.setattr(
            bench.load_cost, "_start", lambda *a, code=code, **k: (code, "OSError: disk")
        )
        found = bench.load_cost.in_a_process(work, timeout=3.0)
        assert found["outcome"] == outcome
        record = bench.load_cost.record_of(work, found, run_id="r", command="c", date="d")
        assert record["seconds"] is record["floor_seconds"] is None
        assert outcome in bench.load_cost.table([record])


def test_bad_input_is_named(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no method 'magic'"):
        works(bench, tmp_path, "--methods", "magic")
    assert "load_cost" in sys.modules
