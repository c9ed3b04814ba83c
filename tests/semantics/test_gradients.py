"""Gradients by other ways than ``backward()``, hooks, and what trains changing on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semantics.arms import BF16, NF4, Arm, Recipe, batches, layers_of, twins

RECIPES = [
    pytest.param(NF4, id="nf4"),
    pytest.param(BF16, id="bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_autograd_grad(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        for batch in batches(2):
            loss = arm.model(**batch).loss
            arm.note("found", torch.autograd.grad(loss, list(arm.trainable().values())))
        assert all(p.grad is None for p in arm.trainable().values())
        arm.train(batches(1))

    twins(script, recipe, sizes=(1, 2))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_autograd_grad_of_some_parameters(layer: int) -> None:
    def script(arm: Arm) -> None:
        some = [p for n, p in arm.trainable().items() if f"layers.{layer}." in n]
        loss = arm.model(**batches(1)[0]).loss
        arm.note("found", torch.autograd.grad(loss, some))
        arm.train(batches(1))

    twins(script)


def test_backward_into_some_parameters() -> None:
    def script(arm: Arm) -> None:
        some = [p for n, p in arm.trainable().items() if "layers.1." in n]
        arm.model(**batches(1)[0]).loss.backward(inputs=some)
        arm.note_grads()

    twins(script)


def test_tensor_hooks_that_scale() -> None:
    def script(arm: Arm) -> None:
        calls: dict[str, int] = {}
        optimizer = arm.optimizer()

        def hook(name: str, factor: float) -> Any:
            def scale(gradient: torch.Tensor) -> torch.Tensor:
                calls[name] = calls.get(name, 0) + 1
                return gradient * factor

            return scale

        for number, (name, param) in enumerate(arm.trainable().items()):
            if number % 3 == 0:
                param.register_hook(hook(name, 0.5 + number / 10))
        for batch in batches(2):
            arm.model(**batch).loss.backward()
            arm.step(optimizer)
        assert set(calls.values()) == {2}

    twins(script, sizes=(1, 2))


def test_post_accumulate_hooks_that_step() -> None:
    """An optimizer inside the backward, as memory-saving recipes do."""

    def script(arm: Arm) -> None:
        order: list[str] = []
        optimizers = {n: torch.optim.AdamW([p], lr=0.01) for n, p in arm.trainable().items()}

        def hook(name: str) -> Any:
            def step(param: torch.Tensor) -> None:
                order.append(name)
                arm.note(f"grad.{name}", param.grad)
                optimizers[name].step()
                optimizers[name].zero_grad()

            return step

        for name, param in arm.trainable().items():
            param.register_post_accumulate_grad_hook(hook(name))
        for batch in batches(2):
            loss = arm.model(**batch).loss
            loss.backward()
            arm.note("loss", loss)
            arm.note_weights()
        assert len(order) == 2 * len(optimizers)
        arm.notes.sort(key=lambda note: note[0])

    twins(script)


def test_pre_hooks_and_gradient_of_the_logits() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            output = arm.model(**batch)
            output.logits.retain_grad()
            output.loss.backward()
            arm.note("logits.grad", output.logits.grad)
            arm.step(optimizer)

    twins(script)


def test_module_hooks_see_and_change_what_passes() -> None:
    """Hooks inside a block run again in the recompute; what they return counts both times."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        layers = layers_of(arm.model)
        layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.25)
        layers[2].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (
                args,
                {**kwargs, "hidden_states": kwargs["hidden_states"] * 0.75},
            ),
            with_kwargs=True,
        )
        layers[4].mlp.register_full_backward_hook(
            lambda module, into, out: tuple(g * 0.5 for g in into)
        )
        arm.train(batches(2), optimizer)

    twins(script, sizes=(1, 2))


def test_hooks_on_whole_layers() -> None:
    """A hook on a decoder layer sits at the boundary and runs once a step."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        calls: list[int] = []
        layers = layers_of(arm.model)

        def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return output * 1.125

        layers[1].register_forward_hook(after)
        layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.875, *args[1:]))
        arm.train(batches(2), optimizer)
        assert len(calls) == 2

    twins(script)


def test_hook_on_the_decoder_and_on_the_head() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        base = arm.model.get_base_model()

        def scaled(module: Any, args: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state * 1.5
            return output

        base.model.register_forward_hook(scaled)
        base.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        arm.train(batches(2), optimizer)

    twins(script)


def _toggle(arm: Arm, step: int) -> None:
    for name, param in arm.model.named_parameters():
        if "lora_" in name:
            layer = int(name.split("layers.")[1].split(".")[0])
            param.requires_grad_((layer + step) % 3 != 0)


def test_requires_grad_toggled_between_steps() -> None:
    def script(arm: Arm) -> None:
        every = {n: p for n, p in arm.model.named_parameters() if "lora_" in n}
        optimizer = torch.optim.AdamW(every.values(), lr=0.01)
        for number, batch in enumerate(batches(3)):
            _toggle(arm, number)
            loss = arm.model(**batch).loss
            loss.backward()
            arm.note("grad", {n: p.grad for n, p in every.items()})
            optimizer.step()
            optimizer.zero_grad()
            arm.note("weight", every)

    twins(script, sizes=(1, 2))


def test_only_a_or_only_b_trains() -> None:
    def script(arm: Arm) -> None:
        for name, param in arm.model.named_parameters():
            if "lora_A" in name:
                param.requires_grad_("layers.1." in name)
        arm.train(batches(2))

    twins(script)


def test_requires_grad_toggled_between_forward_and_backward() -> None:
    def script(arm: Arm) -> None:
        every = {n: p for n, p in arm.model.named_parameters() if "lora_" in n}
        for seed in range(2):
            loss = arm.model(**batches(1, seed=seed)[0]).loss
            _toggle(arm, seed)
            loss.backward()
            arm.note("grad", {n: p.grad for n, p in every.items()})
            for param in every.values():
                param.requires_grad_(True)
                param.grad = None

    twins(script)


@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_embeds_that_require_gradients(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        table = arm.model.get_input_embeddings()
        for batch in batches(2):
            embeds = table(batch.pop("input_ids")).detach().requires_grad_(True)
            loss = arm.model(inputs_embeds=embeds, **batch).loss
            loss.backward()
            arm.note("embeds.grad", embeds.grad)
            arm.step(optimizer)

    twins(script, recipe, sizes=(1, 2, "all"))


def test_enable_input_require_grads() -> None:
    def script(arm: Arm) -> None:
        arm.model.enable_input_require_grads()
        arm.train(batches(2))

    twins(script)


def test_create_graph_is_an_error_that_leaves_the_model_usable() -> None:
    """The boundary has one derivative; asking for two fails loudly, and the next step is exact."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        state = torch.get_rng_state()
        if arm.streamed:
            loss = arm.model(**batches(1)[0]).loss
            params = list(arm.trainable().values())
            found = torch.autograd.grad(loss, params, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                sum(g.square().sum() for g in found).backward()
            del loss, found
            optimizer.zero_grad()
            torch.set_rng_state(state)
        arm.train(batches(2), optimizer)

    twins(script)
