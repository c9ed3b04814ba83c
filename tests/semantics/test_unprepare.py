"""``unprepare`` restores the model exactly, and ``prepare`` changes no global state."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import poros
from poros_core.errors import PrepareError
from poros_core.prepare import prepared_of
from semantics.arms import (
    BF16,
    FP32,
    NF4,
    Arm,
    Recipe,
    batches,
    build,
    frozen_places,
    layers_of,
    twins,
)

RECIPES = [
    pytest.param(NF4, id="nf4"),
    pytest.param(BF16, id="bf16"),
    pytest.param(FP32, id="fp32"),
    pytest.param(Recipe(tied=True), id="tied"),
    pytest.param(NF4.with_lora(use_dora=True), id="dora"),
    pytest.param(NF4.with_lora(modules_to_save=["lm_head", "embed_tokens"]), id="saved"),
]


class Snapshot:
    """Everything that a model is: objects, bytes, and the attributes of every module."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.attributes = {
            name: {k: v for k, v in module.__dict__.items() if k not in _CONTAINERS}
            for name, module in self.modules.items()
        }
        self.members = {
            (name, kind): list(module.__dict__[kind].items())
            for name, module in self.modules.items()
            for kind in _CONTAINERS
            if kind in module.__dict__
        }
        self.objects = dict(model.named_parameters())
        self.flags = {n: (p.requires_grad, type(p)) for n, p in self.objects.items()}
        self.bytes = {
            name: (t.detach().clone(), t.dtype, t.device, t.stride())
            for name, t in [*frozen_places(model), *model.named_parameters()]
        }

    def check(self, model: nn.Module) -> None:
        """Fail unless the model is what it was."""
        now = Snapshot(model)
        assert list(now.modules) == list(self.modules)
        for name, module in self.modules.items():
            assert now.modules[name] is module
            found, was = now.attributes[name], self.attributes[name]
            assert found.keys() == was.keys(), (name, found.keys() ^ was.keys())
            changed = [k for k in was if found[k] is not was[k] and found[k] != was[k]]
            assert not changed, (name, changed)
        for key, members in self.members.items():
            assert [k for k, _ in now.members[key]] == [k for k, _ in members], key
            assert all(
                new is old for (_, new), (_, old) in zip(now.members[key], members, strict=True)
            ), key
        assert now.flags == self.flags
        for name, (value, *form) in self.bytes.items():
            found_value, *found_form = now.bytes[name]
            assert found_form == form, name
            assert torch.equal(found_value, value), name


_CONTAINERS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def _used(recipe: Recipe) -> Any:
    """Return a model that has run once: 4-bit layers cast their bias then, and PEFT's
    ``generate`` leaves an attribute behind."""
    model = build(recipe).eval()
    model.generate(batches(1)[0]["input_ids"][:1], max_new_tokens=2)
    return model.train()


def _prepare(model: Any, **options: Any) -> Any:
    return poros.prepare(model, verbose=False, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_at_once(recipe: Recipe) -> None:
    model = build(recipe)
    before = Snapshot(model)
    _prepare(model, block_size=2)
    assert poros.unprepare(model) is model
    before.check(model)
    assert prepared_of(model) is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_after_forward_backward_evaluation_and_generation(recipe: Recipe) -> None:
    model = _used(recipe)
    before = Snapshot(model)
    _prepare(model)
    model(**batches(1)[0]).loss.backward()
    model.eval()
    with torch.no_grad():
        model(**batches(1)[0])
        model.generate(batches(1)[0]["input_ids"][:1], max_new_tokens=3)
    model.train()
    poros.unprepare(model)
    model.zero_grad()
    before.check(model)


def test_memory_is_its_own_again() -> None:
    """The host stretches are not what the parameters hold afterwards."""
    model = _prepare(build(NF4))
    stretches = [image.buffer.bytes for image in prepared_of(model).store._images]
    ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes) for s in stretches]
    poros.unprepare(model)
    for name, tensor in frozen_places(model):
        assert not any(low <= tensor.data_ptr() < high for low, high in ranges), name


def test_resident_training_goes_on_exactly() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for seed in range(2):
            arm.prepare()
            arm.train(batches(1, seed=seed), optimizer)
            arm.unprepare()
            arm.train(batches(1, seed=seed + 7), optimizer)

    twins(script, late=True, sizes=(1, "all"))


def test_refused_while_a_backward_is_outstanding() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        one, two = (arm.model(**batch).loss for batch in batches(2))
        for loss in (one, two):
            if arm.streamed:
                with pytest.raises(PrepareError, match="outstanding"):
                    poros.unprepare(arm.model)
            loss.backward()
        arm.step(optimizer)
        arm.unprepare()
        arm.train(batches(1), optimizer)

    twins(script)


def test_allowed_once_the_loss_is_dropped() -> None:
    model = _used(NF4)
    before = Snapshot(model)
    _prepare(model)
    loss = model(**batches(1)[0]).loss
    with pytest.raises(PrepareError):
        poros.unprepare(model)
    del loss
    poros.unprepare(model)
    before.check(model)


def test_allowed_after_an_exception_in_the_backward() -> None:
    model = _used(NF4)
    before = Snapshot(model)
    _prepare(model)

    def burst(module: nn.Module, into: Any, out: Any) -> None:
        raise ZeroDivisionError

    handle = layers_of(model)[3].mlp.register_full_backward_hook(burst)
    loss = model(**batches(1)[0]).loss
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    poros.unprepare(model)
    layers_of(model)[3].mlp._is_full_backward_hook = None
    before.check(model)


def test_twice_is_refused_by_name() -> None:
    model = build(FP32)
    with pytest.raises(PrepareError, match="not prepared"):
        poros.unprepare(model)
    _prepare(model)
    with pytest.raises(PrepareError, match="unprepare"):
        _prepare(model)
    with pytest.raises(PrepareError, match="unprepare"):
        _prepare(model.get_base_model())
    poros.unprepare(model)
    _prepare(model)


def test_device_argument() -> None:
    model = _prepare(build(NF4))
    poros.unprepare(model, device="cpu")
    assert {t.device.type for _, t in frozen_places(model)} == {"cpu"}


def _global_state() -> dict[str, Any]:
    cuda: Any = torch.backends.cuda
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [
            part if isinstance(part, int | float | str) else part.tolist()
            for part in numpy.random.get_state()
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn-only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "sdpa": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "tf32": (cuda.matmul.fp32_precision, torch.backends.cudnn.benchmark),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_global_state_is_left_alone(deterministic: bool) -> None:
    found = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        model = build(NF4)
        batch = batches(1)[0]
        before = _global_state()
        _prepare(model)
        assert _global_state() == before
        loss = model(**batch).loss
        state = _global_state()
        loss.backward()
        assert _global_state() == state
        assert {**state, "torch": None} == {**before, "torch": None}
        poros.unprepare(model)
        assert _global_state() == state
    finally:
        torch.use_deterministic_algorithms(found)


def test_the_panel_and_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = build(FP32)
    capsys.readouterr()
    poros.prepare(model)
    shown = capsys.readouterr()
    assert "Poros prepared model" in shown.out + shown.err
    poros.unprepare(model)
    poros.prepare(model, verbose=False)
    model(**batches(1)[0]).loss.backward()
    poros.unprepare(model)
    quiet = capsys.readouterr()
    assert quiet.out + quiet.err == ""
