"""An optimizer whose state stands on the host between steps, against one that is left alone."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import poros
from poros_core.gate.arms import Arm
from poros_core.gate.options import GateOptions
from poros_core.gate.run import run_gate
from poros_core.offload import OffloadedOptimizer
from poros_core.state_stretch import StateStretch
from poros_families.qwen2 import QWEN2

Make = Callable[[Any], Optimizer]

KINDS: dict[str, Make] = {
    "adamw-single": lambda p: AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "adam-amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: Adafactor(p, lr=1e-2),
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    """Odd sizes, so that stretches have gaps; one of two bytes an element, one transposed."""
    generator = torch.Generator().manual_seed(0)

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    values = [one(33, 7), one(5), one(16, 3).t(), one(9, 9).bfloat16(), one(1), one(64, 4)]
    return [nn.Parameter(value) for value in values]


def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 5e-3}, {"params": params[2:]}]


def give_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = torch.empty_like(param).copy_(gradient)
    nn.utils.clip_grad_norm_([p for p in params if p.dtype == torch.float32], 0.5)


def train(
    params: Sequence[nn.Parameter], optimizer: Optimizer, steps: Sequence[int], skip: int = 0
) -> None:
    for step in steps:
        give_gradients(params, step)
        for param in params[len(params) - skip :]:
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_equal(
    left: tuple[Sequence[nn.Parameter], Optimizer], right: tuple[Sequence[nn.Parameter], Optimizer]
) -> None:
    for a, b in zip(left[0], right[0], strict=True):
        assert bits(a) == bits(b)
        ours, theirs = left[1].state.get(a, {}), right[1].state.get(b, {})
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert value.device == theirs[key].device
            assert (value.shape, value.stride()) == (theirs[key].shape, theirs[key].stride()), key
            assert bits(value) == bits(theirs[key]), key


def moving(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1
    ]


def assert_on_host(optimizer: Optimizer, handle: OffloadedOptimizer) -> None:
    spans = []
    for stretch in handle._stretches.values():
        start = stretch.buffer.bytes.data_ptr()
        spans.append((start, start + stretch.buffer.nbytes))
        assert stretch._memory is None
    assert moving(optimizer)
    for value in moving(optimizer):
        assert any(a <= value.data_ptr() and value.data_ptr() + value.nbytes <= b for a, b in spans)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_a_plain_optimizer(kind: str, device: str) -> None:
    plain, ours = parameters(device), parameters(device)
    reference, optimizer = KINDS[kind](groups(plain)), KINDS[kind](groups(ours))
    handle = poros.offload_optimizer(optimizer)
    assert handle.nbytes == 0
    for step in range(5):
        train(plain, reference, [step])
        train(ours, optimizer, [step])
        assert_equal((ours, optimizer), (plain, reference))
        assert_on_host(optimizer, handle)
    assert len(handle._stretches) == 2
    assert handle.nbytes >= sum(value.nbytes for value in moving(optimizer))


def test_a_changed_byte_of_the_host_memory_shows() -> None:
    plain, ours = parameters(), parameters()
    reference, optimizer = AdamW(plain), AdamW(ours)
    handle = poros.offload_optimizer(optimizer)
    train(plain, reference, [0])
    train(ours, optimizer, [0])
    (stretch,) = handle._stretches.values()
    stretch.buffer.bytes[3] ^= 1
    train(plain, reference, [1])
    train(ours, optimizer, [1])
    with pytest.raises(AssertionError):
        assert_equal((ours, optimizer), (plain, reference))


def test_the_state_is_elsewhere_during_the_step_and_gone_afterwards() -> None:
    params = parameters()
    optimizer = AdamW(params)
    handle = poros.offload_optimizer(optimizer)
    train(params, optimizer, [0])
    hosted = {value.data_ptr() for value in moving(optimizer)}
    seen: list[weakref.ref[torch.Tensor]] = []
    kept: list[torch.Tensor] = []

    def look(*_: object) -> None:
        seen.extend(weakref.ref(value) for value in moving(optimizer))
        kept.append(optimizer.state[params[0]]["exp_avg"])
        assert not hosted & {value.data_ptr() for value in moving(optimizer)}
        # with poisoned transit memory, what was brought in is gone from the host until it is back
        assert all(bool((s.buffer.bytes == 0xFF).all()) for s in handle._stretches.values())

    optimizer.register_step_pre_hook(look)
    train(params, optimizer, [1])
    assert len(seen) == len(moving(optimizer)) > 0
    assert kept[0].isnan().all()
    kept.clear()
    assert all(reference() is None for reference in seen)
    assert {value.data_ptr() for value in moving(optimizer)} == hosted


@pytest.mark.parametrize("before", [True, False], ids=["offload-first", "load-first"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_loaded(kind: str, before: bool) -> None:
    plain, ours = parameters(), parameters()
    reference, optimizer = KINDS[kind](plain), KINDS[kind](ours)
    train(plain, reference, [0, 1])
    with torch.no_grad():
        for a, b in zip(ours, plain, strict=True):
            a.copy_(b)
    saved = copy.deepcopy(reference.state_dict())
    if before:
        handle = poros.offload_optimizer(optimizer)
        train(ours, optimizer, [7])
        with torch.no_grad():
            for a, b in zip(ours, plain, strict=True):
                a.copy_(b)
    optimizer.load_state_dict(saved)
    if not before:
        handle = poros.offload_optimizer(optimizer)
    assert_on_host(optimizer, handle)
    assert_equal((ours, optimizer), (plain, reference))
    train(plain, reference, [2, 3])
    train(ours, optimizer, [2, 3])
    assert_equal((ours, optimizer), (plain, reference))
    assert_on_host(optimizer, handle)


def test_state_is_saved_and_goes_into_a_plain_optimizer() -> None:
    ours, other = parameters(), parameters()
    optimizer = AdamW(groups(ours))
    poros.offload_optimizer(optimizer)
    train(ours, optimizer, [0, 1])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    with torch.no_grad():
        for a, b in zip(other, ours, strict=True):
            a.copy_(b)
    plain = AdamW(groups(other))
    plain.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    train(ours, optimizer, [2])
    train(other, plain, [2])
    assert_equal((ours, optimizer), (other, plain))


def test_its_own_state_in_another_order_is_loaded_right() -> None:
    params = [nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))]
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    poros.offload_optimizer(optimizer)
    train(params, optimizer, [0])
    first, second = (bits(optimizer.state[param]["momentum_buffer"]) for param in params)
    saved = optimizer.state_dict()
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]
    optimizer.load_state_dict(saved)
    assert bits(optimizer.state[params[0]]["momentum_buffer"]) == second
    assert bits(optimizer.state[params[1]]["momentum_buffer"]) == first


def test_state_that_comes_later_is_picked_up() -> None:
    plain, ours = parameters(), parameters()
    reference, optimizer = AdamW(plain[:-1]), AdamW(ours[:-1])
    handle = poros.offload_optimizer(optimizer)
    for params, one in ((plain, reference), (ours, optimizer)):
        train(params[:-1], one, [0], skip=2)
        train(params[:-1], one, [1])
        one.add_param_group({"params": params[-1:], "lr": 1e-3})
        train(params, one, [2, 3])
    assert_equal((ours, optimizer), (plain, reference))
    assert_on_host(optimizer, handle)
    assert len(handle._stretches) == 2


class Replacing(Optimizer):
    """Gives its state new tensors in every step and lets two of them change places, keeps one in
    a list, and one that all parameters share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.table = torch.linspace(0.0, 1.0, 8)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["table"] = self.table
                    state["a"], state["b"] = torch.zeros_like(param), torch.ones_like(param)
                    state["history"] = [torch.zeros_like(param), None]
                state["a"], state["b"] = state["b"], state["a"] * 0.5 + param.grad
                state["history"][0].add_(state["b"])
                state["table"].add_(0.25)
                scale = state["table"].mean()
                param.sub_(0.01 * scale * (state["a"] + state["history"][0]))


def test_state_that_is_replaced_nested_or_shared() -> None:
    plain, ours = parameters()[:2], parameters()[:2]
    reference, optimizer = Replacing(plain), Replacing(ours)
    handle = poros.offload_optimizer(optimizer)
    for step in range(4):
        train(plain, reference, [step])
        train(ours, optimizer, [step])
        for a, b in zip(ours, plain, strict=True):
            assert bits(a) == bits(b)
            for key in ("a", "b", "table"):
                assert bits(optimizer.state[a][key]) == bits(reference.state[b][key])
        assert_on_host(optimizer, handle)
    tables = [optimizer.state[param]["table"] for param in ours]
    assert tables[0] is tables[1]


class Failing(AdamW):
    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise RuntimeError("no")
        return super().step(closure)


def test_a_step_that_fails_loses_nothing() -> None:
    plain, ours = parameters(), parameters()
    reference, optimizer = Failing(plain), Failing(ours)
    handle = poros.offload_optimizer(optimizer)
    for params, one in ((plain, reference), (ours, optimizer)):
        train(params, one, [0])
        one.fail = True
        with pytest.raises(RuntimeError):
            train(params, one, [1])
        one.fail = False
    assert_equal((ours, optimizer), (plain, reference))
    for params, one in ((plain, reference), (ours, optimizer)):
        train(params, one, [2])
    assert_equal((ours, optimizer), (plain, reference))
    assert_on_host(optimizer, handle)


@pytest.mark.parametrize("failed", [False, True], ids=["between-steps", "after-a-failed-step"])
def test_remove_puts_everything_back(failed: bool) -> None:
    plain, ours = parameters(), parameters()
    reference, optimizer = Failing(plain), Failing(ours)
    handle = poros.offload_optimizer(optimizer)
    train(plain, reference, [0, 1])
    train(ours, optimizer, [0, 1])
    if failed:
        optimizer.fail = True
        with pytest.raises(RuntimeError):
            optimizer.step()
        optimizer.fail = False
    buffers = [stretch.buffer for stretch in handle._stretches.values()]
    handle.remove()
    for buffer in buffers:
        buffer.bytes.fill_(0xFF)
    assert handle.nbytes == 0
    assert_equal((ours, optimizer), (plain, reference))
    train(plain, reference, [2])
    train(ours, optimizer, [2])
    assert_equal((ours, optimizer), (plain, reference))
    assert handle.nbytes == 0
    handle.remove()
    again = poros.offload_optimizer(optimizer)
    assert_on_host(optimizer, again)


def test_an_accelerated_optimizer_is_unwrapped() -> None:
    params = parameters()
    inner = AdamW(params)
    wrapped = Accelerator(cpu=True).prepare(inner)
    assert wrapped is not inner
    handle = poros.offload_optimizer(wrapped)
    train(params, wrapped, [0])
    assert_on_host(inner, handle)
    with pytest.raises(poros.PrepareError, match="on the host already"):
        poros.offload_optimizer(inner)


def test_what_is_offloaded_first_can_be_accelerated() -> None:
    plain, ours = parameters(), parameters()
    reference, inner = AdamW(plain), AdamW(ours)
    handle = poros.offload_optimizer(inner)
    train(plain, reference, [0, 1])
    train(ours, inner, [0])
    train(ours, Accelerator(cpu=True).prepare(inner), [1])
    assert_equal((ours, inner), (plain, reference))
    assert_on_host(inner, handle)


class OffloadAtStart(TrainerCallback):
    """Takes the optimizer that a Trainer made, after it loaded a checkpoint's state into it."""

    def __init__(self) -> None:
        self.handles: list[OffloadedOptimizer] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.handles.append(poros.offload_optimizer(kwargs["optimizer"]))


def trained(folder: Path, callbacks: Sequence[TrainerCallback]) -> dict[str, torch.Tensor]:
    """Train four steps of which the last two resume from a checkpoint; return what trains."""
    settings = {k: v for k, v in QWEN2.shapes["tiny"].items() if k != "model_type"}
    rows = [{"input_ids": [3 + i] * 6, "labels": [3 + i] * 6} for i in range(8)]
    for steps in (2, 4):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(Qwen2Config(**settings))
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
        poros.prepare(model, verbose=False)
        arguments = TrainingArguments(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        loop = Trainer(model, arguments, train_dataset=rows, callbacks=[*callbacks])
        loop.train(resume_from_checkpoint=steps > 2)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_resumes(tmp_path: Path) -> None:
    offload = OffloadAtStart()
    plain, ours = trained(tmp_path / "a", []), trained(tmp_path / "b", [offload])
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    first, second = (
        torch.load(tmp_path / side / "checkpoint-4" / "optimizer.pt", weights_only=True)
        for side in ("a", "b")
    )
    for number, state in first["state"].items():
        assert all(torch.equal(second["state"][number][key], state[key]) for key in state)
    assert all(handle._stretches for handle in offload.handles)


def test_an_optimizer_is_freed_with_its_state() -> None:
    params = parameters()
    optimizer = AdamW(params)
    handle = poros.offload_optimizer(optimizer)
    train(params, optimizer, [0])
    (stretch,) = handle._stretches.values()
    gone = [weakref.ref(optimizer), weakref.ref(stretch.buffer)]
    del handle, stretch, optimizer
    assert [reference() for reference in gone] == [None, None]


def bitsandbytes_optimizer(name: str, **settings: Any) -> Optimizer:
    import bitsandbytes.optim

    optimizer: Optimizer = getattr(bitsandbytes.optim, name)(parameters(), **settings)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.optim.LBFGS(parameters()), "LBFGS keeps one history.*torch.optim.AdamW"),
        (lambda: bitsandbytes_optimizer("PagedAdamW"), "PagedAdamW is a paged.*torch.optim.AdamW"),
        (lambda: bitsandbytes_optimizer("AdamW8bit"), "AdamW8bit is an 8-bit.*torch.optim.AdamW"),
        (lambda: bitsandbytes_optimizer("PagedAdamW8bit"), "PagedAdamW8bit is a paged"),
        (lambda: bitsandbytes_optimizer("Adam", optim_bits=8), "Adam is an 8-bit"),
        (lambda: AdamW(parameters(), differentiable=True), "differentiable=True"),
        (lambda: nn.Linear(2, 2), "takes a torch optimizer, not Linear"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    optimizer = make()
    before = dict(optimizer.__dict__)
    with pytest.raises(poros.PrepareError, match=message):
        poros.offload_optimizer(optimizer)
    assert optimizer.__dict__ == before


def test_state_that_is_no_plain_tensor_is_refused() -> None:
    params = parameters()[:1]
    optimizer = SGD(params)
    poros.offload_optimizer(optimizer)
    optimizer.state[params[0]]["x"] = torch.eye(3).to_sparse()
    with pytest.raises(poros.StateError, match="state 'x' is a Tensor of layout torch.sparse_coo"):
        train(params, optimizer, [0])


def test_host_memory_that_cannot_be_had_is_named_and_nothing_is_lost() -> None:
    def fail(*_: object, **__: object) -> None:
        raise poros.PrepareError("1 GB cannot be page-locked.")

    plain, ours = parameters(), parameters()
    reference, optimizer = AdamW(plain), AdamW(ours)
    handle = poros.offload_optimizer(optimizer)
    train(plain, reference, [0], skip=3)
    train(ours, optimizer, [0], skip=3)
    train(plain, reference, [1])
    message = "cannot be kept on the host. 1 GB cannot be page"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poros_core.state_stretch.HostBuffer", fail)
        with pytest.raises(poros.StateError, match=message):
            train(ours, optimizer, [1])
        with pytest.raises(poros.StateError, match=message):
            optimizer.step()
    assert_equal((ours, optimizer), (plain, reference))
    train(plain, reference, [2])
    train(ours, optimizer, [2])
    assert_equal((ours, optimizer), (plain, reference))
    assert_on_host(optimizer, handle)


def test_a_gate_with_the_state_of_the_streamed_arm_on_the_host() -> None:
    result = run_gate(
        GateOptions(family="qwen2", shape="tiny", steps=3, dropout=0.1, optimizer_state="host")
    )
    record = result.record
    assert (result.verdict, result.void_reasons) == ("exact", [])
    assert record["settings"]["optimizer_state"] == "host"
    assert record["arms"]["streamed"]["optimizer_state_host_bytes"] > 0
    assert "optimizer_state_host_bytes" not in record["arms"]["resident"]


def test_a_gate_sees_a_changed_bit_of_the_state_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bring_in = StateStretch.bring_in

    def damaged(
        self: StateStretch, memory: torch.Tensor | None, *, poison: bool
    ) -> list[torch.Tensor]:
        self.buffer.bytes[3] ^= 0x40
        return bring_in(self, memory, poison=poison)

    monkeypatch.setattr(StateStretch, "bring_in", damaged)
    result = run_gate(GateOptions(family="qwen2", shape="tiny", steps=3, optimizer_state="host"))
    assert result.verdict == "diverged"
    assert result.divergence is not None
    assert (result.divergence.step, result.divergence.surface) == (2, "optimizer_state")


def test_a_gate_whose_state_never_was_on_the_host_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arm, "offload", lambda self: None)
    result = run_gate(GateOptions(family="qwen2", shape="tiny", steps=3, optimizer_state="host"))
    assert (result.verdict, result.exit_status) == ("void", 2)
    (reason,) = result.void_reasons
    assert "no optimizer state stood on the host" in reason


@pytest.mark.gpu
def test_between_steps_the_device_holds_nothing_of_it() -> None:
    params = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(4)]
    optimizer = AdamW(params, fused=True)
    before = torch.cuda.memory_allocated()
    handle = poros.offload_optimizer(optimizer)
    for step in range(3):
        train(params, optimizer, [step])
        assert torch.cuda.memory_allocated() - before < 2**16
    assert handle.nbytes == 8 * 4 * 2**20
    assert all(value.is_cuda for value in moving(optimizer))
