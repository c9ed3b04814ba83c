"""Lengths that are new: what is captured at first sight, what is not, and how many are kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from helpers_graphs import (
    CPU,
    DEVICES,
    Again,
    FunctionCapturer,
    RunningCapturer,
    batch,
    counted_run,
    handle_of,
    later,
    make,
    run,
)

from poros_families.gemma3 import GEMMA3
from poros_families.qwen2 import QWEN2

TWO_KINDS = {
    **GEMMA3.shapes["tiny"],
    "num_hidden_layers": 8,
    "layer_types": 2 * GEMMA3.shapes["tiny"]["layer_types"],
}


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        # The first layer takes what needs no gradient, so it is a kind of its own. Its backward
        # and that of the first of each other kind follow forwards that ran eagerly, and another
        # block of the kind comes before them in the backward.
        (QWEN2.shapes["tiny"], [8, 0, 0, 2 + 3, 0, 0]),
        (TWO_KINDS, [16, 0, 0, 3 + 5, 0, 0]),
    ],
    ids=["one kind", "two kinds"],
)
def test_a_new_length_runs_one_block_of_a_kind(
    shape: Mapping[str, Any], counts: list[int], device: torch.device
) -> None:
    eager = run(make(device, graphs=False, shape=shape), later, device, steps=6)
    model = make(device, shape=shape, capturer=RunningCapturer(), settled=True)
    found, replayed = counted_run(model, later, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    assert found == counts


@pytest.mark.parametrize("settled", [True, False])
def test_nothing_is_guessed_in_the_first_steps(settled: bool) -> None:
    model = make(capturer=RunningCapturer(), settled=settled)
    found, _ = counted_run(model, later, CPU)
    assert found[3] == (5 if settled else 8)


def test_nothing_is_guessed_where_lengths_are_seldom_seen_again() -> None:
    def growing(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
        loss = model(**batch(step, device, length=10 + step)).loss
        loss.backward()
        return [loss.detach()]

    capturer = RunningCapturer()
    found, _ = counted_run(make(capturer=capturer, settled=True), growing, CPU)
    assert found == [8] * 6
    assert capturer.tried == 0


class Skewed(torch.autograd.Function):
    """Hands on what it is given, with the strides of its transpose: values, or gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, values: bool) -> torch.Tensor:
        ctx.values = values
        return skewed(tensor) if values else tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient if ctx.values else skewed(gradient), None


def skewed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    ("values", "eagerly"),
    [
        pytest.param(True, 8, id="values"),  # and the next layer's input is not as it was
        pytest.param(False, 6, id="gradients"),
    ],
)
def test_a_guess_that_does_not_hold_is_dropped(
    values: bool, eagerly: int, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that was changed on its instance looks like the others and is not."""

    def patch(base: Any) -> None:
        layer = base.model.layers[2]
        inner = layer.forward

        def forward(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if values:
                return Skewed.apply(inner(hidden, **kwargs), True)
            return cast(torch.Tensor, inner(Skewed.apply(hidden, False), **kwargs))

        layer.forward = forward

    eager = run(make(device, graphs=False, patch=patch), later, device, steps=6)
    capturer = RunningCapturer()
    model = make(device, patch=patch, capturer=capturer, settled=True)
    with caplog.at_level("WARNING", logger="poros.graphs"):
        found, replayed = counted_run(model, later, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    if device.type == "cpu":
        assert capturer.tried == 2 * 8 + 1
    assert found == [8, 0, 0, eagerly, 0, 0]
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_layer_that_draws_on_the_host_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay would repeat what it decided."""
    device = torch.device("cuda")

    def drawing_model(*, graphs: bool) -> Any:
        model = make(device, graphs=graphs)
        mlp = model.get_base_model().model.layers[2].mlp
        inner = mlp.act_fn.forward

        def drops(hidden: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, inner(hidden)) * float(torch.rand(()) < 0.5)

        monkeypatch.setattr(mlp.act_fn, "forward", drops)
        return model

    eager = run(drawing_model(graphs=False), later, device, steps=6)
    with caplog.at_level("WARNING", logger="poros.graphs"):
        found, replayed = counted_run(drawing_model(graphs=True), later, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    assert found[1] == found[2] == found[4] == 2, "its forward and its backward"
    assert len([r for r in caplog.records if "on the host" in r.getMessage()]) == 1


def test_a_device_that_is_nearly_full_keeps_no_more_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Small(FunctionCapturer):
        """A device on which graphs of two lengths fit."""

        def __init__(self) -> None:
            super().__init__()
            self.graphs: weakref.WeakSet[Again] = weakref.WeakSet()

        def capture(self, body: Callable[[], None]) -> Again:
            self.graphs.add(graph := super().capture(body))
            return graph

        def has_room(self) -> bool:
            gc.collect()  # such a graph holds its entry, and the entry the graph
            return len(self.graphs) < 2 * 2 * 4

    capturer = Small()
    model = make(capturer=capturer)
    seen = handle_of(model).units.graphs._seen
    with caplog.at_level("WARNING", logger="poros.graphs"):
        for length in (4, 5, 6, 4, 7):
            for _ in range(2):
                model(**batch(0, CPU, length=length)).loss.backward()
            gc.collect()
            assert len(capturer.graphs) <= 2 * 2 * 4
    assert len(capturer.graphs) == 2 * 2 * 4
    assert all(len(entries) == 2 for entries in seen.values())
    assert len(caplog.records) == 1
    assert "has room for graphs of more than 2 lengths" in caplog.records[0].getMessage()
