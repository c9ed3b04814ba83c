"""The benchmarks: what they measure, record and print, on a CPU with a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FIELDS = {
    *("kind", "method", "family", "shape", "precision", "seq_len", "batch", "rank", "dropout"),
    *("settings", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"),
    *("step_seconds", "bytes_streamed_per_step", "link_bytes_per_second", "link_floor_seconds"),
    *("resident_units", "graph_replays", "eager_blocks", "run_id", "command", "stack", "date"),
}


@pytest.fixture
def bench() -> Iterator[SimpleNamespace]:
    """Give the benchmark scripts' modules, found as the scripts find them."""
    sys.path.insert(0, str(BENCHMARKS))
    names = (
        *("training_cost", "cost_work", "cost_measure", "cost_table", "direct_weights"),
        *("real_loop", "step_profile", "trace_reading", "plots", "emulated_cards"),
    )
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))


def cost(bench: Any, *argv: str) -> list[Any]:
    line = ["--shape", "tiny", "--direct", "yes", "--steps", "10", "--warmup", "1", *argv]
    found: list[Any] = bench.training_cost.works(bench.training_cost.arguments(line))
    return found


def here(bench: Any) -> Any:
    """Return what measures in this process, so that a test imports torch once."""
    return lambda work, path: json.loads(json.dumps(bench.cost_measure.outcome(work, path)))


def test_training_cost_records_every_method_of_a_run(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "poros:optimizer-state=host,peft-checkpointing,accelerate-offload,unsloth"
    records = bench.training_cost.run(
        cost(bench, "--methods", methods, "--seq-len", "8", "--layers", "2"),
        runner=here(bench),
        checkpoint=lambda work: None,
        json_dir=tmp_path,
        command="python benchmarks/training_cost.py",
    )
    written = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert sorted(r["method"] for r in written) == sorted(r["method"] for r in records)
    assert all(record.keys() >= FIELDS for record in written)
    assert {record["run_id"] for record in written} == {records[0]["run_id"]}
    streamed, resident, offloaded, absent = records
    assert streamed["losses"] == resident["losses"]
    assert len(streamed["step_seconds_all"]) == 10
    assert streamed["step_seconds"]["min"] <= streamed["step_seconds"]["median"]
    assert streamed["bytes_streamed_per_step"] > streamed["optimizer_bytes_per_step"] > 0
    assert streamed["eager_blocks"] == 10 * 2 * 2
    assert resident["bytes_streamed_per_step"] == resident["eager_blocks"] == 0
    for figure in ("peak_allocated_bytes", "peak_device_bytes", "link_floor_seconds"):
        assert streamed[figure] is None
    assert offloaded["outcome"] == absent["outcome"] == "refused"
    assert "dispatched on the CPU" in offloaded["error"]
    assert offloaded["step_seconds"] is None
    shown = capsys.readouterr().out
    assert "refused: unsloth is not installed" in shown
    assert "optimizer_state=host" in shown


def test_accelerate_offload_trains_a_plain_base(bench: Any) -> None:
    offloaded, resident = cost(
        bench,
        *(
            "--methods",
            "accelerate-offload,peft:chunk=5",
            "--seq-len",
            "8",
            "--precision",
            "bf16",
            "--layers",
            "1",
        ),
    )
    found = [here(bench)(work, None) for work in (offloaded, resident)]
    assert [each["outcome"] for each in found] == ["trained", "trained"]
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-3)


def test_the_floor_is_the_bytes_over_the_runs_highest_rate(bench: Any, tmp_path: Path) -> None:
    def runner(work: Any, path: Path | None) -> dict[str, Any]:
        rate = 50e9 if work.method == "poros" else 55e9
        return {
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


def test_a_method_that_fails_is_reported_and_the_run_goes_on(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = cost(bench, "--methods", "poros")[0]
    for code, outcome in ((1, "failed"), (-9, "killed"), (None, "too slow")):
        monkeypatch.setattr(
            bench.training_cost, "_start", lambda *a, code=code, **k: (code, "OSError: disk")
        )
        found = bench.training_cost.in_a_process(work, None, timeout=3.0)
        assert found["outcome"] == outcome
        record = bench.training_cost.record_of(
            work, found, run_id="r", link=None, command="c", date="d"
        )
        assert record["step_seconds"] is None
        assert outcome in bench.cost_table.table([record])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--methods", "magic"], "no method 'magic'"),
        (["--methods", "poros:colour=red"], "'colour' is none of"),
        (["--methods", "poros", "--steps", "9"], "10 steps or more"),
        (["--methods", "poros", "--prepare", "odd"], "no NAME=VALUE"),
    ],
)
def test_bad_input_is_named(bench: Any, argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(bench, *argv)


def test_settings_of_a_run_and_of_a_method(bench: Any) -> None:
    plain, own = cost(
        bench,
        *("--methods", "poros,poros:block-size=4:graphs=off:vram-budget=16GB:seq-len=16"),
        *("--cap-bytes", "6e9", "--prepare", "offload=true", "--prepare", "where=disk"),
    )
    assert plain.cap_bytes == own.cap_bytes == 6_000_000_000
    assert (plain.block_size, own.block_size) == (1, 4)
    assert (own.graphs, own.vram_budget, own.subject().seq_len) == ("off", "16GB", 16)
    assert own.settings()["offload"] is True
    assert own.settings()["where"] == "disk"


def test_weights_are_drawn_in_place_where_a_checkpoint_is_large(bench: Any) -> None:
    Work = bench.cost_work.Work
    direct = {
        shape: Work(method="poros", shape=shape).draws_directly()
        for shape in ("tiny", "7b", "32b", "72b")
    }
    assert direct == {"tiny": False, "7b": False, "32b": True, "72b": True}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Write 20 tokenised records of 4 to 16 tokens."""
    from poros_core.gate.tensor_file import write_tensors

    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 17, (20,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.randint(3, 96, (int(offsets[-1]),), generator=generator)
    tensors = {"ids": ids, "offsets": offsets, "prompt_len": lengths // 2}
    path = tmp_path / "records.safetensors"
    write_tensors(
        path,
        {name: tensor.shape for name, tensor in tensors.items()},
        dtype=torch.int64,
        make=tensors.__getitem__,
    )
    return path


def test_real_loop_trains_both_arms_at_raw_and_padded_lengths(
    bench: Any, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--shape", "tiny", "--layers", "1", "--data", str(records), "--direct", "yes"]
    line += ["--batch", "1", "--steps", "10", "--warmup", "2", "--methods", "poros,peft:pad-to=8"]
    options = bench.training_cost.arguments(line, data=True)
    options.methods = bench.real_loop.methods_at_paddings(options.methods, ("none", "8"))
    made = bench.training_cost.run(
        bench.training_cost.works(options),
        runner=here(bench),
        checkpoint=lambda work: None,
        json_dir=tmp_path / "out",
        command="python benchmarks/real_loop.py",
    )
    raw, resident, padded = made
    assert {record["kind"] for record in made} == {"real-loop"}
    assert [r["settings"]["pad_to_multiple_of"] for r in made] == [None, 8, 8]
    assert len(raw["widths"]) == 10
    assert any(width % 8 for width in raw["widths"])
    assert padded["widths"] == [-(-width // 8) * 8 for width in raw["widths"]]
    assert padded["widths"] == resident["widths"]
    assert padded["train_loss"] == resident["train_loss"]
    assert raw["graph_share"] == 0.0  # a CPU has no graphs
    assert resident["graph_share"] is None
    assert raw["eager_blocks"] == 10 * 2
    assert len(list((tmp_path / "out").glob("real-loop-*.json"))) == 3
    assert "pad_to_multiple_of=8" in capsys.readouterr().out


def test_cards_are_emulated_for_every_method(bench: Any) -> None:
    methods = bench.emulated_cards.methods_on_cards("poros:vram-budget=card,peft", "6,8.5")
    todo = cost(bench, "--methods", methods)
    assert [work.cap_bytes for work in todo] == [6_000_000_000] * 2 + [8_500_000_000] * 2
    assert [work.vram_budget for work in todo] == ["card", None] * 2
    settle = bench.cost_measure._with_budget
    assert settle(todo[0], {"allocator_limit_bytes": 5}).vram_budget == 5
    assert settle(todo[1], None) is todo[1]
    found = here(bench)(todo[0], None)
    assert found["outcome"] == "failed"
    assert "needs --cap-bytes and a GPU" in found["error"]
    common = {"outcome": "trained", "step_seconds": {"median": 0.7}, "within_cap": True}
    records = [
        point(**common, settings={"cap_bytes": 6_000_000_000, "vram_budget": "card"}),
        point(**{**common, "within_cap": False}, settings={"cap_bytes": 8_000_000_000}),
        point("peft", outcome="out of memory", settings={"cap_bytes": 6_000_000_000}),
    ]
    head, *rows = bench.emulated_cards.cards_table(records).splitlines()
    assert head.split() == ["6", "GB", "8", "GB"]
    assert [row.split() for row in rows] == [
        ["poros", "nf4", "card", "0.700", "s", "-"],
        ["poros", "nf4", "-", "0.700", "s,", "over"],
        ["peft", "nf4", "out", "of", "memory", "-"],
    ]


def test_out_of_memory_says_when(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = cost(bench, "--methods", "poros")[0]

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(bench.cost_measure.cost_loop, "train", full)
    found = here(bench)(work, None)
    assert found["outcome"] == "out of memory"
    assert found["error"] == "while training: CUDA out of memory. Tried to allocate"
    monkeypatch.setattr(bench.cost_measure, "build", full)
    assert here(bench)(work, None)["error"].startswith("while loading: CUDA out of memory")


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


def test_step_profile_adds_the_hosts_time_to_a_record(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    work = cost(bench, "--methods", "poros", "--seq-len", "8", "--profiled", "1", "--layers", "1")
    records = bench.training_cost.run(
        work, runner=here(bench), checkpoint=lambda work: None, json_dir=None, command="c"
    )
    assert records[0]["kind"] == "step-profile"
    assert records[0]["profile"]["host_seconds"] > 0
    assert records[0]["profile"]["trace"] is None
    assert records[0]["eager_blocks"] == 10 * 2
    trace = {"link_busy": 0.9, "gpu_busy": 0.5, "stalled": 0.25, "idle": 0.25, "launches": 40}
    trace |= {"launch_seconds": 0.02, "stall_seconds": {"forward 0": 0.002, "forward 1": 0.004}}
    profile = {"host_seconds": 0.1, "profiled_steps": 2, "trace": trace}
    lines = bench.step_profile.profile_table([{"method": "poros", "profile": profile}])
    assert "90.0 %" in lines
    assert "stall per block 1.500 ms a step; most: forward 1 2.00 ms" in lines
    assert "20     0.0100 s" in lines


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


@pytest.mark.parametrize("home", ["store", "device", "host"])
def test_direct_weights_are_the_same_wherever_they_are_put(bench: Any, home: str) -> None:
    config = bench.cost_work.Work(method="poros", shape="tiny").subject().config
    build = bench.direct_weights.direct_model
    ids = torch.arange(3, 19)[None]
    logits = []
    for place in ("device", home):
        model = build(config, precision="nf4", seed=3, device=torch.device("cpu"), home=place)
        logits.append(model(input_ids=ids).logits)
    assert torch.equal(*logits)
    first, second = (layer.mlp.up_proj.weight for layer in model.model.layers[:2])
    assert not torch.equal(first.data, second.data)
