"""More than one forward before a backward, more than one backward, and forwards in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from poros_core.errors import StateError
from semantics.arms import BF16, FP32, NF4, Arm, Recipe, batches, layers_of, twins


@pytest.mark.parametrize(
    ("recipe", "count", "sizes"),
    [
        pytest.param(NF4, 2, (1, 2, "all"), id="nf4-2"),
        pytest.param(FP32, 3, (1,), id="fp32-3"),
        pytest.param(NF4, 3, (1, 2, "all"), id="nf4-3", marks=pytest.mark.slow),
    ],
)
def test_several_forwards_with_different_masks(
    recipe: Recipe, count: int, sizes: tuple[Any, ...]
) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for seed in range(2):
            losses = [arm.model(**batch).loss for batch in batches(count, seed=seed)]
            torch.stack(losses).sum().backward()
            arm.note("loss", losses)
            arm.step(optimizer)

    twins(script, recipe, sizes=sizes)


@pytest.mark.parametrize("order", ["same", "reverse"])
def test_several_forwards_then_their_backwards(order: str) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for seed in range(2):
            losses = [arm.model(**batch).loss for batch in batches(3 - seed, seed=seed)]
            for loss in losses if order == "same" else reversed(losses):
                loss.backward()
                arm.note_grads("so far")
            arm.step(optimizer)

    twins(script)


def test_a_loss_that_is_dropped() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch, other in zip(batches(2), batches(2, seed=2), strict=True):
            arm.note("dropped", arm.model(**other).loss)
            arm.model(**batch).loss.backward()
            arm.step(optimizer)

    twins(script)


def _no_grad(arm: Arm, batch: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        arm.note("between", arm.model(**batch).logits)


def _evaluation(arm: Arm, batch: dict[str, torch.Tensor]) -> None:
    arm.model.eval()
    with torch.no_grad():
        arm.note("between", arm.model(**batch).logits)
    arm.model.train()


def _inference_mode(arm: Arm, batch: dict[str, torch.Tensor]) -> None:
    arm.model.eval()
    with torch.inference_mode():
        logits = arm.model(**batch).logits
    arm.note("between", logits)
    arm.model.train()


def _evaluation_with_gradients(arm: Arm, batch: dict[str, torch.Tensor]) -> None:
    arm.model.eval()
    arm.note("between", arm.model(**batch).logits)
    arm.model.train()


def _generation(arm: Arm, batch: dict[str, torch.Tensor]) -> None:
    arm.model.eval()
    arm.note("between", arm.model.generate(batch["input_ids"][:1], max_new_tokens=2))
    arm.model.train()


@pytest.mark.parametrize(
    "between",
    [_no_grad, _evaluation, _inference_mode, _evaluation_with_gradients, _generation],
)
def test_forward_between_a_forward_and_its_backward(
    between: Callable[[Arm, dict[str, torch.Tensor]], None],
) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch, other in zip(batches(2), batches(2, seed=3), strict=True):
            loss = arm.model(**batch).loss
            between(arm, other)
            loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    twins(script)


def test_eval_mode_set_and_left_before_the_backward() -> None:
    """The recompute runs in the forward's mode and leaves the caller's as it is."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            arm.model.train()
            loss = arm.model(**batch).loss
            arm.model.eval()
            loss.backward()
            assert not any(module.training for module in arm.model.modules())
            arm.step(optimizer)

    twins(script)


def test_backward_of_a_forward_in_eval_mode() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.model.eval()
        for batch in batches(2):
            loss = arm.model(**batch).loss
            arm.model.train()
            loss.backward()
            arm.model.eval()
            arm.step(optimizer)

    twins(script)


def test_random_state_changed_between_forward_and_backward() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(2)):
            loss = arm.model(**batch).loss
            torch.manual_seed(100 + number)
            loss.backward()
            arm.note("drawn", torch.rand(3))
            arm.step(optimizer)

    twins(script)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(NF4, id="nf4"), pytest.param(BF16, id="bf16", marks=pytest.mark.slow)],
)
def test_retain_graph_and_backward_twice(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            loss = arm.model(**batch).loss
            loss.backward(retain_graph=True)
            arm.note_grads("first")
            loss.backward()
            arm.step(optimizer)

    twins(script, recipe, sizes=(1, "all"))


def test_retain_graph_with_a_forward_in_between() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch, other in zip(batches(2), batches(2, seed=3), strict=True):
            loss = arm.model(**batch).loss
            loss.backward(retain_graph=True)
            arm.model(**other).loss.backward()
            loss.backward()
            arm.step(optimizer)

    twins(script)


def test_backward_twice_without_retain_graph_is_an_error_in_both_arms() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        batch, other = batches(2)
        loss = arm.model(**batch).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        arm.step(optimizer)
        arm.model(**other).loss.backward()
        arm.step(optimizer)

    twins(script)


def test_two_losses_of_one_forward() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            output = arm.model(**batch)
            output.loss.backward(retain_graph=True)
            output.logits.float().square().mean().backward()
            arm.step(optimizer)

    twins(script)


def test_a_filled_cache_with_gradients_is_refused_by_name() -> None:
    def script(arm: Arm) -> None:
        batch = batches(1, size=1)[0]
        with torch.no_grad():
            cache = arm.model(input_ids=batch["input_ids"], use_cache=True).past_key_values
        if arm.streamed:
            with pytest.raises(StateError, match="no_grad"):
                arm.model(input_ids=batch["input_ids"], past_key_values=cache)
        arm.train(batches(1))

    twins(script)


@pytest.mark.parametrize("where", [0, 2, -1])
def test_exception_in_a_forward(where: int) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(1), optimizer)
        target = layers_of(arm.model)[where].mlp
        handle = target.register_forward_hook(_raise)
        state = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            arm.model(**batches(1)[0])
        handle.remove()
        torch.set_rng_state(state)
        arm.train(batches(1, seed=1), optimizer)

    twins(script, sizes=(1, 2) if where == 2 else (1,))


def _raise(*_: object) -> None:
    raise ZeroDivisionError("planted")


class _Bomb(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Bomb.armed:
            raise ZeroDivisionError("planted")
        return gradient


@pytest.mark.parametrize("where", [0, 2, -1])
def test_exception_in_a_backward(where: int) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        target = layers_of(arm.model)[where].mlp
        target.register_forward_hook(lambda module, args, output: _Bomb.apply(output))
        arm.train(batches(1), optimizer)
        loss = arm.model(**batches(1)[0]).loss
        _Bomb.armed = True
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        _Bomb.armed = False
        del loss
        optimizer.zero_grad()
        arm.note("drawn", torch.rand(2))
        arm.train(batches(1, seed=1), optimizer)

    twins(script, sizes=(1, 2) if where == 2 else (1,))


@pytest.mark.parametrize("where", [0, -1])
def test_exception_in_the_recompute(where: int) -> None:
    """A hook that raises at the second call: a resident run never gets there."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        calls: list[int] = []

        def second_time(*args: object) -> None:
            calls.append(len(calls))
            if len(calls) == 2:
                _raise()

        handle = layers_of(arm.model)[where].mlp.register_forward_hook(second_time)
        loss = arm.model(**batches(1)[0]).loss
        found = torch.get_rng_state()
        if arm.streamed:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            assert torch.equal(torch.get_rng_state(), found)
        handle.remove()
        del loss
        optimizer.zero_grad()
        arm.train(batches(1, seed=1), optimizer)

    twins(script)


def test_a_hook_that_is_gone_before_the_backward_runs_in_the_recompute() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        mlp = layers_of(arm.model)[2].mlp
        handle = mlp.register_forward_hook(lambda module, args, output: output * 1.5)
        loss = arm.model(**batches(1)[0]).loss
        handle.remove()
        loss.backward()
        arm.step(optimizer)

    twins(script)


def test_a_hook_that_came_after_the_forward_does_not() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        mlp = layers_of(arm.model)[2].mlp
        loss = arm.model(**batches(1)[0]).loss
        handle = mlp.register_forward_hook(lambda module, args, output: output * 1.5)
        loss.backward()
        handle.remove()
        arm.step(optimizer)

    twins(script)


def test_a_layer_hook_sees_the_layers_output_at_every_block_size() -> None:
    def script(arm: Arm) -> None:
        seen: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
            for layer in layers_of(arm.model)
        ]
        with torch.no_grad():
            arm.model(**batches(1)[0])
        for index, output in enumerate(seen):
            arm.note(f"layer {index}", output)
        for handle in handles:
            handle.remove()

    twins(script, sizes=(1, 2))


def test_a_loss_that_reaches_into_a_layer_is_an_error() -> None:
    def script(arm: Arm) -> None:
        taken: list[torch.Tensor] = []
        mlp = layers_of(arm.model)[2].mlp
        handle = mlp.register_forward_hook(lambda module, args, output: taken.append(output))
        loss = arm.model(**batches(1)[0]).loss
        handle.remove()
        arm.note("loss", loss.detach())
        if arm.streamed:
            with pytest.raises(StateError, match="from inside a decoder layer"):
                (loss + taken[0].square().mean()).backward()

    twins(script)


def test_exception_in_the_loss_after_the_decoder() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        batch = batches(1)[0]
        with pytest.raises((IndexError, RuntimeError)):
            arm.model(**{**batch, "labels": batch["labels"].clamp_min(0) + 1000})
        arm.train(batches(1, seed=1), optimizer)

    twins(script)
