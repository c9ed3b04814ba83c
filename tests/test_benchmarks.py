"""The benchmarks: what they measure, record and print, on a CPU with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_benchmarks import cost, here, scripts

FIELDS = {
    *("kind", "method", "family", "shape", "precision", "seq_len", "batch", "rank", "dropout"),
    *("settings", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"),
    *("step_seconds", "bytes_streamed_per_step", "link_bytes_per_second", "link_floor_seconds"),
    *("resident_units", "graph_replays", "eager_blocks", "run_id", "command", "stack", "date"),
}


@pytest.fixture
def bench() -> Iterator[SimpleNamespace]:
    with scripts() as found:
        yield found


def test_training_cost_records_every_method_of_a_run(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "poros:optimizer-state=host,peft-checkpointing,accelerate-offload,unsloth"
    records = bench.training_cost.run(
        cost(
            bench,
            *("--methods", methods, "--seq-len", "8", "--layers", "2"),
            *("--prepare", "offload_activations=true"),
        ),
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
    assert streamed["bytes_streamed_per_step"] > streamed["activation_bytes_per_step"] > 0
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
    assert "offload_activations=True" in shown


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
        (["--methods", "poros", "--sweep", "colour=red"], "'colour' is none of"),
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


def test_sweeps_multiply_and_what_is_poros_own_is_swept_for_poros_only(bench: Any) -> None:
    todo = cost(
        bench,
        *("--methods", "poros,peft,poros:seq-len=4"),
        *("--sweep", "seq-len=8,16", "--sweep", "block-size=1,all"),
    )
    assert [(work.method, work.seq_len, work.block_size) for work in todo] == [
        *(("poros", 8, 1), ("poros", 8, "all"), ("poros", 16, 1), ("poros", 16, "all")),
        *(("peft", 8, 1), ("peft", 16, 1)),
        *(("poros", 4, 1), ("poros", 4, "all")),
    ]


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
    options = bench.cost_options.arguments(line, about=None, data=True)
    options.methods = bench.real_loop.methods_at_paddings(options.methods, ("none", "8"))
    made = bench.training_cost.run(
        bench.cost_options.works(options),
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
