"""Hidden states that leave the device between a block's forward and its backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from poros_core.prepare import prepared_of
from poros_runtimes.streamed import activations, units
from poros_runtimes.streamed.activation_memory import ActivationMemory
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.lane import HostLane
from semantics.arms import BF16, FP32, LAYERS, NF4, Arm, Recipe, batches, compare, layers_of, play
from semantics.lanes import LateLane

HIDDEN = 64


def handle_of(arm: Arm) -> Any:
    prepared = prepared_of(arm.model)
    assert prepared is not None
    return prepared.handle


def moved(arm: Arm) -> int:
    return int(handle_of(arm).counters()["activation_bytes"])


def both(script: Callable[[Arm], None], recipe: Recipe = NF4, **options: Any) -> Arm:
    """Run a script resident and with offloaded activations, and compare all that it noted."""
    resident = play(script, recipe, streamed=False, late=False)
    streamed = play(script, recipe, streamed=True, late=False, offload_activations=True, **options)
    compare(resident.notes, streamed.notes)
    return streamed


# -- the same bits ---------------------------------------------------------------------------------


def several(arm: Arm) -> None:
    """A plain step, then several forwards before a backward, and several backwards of one."""
    optimizer = arm.optimizer()
    arm.train(batches(1), optimizer)
    losses = [arm.model(**batch).loss for batch in batches(2, seed=1)]
    arm.model(**batches(1, seed=2)[0])  # dropped
    torch.stack(losses).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = arm.model(**batches(1, seed=3)[0]).loss
        loss.backward(retain_graph=True)
    arm.model.eval()
    with torch.no_grad():
        arm.note("between", arm.model(**batches(1, seed=5)[0]).logits)
    arm.model.train()
    loss.backward()
    arm.step(optimizer)


def everything(arm: Arm) -> None:
    """The same, generation, and a loss that reads every hidden state."""
    several(arm)
    ids = batches(1, seed=6)[0]["input_ids"][:1]
    arm.note("generated", arm.model.generate(input_ids=ids, max_new_tokens=2, do_sample=False))
    output = arm.model(**batches(1, seed=7)[0], output_hidden_states=True)
    (output.loss + sum(hidden.float().mean() for hidden in output.hidden_states)).backward()
    arm.note_grads()
    arm.model.zero_grad()
    arm.train(batches(1, seed=8))


@pytest.mark.parametrize(("block_size", "recipe"), [(1, NF4), (2, FP32)])
def test_the_bits_are_the_same(block_size: int, recipe: Recipe) -> None:
    assert moved(both(everything, recipe, block_size=block_size)) > 0


def test_the_bits_are_the_same_where_layers_stay() -> None:
    arm = both(lambda arm: arm.train(batches(2)), BF16, vram_budget="1GB")
    assert handle_of(arm).counters()["resident_units"] == LAYERS
    assert moved(arm) > 0


def test_the_input_of_the_only_block_stays() -> None:
    assert not moved(both(lambda arm: arm.train(batches(2)), FP32, block_size="all"))


class Refused(Exception):
    pass


def test_an_exception_on_either_way() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(2)):
            calls = []

            def fail(*args: Any, seen: list[Any] = calls, last: int = 1 + number % 2) -> None:
                seen.append(args)
                if len(seen) == last:  # in the forward, or in the recompute
                    raise Refused

            hook = layers_of(arm.model)[2].mlp.register_forward_pre_hook(fail)
            if arm.streamed:
                with pytest.raises(Refused):
                    arm.model(**batch).loss.backward()
            hook.remove()
            optimizer.zero_grad()
            torch.manual_seed(number)
            arm.train([batch], optimizer)

    both(script, FP32)


def last_layers_alone(arm: Arm) -> None:
    """A backward that stops half-way, after what it would have gone on with was asked for."""
    last = [p for name, p in arm.trainable().items() if ".3." in name]
    loss = arm.model(**batches(1)[0]).loss
    arm.note("last", torch.autograd.grad(loss, last))
    del loss
    arm.train(batches(2))


def test_what_a_backward_did_not_come_to_is_let_go() -> None:
    arm = both(last_layers_alone, FP32)
    kept = handle_of(arm).units.activations
    assert not kept._leaving
    assert not kept._arriving


# -- what is kept, and for how long ----------------------------------------------------------------


def test_the_input_of_every_block_but_the_last_moves_out_and_back() -> None:
    def script(arm: Arm) -> None:
        (batch,) = batches(1)
        loss = arm.model(**batch).loss
        each = batch["input_ids"].numel() * HIDDEN * 4
        before = moved(arm) if arm.streamed else (LAYERS - 1) * each
        assert before == (LAYERS - 1) * each
        loss.backward()
        if arm.streamed:
            counters = handle_of(arm).counters()
            assert counters["activation_bytes"] == 2 * before
            assert counters["bytes_streamed"] == handle_of(arm).units.window.bytes_streamed + before
            memory = handle_of(arm).units.activations._memory
            assert len(memory.back) == LAYERS - 1  # though the loss is still there
        arm.note_grads()

    both(script, FP32)


def test_hidden_states_do_not_stay_on_the_device() -> None:
    """Three are alive at most, and between forward and backward the last block's input alone."""
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def count() -> None:
        alive.append(sum(ref() is not None for ref in seen))

    def script(arm: Arm) -> None:
        def note(layer: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen.append(weakref.ref(hidden.untyped_storage()))
            count()

        hooks = [
            layer.register_forward_pre_hook(note, with_kwargs=True)
            for layer in layers_of(arm.model)
        ]
        loss = arm.model(**batches(1)[0]).loss
        for hook in hooks:
            hook.remove()
        arm.note("loss", loss)
        del note, hooks
        loss.backward()

    def watched(arm: Arm) -> None:
        head = arm.model.get_output_embeddings()
        handle = head.register_full_backward_pre_hook(lambda module, gradients: count())
        script(arm)
        handle.remove()

    # the decoder holds its first hidden state while it runs
    for offload, expected in ((True, [1, 2, 3, 3, 3, 1]), (False, [1, 2, 3, 4, 5, 5])):
        seen.clear()
        alive.clear()
        play(watched, FP32, streamed=True, late=False, offload_activations=offload)
        assert alive == expected


def test_a_hidden_state_comes_back_with_its_strides() -> None:
    cpu = torch.device("cpu")
    store = activations.HostActivations(cpu, layers=9, lane=HostLane(), poison=True)
    token = BackwardToken()
    base = torch.randn(4, 6, 8, dtype=torch.bfloat16)
    for hidden in (base, base.transpose(0, 1), base[1:3], base[:1].expand(4, 6, 8)):
        kept = store.keep(hidden, stop=1, token=token, held=False)
        assert kept is not None
        found = store.bring_back(kept)
        assert found.data_ptr() != hidden.data_ptr()
        assert (found.shape, found.stride(), found.dtype) == (
            *(hidden.shape, hidden.stride(), hidden.dtype),
        )
        assert torch.equal(found, hidden)
        store.done(kept, found, retained=False)
        assert found.isnan().all()
    assert store.keep(base[..., 1:], stop=1, token=token, held=False) is None  # it has gaps
    assert store.keep(base, stop=9, token=token, held=False) is None
    assert store.keep(base, stop=1, token=token, held=True) is None
    assert store.keep(base, stop=1, token=None, held=False) is None


def test_host_memory_is_used_again_whatever_the_lengths() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        found = []
        for step in range(3):
            arm.train(batches(1, seed=step), optimizer)
            loss = arm.model(**batches(1, seed=step)[0]).loss
            del loss  # a graph that is dropped
            if arm.streamed:
                found.append(handle_of(arm).units.activations.host_bytes)
        assert len(set(found)) <= 1

    both(script, FP32)


def test_a_longer_sequence_replaces_memory() -> None:
    memory = ActivationMemory(torch.device("cpu"))
    small = [memory.take(1000) for _ in range(3)]
    memory.back.extend(small)
    large = [memory.take(5 << 20) for _ in range(3)]
    assert memory.nbytes == sum(stretch.buffer.nbytes for stretch in large)
    memory.back.extend(large)
    again = [memory.take(1000) for _ in range(3)]
    assert {id(stretch) for stretch in again} == {id(stretch) for stretch in large}


def test_dropping_a_loss_gives_the_memory_back() -> None:
    def script(arm: Arm) -> None:
        for count in (1, 2):
            loss = arm.model(**batches(1)[0]).loss
            arm.note("loss", loss)
            del loss
            gc.collect()
            if arm.streamed:
                memory = handle_of(arm).units.activations._memory
                assert len(memory.back) == LAYERS - 1, count
                assert all((s.buffer.bytes == 0xFF).all() for s in memory.back)

    both(script, FP32)


# -- errors ----------------------------------------------------------------------------------------


def test_a_change_in_place_is_an_error() -> None:
    model = play(lambda arm: arm.train(batches(1)), FP32, streamed=True, late=False).model
    poros.unprepare(model)
    poros.prepare(model, offload_activations=True, verbose=False)
    (batch,) = batches(1)
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    loss = model(inputs_embeds=embedded, **batch).loss
    embedded.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_without_a_retained_graph_is_an_error() -> None:
    def script(arm: Arm) -> None:
        loss = arm.model(**batches(1)[0]).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        arm.note_grads()

    both(script, FP32)


def test_settings_that_cannot_be_honoured() -> None:
    with pytest.raises(poros.SettingsError, match="True or False"):
        poros.prepare(torch.nn.Linear(1, 1), offload_activations="host")  # type: ignore[arg-type]
    arm = play(lambda arm: arm.train(batches(1)), FP32, streamed=True, late=False)
    poros.unprepare(arm.model)
    with pytest.raises(poros.SettingsError, match="runtime='streamed'"):
        poros.prepare(arm.model, offload_activations=True, runtime="resident", verbose=False)


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [several, last_layers_alone])
def test_copies_that_run_as_late_as_they_may(
    monkeypatch: pytest.MonkeyPatch, script: Callable[[Arm], None]
) -> None:
    monkeypatch.setattr(units, "make_lane", lambda device: LateLane())
    monkeypatch.setattr(activations, "make_lane", lambda device: LateLane())
    assert moved(both(script, FP32)) > 0
