"""The benchmarks: what they measure, record and print, on a CPU with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_benchmarks import cost, found_of, here, scripts
from transformers import Trainer

from poros_core.errors import SettingsError

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
            *("--offload-activations", "yes"),
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
    found = [found_of(bench, work) for work in (offloaded, resident)]
    assert [each["outcome"] for each in found] == ["trained", "trained"]
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-3)


def act(monkeypatch: pytest.MonkeyPatch, bench: Any, *, says: str, then: str) -> None:
    """Let a process print a line to its file of outcomes for each work, and then do something."""
    text = (
        "import json, os, sys, time; job = json.load(sys.stdin); out = open(job['out'], 'a'); "
        f"works = job['works']; {says}; out.close(); {then}"
    )
    Popen = bench.cost_process.subprocess.Popen

    def start(command: list[str], **settings: Any) -> Any:
        return Popen([command[0], "-c", text], **settings)

    monkeypatch.setattr(bench.cost_process.subprocess, "Popen", start)


FIRST = "out.write(json.dumps({'outcome': 'trained', 'error': str(len(works))}) + '\\n')"


def test_a_method_that_fails_is_reported(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = cost(bench, "--methods", "poros")[0]
    for then, outcome, error in (
        ("sys.exit('OSError: disk')", "failed", "OSError: disk"),
        ("os.kill(os.getpid(), 9)", "killed", "by signal 9"),
        ("time.sleep(60)", "too slow", "stopped after 1 s"),
    ):
        with monkeypatch.context() as patch:
            act(patch, bench, says="pass", then=then)
            with bench.cost_process.Workers(timeout=1.0) as workers:
                [found] = workers.measure([work], None)
        assert found == {"outcome": outcome, "error": error}
        record = bench.training_cost.record_of(
            work, found, run_id="r", link=None, command="c", date="d"
        )
        assert record["step_seconds"] is None
        assert outcome in bench.cost_table.table([record])


def test_what_one_process_did_not_measure_the_next_one_does(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = cost(bench, "--methods", "poros", "--sweep", "block-size=1,2,3")
    act(monkeypatch, bench, says=FIRST, then="len(works) == 2 and sys.exit('too much')")
    with bench.cost_process.Workers(3) as workers:
        found = list(workers.measure(todo, None))
    assert [(each["outcome"], each["error"]) for each in found] == [
        ("trained", "3"),
        ("trained", "2"),
        ("failed", "too much"),
    ]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    work = cost(bench, "--methods", "poros", "--direct", "no")[0]
    act(monkeypatch, bench, says="assert job['checkpoint']", then="sys.exit('no room')")
    with (
        bench.cost_process.Workers() as workers,
        pytest.raises(RuntimeError, match="could not be written: no room"),
    ):
        bench.training_cost.checkpoint_for(work, tmp_path, workers=workers)


def test_one_process_measures_what_shares_a_base(bench: Any, tmp_path: Path) -> None:
    """Each starts from the same base and fresh adapters: as if it were alone."""
    todo = cost(
        bench,
        *("--methods", "poros:block-size=all:optimizer-state=host,peft-checkpointing,poros"),
        *("--layers", "2", "--seq-len", "4", "--batch", "1", "--sweep", "seq-len=4"),
    )
    groups = bench.cost_work.groups(todo, shared=True)
    assert [[work.method for work in group] for group in groups] == [
        ["poros", "poros"],
        ["peft-checkpointing"],
    ]
    records = bench.training_cost.run(
        todo,
        runner=here(bench),
        checkpoint=lambda work: None,
        json_dir=tmp_path,
        command="c",
        shared=True,
    )
    assert [record["measured_before_in_process"] for record in records] == [0, 1, 0]
    assert records[0]["settings"]["block_size"] == "all"
    assert records[0]["losses"] == records[1]["losses"] == records[2]["losses"]
    alone = cost(bench, "--methods", "poros,poros:cap-bytes=6e9,poros:profiled=1,unsloth,unsloth")
    assert [len(group) for group in bench.cost_work.groups(alone, shared=True)] == [1] * 5
    assert [len(group) for group in bench.cost_work.groups([*todo, *todo], shared=False)] == [1] * 6


def test_a_process_ends_where_the_device_is_not_clear(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = cost(bench, "--methods", "poros", "--layers", "1", "--sweep", "seq-len=4,5")
    measured = bench.cost_measure
    monkeypatch.setattr(measured.Bench, "measure", lambda self, work: {})
    monkeypatch.setattr(measured.Bench, "clear", lambda self: False)
    assert len(list(measured.outcomes(todo, None))) == 1
    monkeypatch.setattr(measured.Bench, "clear", lambda self: True)
    assert len(list(measured.outcomes(todo, None))) == 2


def test_rolled_weights_are_loaded_from_a_quantised_checkpoint(bench: Any, tmp_path: Path) -> None:
    [work] = cost(
        bench,
        *("--methods", "poros", "--direct", "auto", "--weights", "rolled", "--layers", "2"),
        *("--seq-len", "4", "--batch", "1"),
    )
    assert not work.draws_directly()
    bench.cost_models.write_checkpoint(work, tmp_path / "rolled")
    config = json.loads((tmp_path / "rolled" / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    [found] = here(bench)([work], tmp_path / "rolled")
    assert found["outcome"] == "trained"
    assert "rolled" in bench.cost_work.described(work)["weights"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--methods", "magic"], "no method 'magic'"),
        (["--methods", "poros:colour=red"], "'colour' is none of"),
        (["--methods", "poros", "--steps", "9"], "10 steps or more"),
        (["--methods", "poros", "--prepare", "odd"], "no NAME=VALUE"),
        (["--methods", "poros", "--prepare", "graphs=off"], "--prepare graphs is --graphs"),
        (["--methods", "poros:optimizer-state=disk"], "'disk' is none of device, host"),
        (["--methods", "poros:weights=rolled"], "rolled weights come from a checkpoint"),
        (["--methods", "poros", "--vram-budget", "12XB"], "--vram-budget must be a size"),
        (["--methods", "poros", "--vram-budget", "card"], "needs --cap-bytes"),
        (["--methods", "poros", "--sweep", "colour=red"], "'colour' is none of"),
    ],
)
def test_bad_input_is_named(bench: Any, argv: list[str], message: str) -> None:
    with pytest.raises((ValueError, SettingsError), match=message):
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


def test_records_that_are_not_there_are_named(bench: Any, tmp_path: Path) -> None:
    line = ["--shape", "tiny", "--data", str(tmp_path / "none"), "--methods", "poros"]
    with pytest.raises(ValueError, match="there is no file"):
        bench.cost_options.works(bench.cost_options.arguments(line, about=None, data=True))


def test_real_loop_trains_both_arms_at_raw_and_padded_lengths(
    bench: Any,
    records: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filters: list[bool] = []
    train = Trainer.train

    def noted(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        filters.append(self.args.logging_nan_inf_filter)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", noted)
    line = ["--shape", "tiny", "--layers", "1", "--data", str(records), "--direct", "yes"]
    line += ["--batch", "1", "--steps", "10", "--warmup", "2"]
    line += ["--methods", "poros,peft:pad-to=8:nan-filter=no"]
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
    assert [r["settings"]["logging_nan_inf_filter"] for r in made] == [True, False, True]
    assert filters == [True, False, True]
    assert len(raw["widths"]) == 10
    assert any(width % 8 for width in raw["widths"])
    assert padded["widths"] == [-(-width // 8) * 8 for width in raw["widths"]]
    assert padded["widths"] == resident["widths"]
    assert padded["train_loss"] == resident["train_loss"]
    assert raw["graph_share"] == 0.0  # a CPU has no graphs
    assert resident["graph_share"] is None
    assert raw["eager_blocks"] == 10 * 2
    assert len(list((tmp_path / "out").glob("real-loop-*.json"))) == 3
    said = capsys.readouterr().out
    assert "peft 32 tokens nf4 pad_to_multiple_of=8 logging_nan_inf_filter=False" in said
    assert said.count("logging_nan_inf_filter") == 1


def test_out_of_memory_says_when(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = cost(bench, "--methods", "poros")[0]

    def full(*args: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(bench.cost_measure.cost_loop, "train", full)
    found = found_of(bench, work)
    assert found["outcome"] == "out of memory"
    assert found["error"] == "while training: CUDA out of memory. Tried to allocate"
    monkeypatch.setattr(bench.cost_models, "_base", full)
    assert found_of(bench, work)["error"].startswith("while loading: CUDA out of memory")


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
