"""A block's forward and backward under one key: how each is captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from attrs import define, field

from poros_core.call_state import restored, rng_state, set_rng_state
from poros_runtimes.streamed.block_call import BlockCall
from poros_runtimes.streamed.buffers import Buffer, Pages, SharedBuffers, Stretch
from poros_runtimes.streamed.caches import IsolatedCache
from poros_runtimes.streamed.capture import Replayable
from poros_runtimes.streamed.executor import bound, differentiate, leaves_of, nothing_saved
from poros_runtimes.streamed.signature import BackwardKey, ForwardKey, Layout, layout_of

__all__ = ["BackwardEntry", "ForwardEntry", "same_memory"]


@define(eq=False)
class ForwardEntry:
    """A block's forward: seen once, captured, or refused.

    ``passed`` has for each output the input that it is, if the block only hands it on. ``caches``
    are those that were copied within the capture: the graph reads their tensors. What is
    ``guessed`` was learnt from a block of the same kind, and ``fits`` turns false if the capture
    finds that it does not hold.
    """

    outputs: list[Layout]
    differentiable: list[bool]
    epoch: int
    left_spec: Any = field(repr=False)
    passed: list[int | None] = field(repr=False)
    refused: bool = False
    kind: object = field(default=None, repr=False)
    guessed: bool = False
    fits: bool = True
    graph: Replayable | None = None
    caches: list[IsolatedCache] = field(factory=list, repr=False)
    inputs: list[Buffer] = field(factory=list, repr=False)
    arguments: list[tuple[int, Buffer]] = field(factory=list, repr=False)
    results: list[Buffer | None] = field(factory=list, repr=False)
    backward: tuple[BackwardKey, BackwardEntry] | None = field(default=None, repr=False)

    def drop(self) -> None:
        """Let the graphs go. A call whose backward is to come will run it eagerly."""
        self.refused, self.graph, self.backward = True, None, None
        self.caches, self.inputs, self.arguments, self.results = [], [], [], []

    def body(
        self, key: ForwardKey, call: BlockCall, wanted: Sequence[bool], buffers: SharedBuffers
    ) -> Callable[[], None]:
        """Return what is to be captured, once its tensors have their buffers.

        Args:
            key: what it is known under.
            call: a call with that key.
            wanted: which inputs want gradients.
            buffers: the buffers of all blocks.
        """
        assert call.state is not None
        state, modules = call.state, call.block.modules
        self.caches = _caches(call)
        self.inputs = [buffers.buffer("input", i, x) for i, x in enumerate(key.inputs)]
        self.arguments = [
            (position, buffers.buffer("argument", position, layout))
            for position, layout in enumerate(key.arguments)
            if isinstance(layout, Layout)
        ]
        self.results = [
            buffers.buffer("result", i, layout) if source is None else None
            for i, (layout, source) in enumerate(zip(self.outputs, self.passed, strict=True))
        ]
        static = self.static(call)

        def body() -> None:
            with torch.enable_grad(), restored(state, modules, rng=False), nothing_saved():
                leaves = leaves_of([b.tensor for b in self.inputs], wanted)
                found = static.run(leaves, bound)
            if self.guessed and not self._describes(found, leaves, static.left_spec):
                self.fits = False
                return
            with torch.no_grad():
                for buffer, tensor in zip(self.results, found, strict=True):
                    if buffer is not None:
                        buffer.fill_always(tensor)

        return body

    def _describes(
        self, found: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], left_spec: Any
    ) -> bool:
        """Whether this is what is said to leave the block."""
        detached = [tensor.detach() for tensor in found]
        return (
            left_spec == self.left_spec
            and [layout_of(tensor) for tensor in detached] == self.outputs
            and [tensor.requires_grad for tensor in found] == self.differentiable
            and [same_memory(tensor, leaves) for tensor in detached] == self.passed
        )

    def static(self, call: BlockCall) -> BlockCall:
        """Return a call that reads its arguments from their buffers."""
        leaves = list(call.leaves)
        for position, buffer in self.arguments:
            leaves[position] = buffer.tensor
        return attrs.evolve(call, leaves=leaves, shared=call.emptied())

    def fill(self, call: BlockCall, inputs: Sequence[torch.Tensor]) -> None:
        """Copy what enters into the buffers."""
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            buffer.fill_always(tensor)
        for position, buffer in self.arguments:
            buffer.fill(call.leaves[position])

    def handed_out(self, inputs: Sequence[torch.Tensor], pages: Pages) -> list[torch.Tensor]:
        """Return what leaves after a replay, in memory of its own."""
        handed: list[torch.Tensor] = []
        for buffer, source in zip(self.results, self.passed, strict=True):
            if buffer is None:
                assert source is not None
                handed.append(inputs[source].detach())
            else:  # a page is for hidden states, which are all of one size
                handed.append(buffer.tensor.clone() if handed else pages.copy_of(buffer))
        return handed


@define(eq=False)
class BackwardEntry:
    """A block's backward: seen once, captured, or refused; see ``ForwardEntry``."""

    layouts: list[Layout | None]
    graph: Replayable | None = None
    caches: list[IsolatedCache] = field(factory=list, repr=False)
    gradients: list[Buffer | None] = field(factory=list, repr=False)
    results: list[Buffer | None] = field(factory=list, repr=False)
    stretch: Stretch | None = field(default=None, repr=False)
    refused: bool = False
    guessed: bool = False
    fits: bool = True

    def body(
        self,
        forward: ForwardEntry,
        call: BlockCall,
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
        buffers: SharedBuffers,
    ) -> Callable[[], None]:
        """Return what is to be captured, once its tensors have their buffers.

        Args:
            forward: its forward, which was captured.
            call: a call with that forward's key.
            wanted: which inputs, then which parameters, want gradients.
            gradients: of what left.
            buffers: the buffers of all blocks.
        """
        count = len(forward.inputs)
        self.caches = _caches(call)
        self.gradients = [
            None if g is None else buffers.buffer("gradient", i, layout_of(g))
            for i, g in enumerate(gradients)
        ]
        self.results = [
            None if layout is None else buffers.buffer("passed on", i, layout)
            for i, layout in enumerate(self.layouts[:count])
        ]
        trained = tuple(layout for layout in self.layouts[count:] if layout is not None)
        self.stretch = buffers.stretch(trained)
        static = forward.static(call)

        def body() -> None:
            found = differentiate(
                static,
                [buffer.tensor for buffer in forward.inputs],
                wanted,
                [None if buffer is None else buffer.tensor for buffer in self.gradients],
                rng=False,
            )
            if self.guessed and [g if g is None else layout_of(g) for g in found] != self.layouts:
                self.fits = False
                return
            for buffer, gradient in zip(self.results, found[:count], strict=True):
                if buffer is not None and gradient is not None:
                    buffer.fill_always(gradient)
            views = self.stretch.views(self.stretch.flat) if self.stretch is not None else []
            given = [gradient for gradient in found[count:] if gradient is not None]
            for view, gradient in zip(views, given, strict=True):
                view.copy_(gradient)

        return body

    def replay(
        self,
        forward: ForwardEntry,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        *,
        device: torch.device,
    ) -> list[torch.Tensor | None]:
        """Replay the graph under the random-number state of the call's forward.

        Args:
            forward: its forward.
            call: the call.
            inputs: the tensors that the forward was given.
            gradients: of what left.
            device: the compute device.

        Returns:
            The gradient of each input and trained parameter, in memory of its own.
        """
        assert self.graph is not None
        assert call.state is not None
        forward.fill(call, inputs)
        for buffer, gradient in zip(self.gradients, gradients, strict=True):
            if buffer is not None and gradient is not None:
                buffer.fill_always(gradient)
        found = rng_state(device)
        set_rng_state(device, call.state.rng)
        try:
            self.graph.replay()
        finally:
            set_rng_state(device, found)
        results = [None if b is None else b.tensor.clone() for b in self.results]
        if self.stretch is None:
            return results
        pieces = iter(self.stretch.views(self.stretch.flat.clone()))
        absent = self.layouts[len(results) :]
        return results + [None if layout is None else next(pieces) for layout in absent]


def same_memory(result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int | None:
    """Return which input a result is, all of it and as it lies there; None if it is none."""
    for index, tensor in enumerate(inputs):
        if result.data_ptr() == tensor.data_ptr() and layout_of(result) == layout_of(tensor):
            return index
    return None


def _caches(call: BlockCall) -> list[IsolatedCache]:
    return [leaf for leaf in call.leaves if isinstance(leaf, IsolatedCache)]
