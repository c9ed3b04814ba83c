"""The parity gate: what it calls exact, what makes it fail, and what voids it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from poros_core.demo_model import write_demo_checkpoint
from poros_core.errors import GateError
from poros_core.gate import GateOptions, arms, meter, run
from poros_core.gate.arms import Arm
from poros_core.gate.compare import SURFACES, Comparison, StepView
from poros_core.gate.data import make_batches, read_records
from poros_core.gate.evidence import Evidence
from poros_core.gate.fault import PlantedFault
from poros_core.gate.html_report import html_report
from poros_core.gate.meaning import proof
from poros_core.gate.meter import Meter
from poros_core.gate.options import Subject, subject_of
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.record import GateResult
from poros_core.gate.run import GateFiles, run_gate
from poros_core.gate.tensor_file import read_tensors, write_tensors
from poros_core.settings import Settings

CPU = torch.device("cpu")


def options(**changes: Any) -> GateOptions:
    return GateOptions(**{"family": "qwen2", "shape": "tiny", "steps": 3, **changes})


class Tamper:
    """An observer that does something to the arms before their first step."""

    def __init__(self, change: Callable[[Mapping[str, Arm]], object]) -> None:
        self._change = change

    def phase(self, text: str) -> None: ...

    def arms_ready(self, arms: Mapping[str, Arm]) -> None:
        self._change(arms)

    def step(self, done: int, total: int, loss: float) -> None: ...


# exact


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> GateResult:
    return run_gate(options(dropout=0.1, accumulate=2), command="poros gate ...")


def test_streamed_equals_resident(exact: GateResult) -> None:
    record = exact.record
    assert (exact.verdict, exact.exit_status, exact.divergence) == ("exact", 0, None)
    assert set(record["surfaces"]) == {
        "loss",
        "adapter_weights",
        "grad_norms",
        "optimizer_state",
    }
    for surface in record["surfaces"].values():
        assert surface == {"exact": True, "max_abs_difference": 0.0, "first_divergence": None}
    assert record["control_exact"] is True
    assert record["steps_compared"] == 3


@pytest.mark.parametrize("plant_fault", [False, True])
def test_without_a_control(plant_fault: bool, tmp_path: Path) -> None:
    found = run_gate(options(control=False, plant_fault=plant_fault))
    record = found.record
    assert found.verdict == ("diverged" if plant_fault else "exact")
    assert record["arms"].keys() == {"resident", "streamed"}
    assert (record["control"], record["control_exact"]) == (None, None)
    assert "--no-control" not in record["proof"], "a planted fault needs no control"
    apart = proof({**record, "verdict": "diverged", "planted_fault": None})
    assert apart.endswith("run it again without --no-control.")
    assert html_report(record)
    with pytest.raises(GateError, match="--write-fingerprints needs the control"):
        run_gate(options(control=False), files=GateFiles(write_fingerprints=tmp_path / "f"))


def test_the_record_is_complete(exact: GateResult) -> None:
    record = json.loads(json.dumps(exact.record))
    assert record.keys() >= {
        *("kind", "family", "shape", "precision", "loader", "steps", "seq_len", "accumulate"),
        *("dropout", "block_size", "settings", "surfaces", "control_exact", "verdict", "arms"),
        *("seed", "batch", "rank", "command", "stack", "date"),
    }
    assert record["kind"] == "training-parity"
    assert (record["family"], record["shape"], record["loader"]) == ("qwen2", "tiny", "auto")
    assert (record["seq_len"], record["batch"], record["rank"]) == (32, 2, 4)
    assert record["command"] == "poros gate ..."
    measured = {"peak_allocated_bytes", "peak_reserved_bytes", "step_seconds"}
    assert record["arms"]["resident"].keys() == measured
    assert record["arms"]["streamed"].keys() >= measured | {
        *("bytes_streamed_per_step", "resident_units", "graph_replays", "eager_blocks"),
    }
    assert record["arms"]["streamed"]["eager_blocks"] == 4 * 2 * 2
    assert record["arms"]["streamed"]["resident_units"] == 0
    assert record["stack"].keys() >= {
        *("gpu", "driver", "cuda", "torch", "transformers", "peft", "bitsandbytes"),
        *("python", "poros", "poros_commit"),
    }
    assert record["stack"]["torch"] == torch.__version__
    assert record["date"].endswith("+00:00")


def test_the_record_shows_that_every_layer_streamed(exact: GateResult) -> None:
    streamed = exact.record["arms"]["streamed"]["bytes_streamed_per_step"]
    assert streamed >= exact.record["evidence"]["least_bytes_streamed_per_step"] > 0
    assert exact.record["evidence"]["adapter_tensors_trained"] == 4 * 7 * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": Settings(block_size=3)},
        {"settings": Settings(block_size="all"), "precision": "bf16"},
        pytest.param(
            {"shape": "tiny-sliding", "batch": 1, "settings": Settings(block_size=2)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"load_strategy": "standard", "seed": 3, "checkpointing": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["blocks of three", "one block, bf16", "sliding window", "standard load, checkpointing"],
)
def test_exact_with_other_settings(changes: dict[str, Any]) -> None:
    result = run_gate(options(**changes))
    assert (result.verdict, result.void_reasons) == ("exact", [])


def test_global_state_is_put_back() -> None:
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(False)
    with pytest.raises(GateError):
        run_gate(options(data=Path("nowhere.safetensors")))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads


@pytest.mark.gpu
def test_exact_on_a_gpu() -> None:
    # three steps: those in which both peaks are taken
    result = run_gate(options(steps=3, dropout=0.1, accumulate=2))
    assert (result.verdict, result.void_reasons) == ("exact", [])
    for arm in result.record["arms"].values():
        assert 0 < arm["peak_allocated_bytes"] <= arm["peak_reserved_bytes"]


class FakeDevice:
    """What the meter asks of torch.cuda, with figures that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.workspaces = 0
        monkeypatch.setattr(meter, "drop_workspaces", self.drop_workspaces)
        for name, read in {
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak_allocated,
            "max_memory_reserved": lambda device: self.peak_reserved,
            "reset_peak_memory_stats": lambda device: self.forget(),
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, read)

    def forget(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def drop_workspaces(self) -> None:
        self.allocated -= self.workspaces
        self.workspaces = 0

    def make_workspace(self, nbytes: int) -> None:
        self.take(nbytes)
        self.workspaces += nbytes

    def take(self, nbytes: int, *, gap: int = 0) -> None:
        self.allocated += nbytes
        self.reserved += max(0, nbytes - gap)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def two_arms(device: FakeDevice) -> tuple[Meter, Meter]:
    """Meters of an arm that holds 1000 bytes and of one that holds 50."""
    meters = Meter(torch.device("cuda")), Meter(torch.device("cuda"))
    for one, nbytes in zip(meters, (1000, 50), strict=True):
        with one.building():
            device.take(nbytes)
    return meters


def test_an_arm_s_memory_leaves_out_what_the_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    one, two = two_arms(device)
    for _ in range(2):
        with one.step():
            device.take(500)
            device.take(-450, gap=0)
        with two.step():
            device.take(30, gap=20)
            device.take(-20, gap=0)
    # the first arm grew by 50 a step, the second by 10
    assert one.peak_allocated == 1000 + 50 + 500
    assert two.peak_allocated == 50 + 10 + 30
    assert two.peak_reserved is not None
    assert two.peak_reserved >= two.peak_allocated


def test_a_workspace_is_no_arm_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One arm makes it, and the other drops it, at every step."""
    device = FakeDevice(monkeypatch)
    one, two = two_arms(device)
    for _ in range(20):
        with one.step():
            device.make_workspace(30)
        with two.step():
            device.drop_workspaces()
            device.take(7)
            device.take(-7)
    assert one.peak_allocated == 1000 + 30
    assert two.peak_allocated == 50 + 7


# diverged


def test_a_planted_fault_is_found(
    gate_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "record.json"
    code, out, _ = gate_cli(
        *("--family", "qwen2", "--shape", "tiny", "--steps", "3", "--plant-fault"),
        *("--json", str(file)),
    )
    record = json.loads(file.read_text())
    planted = record["planted_fault"]["tensor"]
    assert code == 1
    assert planted.startswith("model.layers.2.")
    assert planted.endswith(".weight")
    assert planted in out
    assert "diverged: step 1, loss, micro-batch 0: 1 of 1 elements differ" in out
    assert record["verdict"] == "diverged"
    assert record["control_exact"] is True
    assert record["surfaces"]["loss"]["first_divergence"]["step"] == 1
    assert record["surfaces"]["loss"]["max_abs_difference"] > 0


@pytest.mark.parametrize("precision", ["nf4", "bf16"])
def test_a_planted_fault_is_one_bit(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def images(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        plan = arms.prepared_of(model)
        assert plan is None, "the fault comes before prepare"
        return {
            name: param.data.contiguous().view(-1).view(torch.uint8).clone()
            for name, param in model.named_parameters()
        }

    flipped: list[int] = []
    real = arms.plant

    def watched(model: torch.nn.Module, **rest: Any) -> PlantedFault:
        before = images(model)
        fault = real(model, **rest)
        for name, after in images(model).items():
            changed = (before[name] ^ after).nonzero().flatten().tolist()
            flipped.extend((before[name] ^ after)[changed].tolist())
            if changed:
                assert name.replace(".base_layer.", ".").endswith(fault.tensor)
                assert changed == [fault.byte]
        return fault

    monkeypatch.setattr(arms, "plant", watched)
    result = run_gate(options(plant_fault=True, precision=precision, seed=5))
    assert result.verdict == "diverged"
    assert flipped == [1 << 6]


def test_a_change_after_some_steps_is_found_at_its_step() -> None:
    def disturb(arms: Mapping[str, Arm]) -> None:
        arm, calls = arms["streamed"], []

        def nudge(*_: object) -> None:
            calls.append(1)
            if len(calls) == 2:
                name = next(name for name in arm.params if "layers.3.mlp.down_proj.lora_B" in name)
                arm.params[name].data.flatten()[7] += 1e-3

        arm.optimizer.register_step_post_hook(nudge)

    result = run_gate(options(), observer=Tamper(disturb))
    assert result.verdict == "diverged"
    assert result.divergence is not None
    assert (result.divergence.step, result.divergence.surface) == (2, "adapter_weights")
    assert (result.divergence.differing, result.divergence.elements) == (1, 64 * 4)
    assert "layers.3.mlp.down_proj.lora_B" in result.divergence.tensor
    assert result.record["surfaces"]["loss"]["exact"] is True
    assert result.record["steps_compared"] == 2


def test_another_random_stream_is_found() -> None:
    def draw(arms: Mapping[str, Arm]) -> None:
        arms["streamed"].optimizer.register_step_post_hook(lambda *_: torch.rand(1))

    result = run_gate(options(), observer=Tamper(draw))
    assert result.divergence is not None
    assert result.divergence.surface == "loss"
    assert result.divergence.tensor == "random-number state 0"


# not deterministic


def test_a_control_that_differs_says_nothing_about_streaming() -> None:
    def noise(arms: Mapping[str, Arm]) -> None:
        layer = arms["control"].model.get_submodule("base_model.model.model.layers.1")
        layer.register_forward_hook(lambda module, args, output: output * (1 + 2**-20))

    result = run_gate(options(plant_fault=True), observer=Tamper(noise))
    assert (result.verdict, result.exit_status) == ("not-deterministic", 3)
    assert result.record["control_exact"] is False
    assert result.record["control"]["first_divergence"]["step"] == 1
    assert result.record["steps_compared"] == 0


# void

IDLE = """
from poros_core.hookspecs import hookimpl

class Handle:
    def __init__(self, resident):
        self.resident = resident
    def detach(self, device):
        pass
    def counters(self):
        return dict(bytes_streamed=0, copies=0, eager_blocks=0, graph_replays=0,
                    resident_units=self.resident)

class Idle:
    name = "idle"
    def attach(self, model, *, plan, settings, store):
        return Handle(len(plan.layers))

@hookimpl
def poros_runtimes():
    return (Idle(),)
"""


def test_a_run_in_which_nothing_streams_is_void(plugin_site: Any) -> None:
    plugin_site.install("poros-idle", plugin="idle", module="poros_idle", source=IDLE)
    result = run_gate(options(settings=Settings(runtime="idle")))
    assert (result.verdict, result.exit_status) == ("void", 2)
    assert all(surface["exact"] for surface in result.record["surfaces"].values())
    bytes_missing, none_streamed, resident = result.void_reasons
    assert none_streamed.startswith("all 4 layers stayed on the device")
    assert bytes_missing.startswith("a step streamed 0 bytes, and streaming every layer takes")
    assert resident == "4 units stayed on the device without a budget"


def test_one_step_is_void(gate_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = gate_cli("--family", "qwen2", "--shape", "tiny", "--steps", "1")
    assert code == 2
    assert "void: 28 adapter tensors had no finite non-zero gradient in any step" in out
    assert "ask for two --steps or more" in " ".join(out.split())


def test_a_tensor_without_gradients_is_void() -> None:
    def mute(arms: Mapping[str, Arm]) -> None:
        for arm in arms.values():
            name = next(name for name in arm.params if "layers.0.self_attn.q_proj.lora_B" in name)
            arm.params[name].register_hook(torch.zeros_like)

    result = run_gate(options(), observer=Tamper(mute))
    assert result.verdict == "void"
    # without B, A has no gradient either
    assert "2 adapter tensors" in result.void_reasons[0]
    assert "layers.0.self_attn.q_proj" in result.void_reasons[0]


def test_a_loss_that_is_no_number_is_void_and_not_a_divergence() -> None:
    def poison(arms: Mapping[str, Arm]) -> None:
        for arm in arms.values():
            layer = arm.model.get_submodule("base_model.model.model.layers.3")
            layer.register_forward_hook(lambda module, args, output: output * float("nan"))

    result = run_gate(options(steps=2), observer=Tamper(poison))
    assert result.verdict == "void"
    assert "56 adapter tensors" in result.void_reasons[0]


def test_a_planted_fault_that_changes_nothing_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = PlantedFault(unit="layer 2", tensor="a.weight", byte=0, bit=6)
    monkeypatch.setattr(arms, "plant", lambda *_, **__: fault)
    result = run_gate(options(plant_fault=True))
    assert (result.verdict, result.exit_status) == ("void", 2)
    assert result.void_reasons == [
        "a fault was planted in a.weight and nothing diverged, so the gate cannot fail"
    ]


def test_evidence_takes_the_step_that_streamed_least() -> None:
    def problems(*streamed: int) -> list[str]:
        return Evidence(
            counters=[{"bytes_streamed": count} for count in streamed],
            resident_units=0,
            least_bytes=100,
            untrained=[],
        ).problems()

    assert problems(100, 120) == []
    assert len(problems(120, 99)) == 1
    assert len(problems()) == 1


# comparing


def view(**surfaces: dict[str, torch.Tensor]) -> StepView:
    return StepView(surfaces)


@pytest.mark.parametrize(
    ("left", "right", "differing"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 4.0], 2),
        ([0.0, 1.0], [-0.0, 1.0], 1),
        ([1.0, float("nan")], [1.0, 1.0], 1),
        ([1.0, float("nan")], [1.0, float("nan")], 0),
        ([1.0], [1.0, 1.0], 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bits_are_compared(
    left: list[float], right: list[float], differing: int, dtype: torch.dtype, device: str
) -> None:
    comparison = Comparison()
    a, b = (torch.tensor(values, dtype=dtype, device=device) for values in (left, right))
    same = comparison.compare(view(loss={"x": a}), view(loss={"x": b}), step=1)
    assert same == (differing == 0) == comparison.exact
    assert (comparison.first.differing if comparison.first else 0) == differing


@pytest.mark.parametrize("together", [1, 20, 1 << 20])
def test_every_tensor_of_a_surface_counts(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """However many are compared at once."""
    monkeypatch.setattr("poros_core.gate.compare._TOGETHER", together)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.float32]
    left = {str(n): torch.zeros(1 + n, n, dtype=kinds[n % 4]) for n in range(9)}
    left["scalar"] = torch.tensor(0.0)
    assert Comparison().compare(view(loss=left), view(loss=left), step=1)
    for name in left:
        if left[name].numel():
            right = {key: tensor.clone() for key, tensor in left.items()}
            right[name].view(-1)[-1:] += 1
            comparison = Comparison()
            assert not comparison.compare(view(loss=left), view(loss=right), step=1)
            assert comparison.first is not None
            assert comparison.first.tensor == name


def test_a_large_tensor_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros_core.gate.compare._TOGETHER", 64)
    tensor = torch.zeros(9, 9)

    def cat(*args: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(torch, "cat", cat)
    assert Comparison().compare(view(loss={"x": tensor}), view(loss={"x": tensor}), step=1)


def test_a_tensor_that_one_arm_lacks_is_a_divergence() -> None:
    tensor = torch.ones(3)
    for left, right in [({"a": tensor}, {}), ({}, {"a": tensor})]:
        comparison = Comparison()
        assert not comparison.compare(view(grad_norms=left), view(grad_norms=right), step=4)
        assert comparison.first is not None
        assert (comparison.first.tensor, comparison.first.differing) == ("a", 3)


def test_the_first_surface_is_the_one_that_a_step_produces_first() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    comparison = Comparison()
    comparison.compare(
        view(**{name: {"x": one} for name in SURFACES}),
        view(**{name: {"x": two} for name in reversed(SURFACES)}),
        step=2,
    )
    assert comparison.first is not None
    assert comparison.first.surface == "loss"
    assert set(comparison.divergences) == set(SURFACES)


def test_nothing_compared_is_not_exact() -> None:
    assert not Comparison().exact


# data


def test_random_rows_differ_in_length_and_have_a_prompt() -> None:
    subject = subject_of(options(batch=3))
    batches = make_batches(subject, data=None, seed=0, device=CPU)
    seen = [next(batches) for _ in range(6)]
    assert len({batch["input_ids"].shape[1] for batch in seen}) > 1
    assert any((batch["attention_mask"] == 0).any() for batch in seen)
    for batch in seen:
        lengths = batch["attention_mask"].sum(1)
        assert len(lengths) == 3
        for row, length in enumerate(lengths.tolist()):
            labels = batch["labels"][row]
            kept = labels != -100
            assert not kept[0]
            assert not kept[length:].any()
            assert kept[length - 1]
            assert torch.equal(labels[kept], batch["input_ids"][row][kept])


def test_rows_can_be_padded_on_the_left_and_to_one_width() -> None:
    subject = subject_of(options(batch=3, padding="left", backward="joint", accumulate=2))
    batches = make_batches(subject, data=None, seed=0, device=CPU)
    plain = make_batches(subject_of(options(batch=3)), data=None, seed=0, device=CPU)
    for batch, other in [(next(batches), next(plain)) for _ in range(3)]:
        assert batch["input_ids"].shape == (3, 32)
        for row in range(3):
            length = int(other["attention_mask"][row].sum())
            for name, tensor in batch.items():
                assert torch.equal(tensor[row, 32 - length :], other[name][row, :length])
            assert not batch["attention_mask"][row, : 32 - length].any()
            assert (batch["labels"][row, : 32 - length] == -100).all()


@pytest.mark.parametrize(("pad", "used"), [(None, 0), (-1, 0), (7, 7), (96, 0)])
def test_a_batch_is_padded_with_a_token_of_the_vocabulary(pad: int | None, used: int) -> None:
    subject = subject_of(options(batch=2))
    subject = attrs.evolve(subject, config={**subject.config, "pad_token_id": pad})
    assert subject.pad_token == used


def test_a_batch_of_one_has_the_stated_length() -> None:
    subject = subject_of(options(batch=1, seq_len=24))
    batches = make_batches(subject, data=None, seed=0, device=CPU)
    assert {next(batches)["input_ids"].shape for _ in range(4)} == {(1, 24)}


def records_file(path: Path, lengths: list[int], prompts: list[int], *, token: int = 5) -> Path:
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    save_file(
        {
            "ids": torch.full((offsets[-1],), token, dtype=torch.int32),
            "offsets": torch.tensor(offsets),
            "prompt_len": torch.tensor(prompts),
        },
        path,
    )
    return path


def test_records_are_truncated_and_those_without_a_loss_left_out(tmp_path: Path) -> None:
    subject: Subject = subject_of(options(seq_len=16))
    path = records_file(tmp_path / "data", [10, 40, 40, 6], [4, 20, 3, 6])
    records = read_records(path, subject)
    assert [(len(record.ids), record.prompt) for record in records] == [(10, 4), (16, 3)]


def test_real_records_are_exact(tmp_path: Path) -> None:
    path = records_file(tmp_path / "data", [20, 9, 31], [4, 3, 8])
    result = run_gate(options(data=path))
    assert (result.verdict, result.record["data"]) == ("exact", "data")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: records_file(path, [8], [2], token=96), "vocabulary of tiny ends at 95"),
        (lambda path: records_file(path, [8], [8]), "No record .* longer --seq-len"),
        (lambda path: save_file({"ids": torch.zeros(1)}, path), "lacks offsets, prompt_len"),
        (lambda path: records_file(path, [8, 8], [2]), "1 prompts, 3 offsets that end at 16"),
        (lambda path: records_file(path, [16, -8, 8], [2, 1, 2]), "never falls"),
        (lambda path: records_file(path, [8, 8], [2, -3]), "prompt lengths below 0"),
        (lambda path: records_file(path, [8], [2], token=-1), "tokens or prompt lengths below 0"),
        (lambda path: path.write_text("no tensors"), "is no safetensors file"),
        (lambda path: None, "cannot be read"),
    ],
)
def test_data_that_does_not_fit(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "data")
    with pytest.raises(GateError, match=message):
        read_records(tmp_path / "data", subject_of(options()))


def test_tensor_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    write_tensors(
        tmp_path / "a",
        {name: tensor.shape for name, tensor in tensors.items()},
        dtype=torch.float32,
        make=tensors.__getitem__,
    )
    for read in (load_file(tmp_path / "a"), read_tensors(tmp_path / "a")):
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name what to run on"),
        (["--family", "qwen2"], "Name what to run on"),
        (["--family", "qwen2", "--shape", "tiny", "--model", "x"], "Name what to run on"),
        (["--shape", "tiny"], "--shape needs --family"),
        (["--family", "nope", "--shape", "tiny"], "no family 'nope'. Installed: "),
        (["--family", "qwen2", "--shape", "9b"], "has no shape '9b'. It has: tiny, "),
        (["--family", "qwen2", "--shape", "tiny", "--steps", "0"], "--steps must be 1"),
        (["--family", "qwen2", "--shape", "tiny", "--dropout", "1"], "--dropout must be"),
        (["--family", "qwen2", "--shape", "tiny", "--seq-len", "129"], "Give --seq-len 128"),
        (["--family", "qwen2", "--shape", "tiny", "--block-size", "5"], "the 4 layers of tiny"),
        (["--family", "qwen2", "--shape", "tiny", "--block-size", "x"], "block_size must be"),
        (["--family", "qwen2", "--shape", "tiny", "--precision", "int3"], "'int3'"),
        (["--family", "qwen2", "--shape", "tiny", "--load-strategy", "x"], "'x'"),
        (["--family", "qwen2", "--shape", "tiny", "--optimizer-state", "x"], "--optimizer-state"),
        (["--family", "qwen2", "--shape", "tiny", "--json", "no/where.json"], "folder that exists"),
        (["--model", "./nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_paragraph(
    gate_cli: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    code, out, err = gate_cli(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(GateError, match="is of family 'qwen2', not 'other'"):
        subject_of(GateOptions(model=str(tmp_path), family="other"))


def test_a_checkpoint_is_used_as_it_is(tmp_path: Path) -> None:
    config = {**subject_of(options()).config, "num_hidden_layers": 3}
    write_random_checkpoint(config, tmp_path, seed=4, dtype=torch.float32, device=CPU)
    before = sorted(tmp_path.iterdir())
    result = run_gate(GateOptions(model=str(tmp_path), steps=3, seq_len=16, batch=2, rank=2))
    assert (result.verdict, result.record["shape"]) == ("exact", str(tmp_path))
    assert result.record["evidence"]["adapter_tensors"] == 3 * 7 * 2
    assert sorted(tmp_path.iterdir()) == before


def test_random_weights_are_removed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(arms: Mapping[str, Arm]) -> None:
        assert list(tmp_path.glob("poros-gate-*/config.json"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_gate(options(), observer=Tamper(fail))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(GateError, match="Point TMPDIR at a disk with room"):
        run_gate(options())


def test_a_kernel_without_a_deterministic_version_is_named() -> None:
    with (
        pytest.raises(GateError, match="put_op does not have a deterministic implementation"),
        run._named_failures(),
    ):
        raise RuntimeError("put_op does not have a deterministic implementation, but you set ...")
    with pytest.raises(RuntimeError, match="other"), run._named_failures():
        raise RuntimeError("other")


# benchmarks/trainer_parity.py


@pytest.mark.long
@pytest.mark.parametrize("loop", ["trainer", "sft"])
def test_training_loops_give_equal_adapter_files(loop: str, tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "trainer_parity.py"
    file = tmp_path / "record.json"
    write_demo_checkpoint(tmp_path / "small", seed=0)
    command = [sys.executable, str(script), "--loop", loop, "--model", str(tmp_path / "small")]
    subprocess.run([*command, "--steps", "3", "--seq-len", "32", "--json", str(file)], check=True)
    record = json.loads(file.read_text())
    assert (record["kind"], record["verdict"]) == ("training-loop-parity", "exact")
    assert record["adapter_equal"] is True
    assert list(record["arms"]) == ["plain", "prepared", "poros"]
    assert record["arms"]["poros"]["counters"]["bytes_streamed"] > 0
