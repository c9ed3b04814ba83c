"""What the benchmarks make of figures: floors, cards, traces, plots, a GPU's memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_benchmarks import cost, scripts


@pytest.fixture
def bench() -> Iterator[SimpleNamespace]:
    with scripts() as found:
        yield found


def test_the_floor_is_the_bytes_over_the_runs_highest_rate(bench: Any, tmp_path: Path) -> None:
    def runner(works: Any, path: Path | None) -> Iterator[dict[str, Any]]:
        [work] = works
        rate = 50e9 if work.method == "poros" else 55e9
        yield {
            "outcome": "trained",
            "error": None,
            "step_seconds": {"median": 0.3, "min": 0.2, "max": 0.4},
            "bytes_streamed_per_step": 11_000_000_000,
            "peak_device_bytes": 6_100_000_000,
            "graph_replays": 9,
            "eager_blocks": 1,
            "link": {"268435456": rate},
        }

    todo = cost(bench, "--methods", "poros,peft-checkpointing", "--cap-bytes", "6e9")
    streamed, resident = bench.training_cost.run(
        todo, runner=runner, checkpoint=lambda work: None, json_dir=tmp_path, command=""
    )
    assert streamed["link_bytes_per_second"] == resident["link_bytes_per_second"] == 55e9
    assert streamed["link_floor_seconds"] == pytest.approx(0.2)
    assert streamed["step_over_floor"] == pytest.approx(1.5)
    assert streamed["within_cap"] is False
    assert len(list(tmp_path.iterdir())) == 2
    table = bench.cost_table.table([streamed, resident])
    assert table.splitlines()[1].split()[-5:] == ["0.200", "1.500", "1.000", "90", "%"]


def test_cards_are_emulated_for_every_method(bench: Any) -> None:
    methods = bench.emulated_cards.methods_on_cards("poros:vram-budget=card,peft", "6,8.5")
    todo = cost(bench, "--methods", methods)
    assert [work.cap_bytes for work in todo] == [6_000_000_000] * 2 + [8_500_000_000] * 2
    assert [work.vram_budget for work in todo] == ["card", None] * 2
    settle = bench.cost_measure._with_budget
    assert settle(todo[0]).vram_budget == 6_000_000_000
    assert settle(todo[1]) is todo[1]
    common = {"outcome": "trained", "step_seconds": {"median": 0.7}, "within_cap": True}
    records = [
        point(**common, settings={"cap_bytes": 6_000_000_000, "vram_budget": "card"}),
        point(**{**common, "within_cap": False}, settings={"cap_bytes": 8_000_000_000}),
        point("peft", outcome="out of memory", settings={"cap_bytes": 6_000_000_000}),
    ]
    head, *rows = bench.emulated_cards.cards_table(records).splitlines()
    assert head.split() == ["6", "GB", "8", "GB"]
    assert [row.split() for row in rows] == [
        ["poros", "nf4", "budget=card", "0.700", "s", "-"],
        ["poros", "nf4", "-", "0.700", "s,", "over"],
        ["peft", "nf4", "out", "of", "memory", "-"],
    ]


class Gpu:
    """Stands for a GPU of 10 GB with 0.5 GB of context, and for NVML, which sees 0.1 GB more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = 0
        self.peak = 0
        self.fractions: list[float] = []
        stands_for: dict[str, Any] = {
            "mem_get_info": lambda device: (10e9 - 0.5e9 - self.reserved, 10e9),
            "memory_reserved": lambda device: self.reserved,
            "max_memory_reserved": lambda device: self.peak,
            "empty_cache": lambda: None,
            "set_per_process_memory_fraction": lambda value, device: self.fractions.append(value),
            "get_device_properties": lambda device: SimpleNamespace(uuid="4f"),
        }
        for name, value in stands_for.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr("ctypes.CDLL", lambda name: self)

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name == b"GPU-4f" else 6

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:
        if memory._obj.version != 0x2000028:  # 40 bytes, version 2
            return 25
        memory._obj.used = int(0.6e9 + self.reserved)
        return 0


def test_device_memory_takes_the_highest_count(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    memory = bench.device_figures.DeviceMemory(torch.device("cuda:0"))
    assert memory.sampled
    memory.restart()
    assert memory.peak == 600_000_000
    with memory.watching():
        gpu.reserved = int(3e9)
        deadline = time.monotonic() + 5
        while memory.peak < 3e9 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert memory.peak == 3_600_000_000
    gpu.reserved, gpu.peak = int(2e9), int(4e9)
    memory.look()
    assert memory.peak == 3_600_000_000
    assert memory.bound() == 4_600_000_000
    memory.restart()
    assert memory.peak == 2_600_000_000
    nothing = bench.device_figures.DeviceMemory(torch.device("cpu"))
    nothing.restart()
    assert (nothing.peak, nothing.now(), nothing.bound()) == (None, None, None)


def test_a_card_leaves_the_allocator_what_the_context_does_not_take(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch)
    cap = bench.device_figures.cap_memory
    found = cap(torch.device("cpu"), cap=6_000_000_000, reserve=600_000_000)
    assert found["context_bytes"] == 500_000_000
    assert found["allocator_limit_bytes"] == 4_900_000_000
    assert gpu.fractions == [pytest.approx(0.49)]
    with pytest.raises(ValueError, match="nothing left"):
        cap(torch.device("cpu"), cap=1_000_000_000, reserve=600_000_000)


def event(category: str, start: float, end: float, name: str = "") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}


def test_a_trace_says_who_was_busy_and_which_block_waited(bench: Any) -> None:
    label = "gpu_user_annotation"
    events = [
        {"ph": "M", "name": "process_name"},
        event("gpu_memcpy", 0, 60, "Memcpy HtoD (Pinned -> Device)"),
        event("kernel", 20, 40),
        event("kernel", 30, 50),  # on another stream
        event("kernel", 100, 140),  # 50 to 60 waits for the copy, 60 to 100 for nothing
        event("gpu_memcpy", 120, 160, "Memcpy HtoD (Pinned -> Device)"),
        event("gpu_memcpy", 170, 180, "Memcpy DtoH (Device -> Pinned)"),
        event("kernel", 160, 200),
        event(label, 20, 50, "poros forward block 0"),
        event(label, 100, 140, "poros forward block 1"),
        event(label, 160, 190, "poros backward block 1"),
        event(label, 0, 200, "something else"),
        event("cuda_runtime", 1, 4, "cudaLaunchKernel"),
        event("cuda_runtime", 5, 7, "cudaGraphLaunch"),
        event("cuda_runtime", 7, 99, "cudaEventSynchronize"),
        event("cpu_op", 0, 200, "aten::mm"),
    ]
    found = bench.trace_reading.read_profile(events)
    assert found.seconds == pytest.approx(200e-6)
    assert found.link_busy == pytest.approx(0.5)
    assert found.back_busy == pytest.approx(0.05)
    assert found.gpu_busy == pytest.approx(110 / 200)
    assert found.stalled == pytest.approx((20 + 10 + 20) / 200)
    assert found.idle == pytest.approx(40 / 200)
    assert (found.launches, found.launch_seconds) == (2, pytest.approx(5e-6))
    assert found.stall_seconds == pytest.approx(
        {"forward 0": 20e-6, "forward 1": 10e-6, "backward 1": 20e-6}
    )
    assert bench.trace_reading.read_profile([events[1]]) is None


def point(method: str = "poros", **changes: Any) -> dict[str, Any]:
    """Return a record with what plots read, changed; ``settings`` is changed field by field."""
    own = changes.pop("settings", {})
    settings = {"vram_budget": None, "block_size": 1, "optimizer_state": "device", **own}
    record = {
        **{"kind": "training-cost", "method": method, "shape": "32b", "precision": "nf4"},
        **{"layers": 64, "seq_len": 512, "batch": 1, "rank": 16, "dropout": 0.05, "run_id": "r"},
        **{"settings": settings, "step_seconds": {"median": 0.6}, "step_over_floor": 1.1},
        **{"peak_device_bytes": 6e9, "peak_allocated_bytes": 5e9, "date": "2026-01-01"},
    }
    return {**record, **changes}


def test_plots_read_what_belongs_on_a_line(bench: Any) -> None:
    budgets = [
        point(settings={"vram_budget": "8GB"}, peak_device_bytes=7e9),
        point(settings={"vram_budget": 16_000_000_000}, step_seconds={"median": 0.5}),
        point(settings={"vram_budget": "auto"}),
        point(settings={"vram_budget": "8GB"}, peak_device_bytes=7.5e9),
    ]
    peak, step = bench.plots.budget_panels(budgets)
    assert peak.lines == [bench.plots.Line("32B NF4, poros", [(8.0, 7.5), (16.0, 6.0)])]
    assert step.lines[0].points == [(8.0, 0.6), (16.0, 0.5)]
    cards = [
        point(method, settings={"vram_budget": "card", "cap_bytes": card})
        for method in ("poros", "peft")
        for card in (6_000_000_000, 8_000_000_000)
    ]
    names = [line.name for line in bench.plots.budget_panels(cards)[0].lines]
    assert names == ["32B NF4, peft, emulated cards", "32B NF4, poros, emulated cards"]
    lengths = [
        *(point(seq_len=n, run_id=f"{n}", step_over_floor=n / 1000) for n in (512, 2048)),
        point("peft-checkpointing", seq_len=512, run_id="512", step_seconds={"median": 1.2}),
        point("peft-checkpointing", seq_len=2048, run_id="2048", step_seconds={"median": 0.3}),
    ]
    floor, resident = bench.plots.token_panels([*budgets, *lengths])
    assert floor.lines[0].points == [(512.0, 0.512), (2048.0, 2.048)]
    assert resident.lines[0].points == [(512.0, 0.5), (2048.0, 2.0)]
    blocks = [point(settings={"block_size": size}) for size in (1, 4, "all")]
    peak, _ = bench.plots.block_panels([*blocks, *budgets])
    assert peak.lines == [bench.plots.Line("32B NF4, 512 tokens", [(1.0, 6.0), (4.0, 6.0)])]


def test_plots_are_drawn_from_a_folder(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    records = tmp_path / "records"
    arguments = ["--records", str(records), "--out", str(tmp_path / "plots")]
    assert bench.plots.main(arguments) == 2
    assert "there is no folder" in capsys.readouterr().err
    records.mkdir()
    failed = point(step_seconds=None, settings={"block_size": 8})
    other = {"kind": "real-loop"}
    made = [point(settings={"block_size": size}) for size in (1, 2)]
    for number, record in enumerate([other, failed]):
        (records / f"{number}.json").write_text(json.dumps(record))
    assert bench.plots.main(arguments) == 1
    for number, record in enumerate(made):
        (records / f"block-{number}.json").write_text(json.dumps(record))
    assert bench.plots.main(arguments) == 0
    drawn = list((tmp_path / "plots").iterdir())
    assert [path.name for path in drawn] == ["block-size.png"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")
