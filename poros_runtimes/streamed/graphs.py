"""Blocks as captured CUDA graphs: the same kernels in the same order, without launching each.

At a few hundred tokens, launching a block's kernels takes the host longer than running them takes
the device. A block whose call has been seen before is captured, its forward and its backward each
as one graph, and replayed from then on; see ``signature`` for what counts as the same call.

[Note: Graphs and memory]
All graphs draw their temporaries from one pool, one after the other, so the pool is as large as
the largest needs; the arena lends it room, see [Note: One arena]. Tensors enter and leave through
buffers outside the pool that all blocks of one shape share, and which go with the last graph that
uses them. What a block hands out is copied out of them: a later replay would overwrite it. What it
only hands on, such as keys and values that it shares, is the tensor that entered.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from attrs import define, field

from poros_core.call_state import restored, rng_state, set_rng_state
from poros_core.log import get_logger
from poros_runtimes.streamed.block import Block
from poros_runtimes.streamed.block_call import BlockCall
from poros_runtimes.streamed.buffers import Buffer, Pages, Stretch, largest_call, span_of
from poros_runtimes.streamed.caches import IsolatedCache
from poros_runtimes.streamed.capture import Capturer, LostGraphs, Replayable
from poros_runtimes.streamed.executor import (
    EagerExecutor,
    bound,
    differentiate,
    leaves_of,
    nothing_saved,
)
from poros_runtimes.streamed.signature import (
    BackwardKey,
    BlockConstants,
    ForwardKey,
    Layout,
    backward_key,
    forward_key,
    layout_of,
)

__all__ = ["GraphExecutor"]

_log = get_logger("graphs")

SIGNATURES = 8
"""Calls of different shape or state that one block keeps two graphs for, if there is no budget;
those that were not used for longest go first. As many as lengths padded to multiples of 64 come to
up to 512 tokens. A graph takes 1 to 2 MB of device memory outside the allocator."""


@define(eq=False)
class _Forward:
    """A block's forward: seen once, captured, or refused.

    ``passed`` has for each output the input that it is, if the block only hands it on. ``caches``
    are those that were copied within the capture: the graph reads their tensors.
    """

    outputs: list[Layout]
    differentiable: list[bool]
    epoch: int
    left_spec: Any = field(repr=False)
    passed: list[int | None] = field(repr=False)
    refused: bool = False
    graph: Replayable | None = None
    caches: list[IsolatedCache] = field(factory=list, repr=False)
    inputs: list[Buffer] = field(factory=list, repr=False)
    arguments: list[tuple[int, Buffer]] = field(factory=list, repr=False)
    results: list[Buffer | None] = field(factory=list, repr=False)
    backward: tuple[BackwardKey, _Backward] | None = field(default=None, repr=False)

    def drop(self) -> None:
        """Let the graphs go. A call whose backward is to come will run it eagerly."""
        self.refused, self.graph, self.backward = True, None, None


@define(eq=False)
class _Backward:
    """A block's backward: seen once, captured, or refused."""

    layouts: list[Layout | None]
    graph: Replayable | None = None
    caches: list[IsolatedCache] = field(factory=list, repr=False)
    gradients: list[Buffer | None] = field(factory=list, repr=False)
    results: list[Buffer | None] = field(factory=list, repr=False)
    stretch: Stretch | None = field(default=None, repr=False)
    refused: bool = False


class GraphExecutor:
    """Replays what it has captured; everything else runs eagerly."""

    def __init__(
        self,
        eager: EagerExecutor,
        device: torch.device,
        capturer: Capturer,
        first: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make an executor that has captured nothing yet.

        Args:
            eager: runs what is not captured.
            device: the compute device.
            capturer: captures the rest.
            first: a context for what runs eagerly because it was not seen before. Its units are
                bound outside of it: they may move to make room, and not into memory of the context.
        """
        self.replays = 0
        self._eager = eager
        self._device = device
        self._capturer = capturer
        self._first = first
        self._pages = Pages(device)
        self._epoch = 0
        self._off = False
        self._signatures = SIGNATURES
        self._buffers: weakref.WeakValueDictionary[tuple[str, int, Layout], Buffer] = (
            weakref.WeakValueDictionary()
        )
        self._stretches: weakref.WeakValueDictionary[tuple[Layout, ...], Stretch] = (
            weakref.WeakValueDictionary()
        )
        self._seen: dict[Block, OrderedDict[ForwardKey, _Forward]] = {}
        self._constants: dict[Block, tuple[int, BlockConstants]] = {}
        self._said: set[str] = set()

    def forward(
        self, call: BlockCall, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Run the first forward; see ``Executor``."""
        if self._off:
            return self._eager.forward(call, inputs, wanted)
        constants = self._constants_of(call.block)
        key = forward_key(call, inputs, wanted, constants)
        if key is None:
            if constants.hooked():
                reason = "a module in it is hooked"
                self._say_once("block_runs_eagerly", block=call.block.name, reason=reason)
            return self._eager.forward(call, inputs, wanted)
        seen = self._seen.setdefault(call.block, OrderedDict())
        entry = seen.get(key)
        if entry is None:
            with call.block.holding(call.layers, backward=False), self._first():
                results, differentiable = self._eager.forward(call, inputs, wanted)
            layouts = [layout_of(result) for result in results]
            if None not in layouts:
                entry = _Forward(
                    [layout for layout in layouts if layout],
                    differentiable,
                    self._epoch,
                    call.left_spec,
                    [_same_memory(result, inputs) for result in results],
                    refused=self._drew_on_the_host(call),
                )
                call.replay = seen[key] = entry
                self._forget(seen)
            return results, differentiable
        seen.move_to_end(key)
        call.replay = entry
        if not entry.refused:
            with call.block.holding(call.layers, backward=False):
                there = entry.epoch == self._epoch  # units may have moved to make room
                if there and entry.graph is None:
                    self._capture_forward(entry, key, call, wanted)
                if there and entry.graph is not None:
                    self._fill(entry, call, inputs)
                    entry.graph.replay()
                    self.replays += 1
                    call.left_spec = entry.left_spec
                    return self._handed_out(entry, inputs), entry.differentiable
        return self._eager.forward(call, inputs, wanted)

    def _drew_on_the_host(self, call: BlockCall) -> bool:
        """Whether a forward drew from the CPU generator: a graph would repeat what it decided."""
        assert call.state is not None
        if self._device.type == "cpu" or torch.equal(torch.get_rng_state(), call.state.rng[0]):
            return False
        reason = "it draws random numbers on the host"
        self._say_once("block_runs_eagerly", block=call.block.name, reason=reason)
        return True

    def backward(
        self,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Recompute and differentiate; see ``Executor``."""
        forward: _Forward | None = call.replay
        if forward is not None and forward.epoch != self._epoch:
            forward = None
        if forward is None or forward.refused:
            return self._eager.backward(call, inputs, wanted, gradients)
        key = backward_key(call, wanted, gradients, self._constants_of(call.block))
        if key is None:
            return self._eager.backward(call, inputs, wanted, gradients)
        known = forward.backward
        entry = known[1] if known is not None and known[0] == key else None
        if entry is None:
            with call.block.holding(call.layers, backward=True), self._first():
                found = self._eager.backward(call, inputs, wanted, gradients)
            layouts = [None if g is None else layout_of(g) for g in found]
            lost = any(g is not None and x is None for g, x in zip(found, layouts, strict=True))
            forward.backward = key, _Backward(layouts, refused=lost)
            return found
        if not entry.refused and forward.graph is not None:
            with call.block.holding(call.layers, backward=True):
                there = forward.epoch == self._epoch  # units may have moved to make room
                if there and entry.graph is None:
                    self._capture_backward(entry, forward, call, wanted, gradients)
                if there and entry.graph is not None:
                    return self._replay_backward(entry, forward, call, inputs, gradients)
        return self._eager.backward(call, inputs, wanted, gradients)

    def end_forward(self) -> None:
        """A forward of the decoder ended."""
        self._pages.close()

    def keep(self, signatures: int) -> None:
        """Keep graphs for at most so many signatures of a block from here on."""
        self._signatures = signatures
        for seen in self._seen.values():
            self._forget(seen)

    def buffer_bytes(self, *, room: int) -> int:
        """Return the bytes that buffers will take if all signatures are as large as the largest.

        Args:
            room: bytes that the capturer has to reserve.
        """
        lasting, passing = largest_call(
            (key.inputs, entry.outputs, key.arguments)
            for seen in self._seen.values()
            for key, entry in seen.items()
        )
        return self._signatures * lasting + max(0, self._signatures * passing - room)

    def _forget(self, seen: OrderedDict[ForwardKey, _Forward]) -> None:
        while len(seen) > self._signatures:
            seen.popitem(last=False)[1].drop()

    def clear(self) -> None:
        """Drop every graph and buffer: units move, or the model is done with. Calls whose backward
        is to come will run it eagerly."""
        self._epoch += 1
        for seen in self._seen.values():
            for entry in seen.values():
                entry.drop()
        self._seen.clear()
        self._buffers.clear()
        self._stretches.clear()

    # -- replaying -----------------------------------------------------------------------------

    def _handed_out(self, entry: _Forward, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        handed: list[torch.Tensor] = []
        for buffer, source in zip(entry.results, entry.passed, strict=True):
            if buffer is None:
                assert source is not None
                handed.append(inputs[source].detach())
            else:  # a page is for hidden states, which are all of one size
                handed.append(buffer.tensor.clone() if handed else self._pages.copy_of(buffer))
        return handed

    def _fill(self, entry: _Forward, call: BlockCall, inputs: Sequence[torch.Tensor]) -> None:
        for buffer, tensor in zip(entry.inputs, inputs, strict=True):
            buffer.fill_always(tensor)
        for position, buffer in entry.arguments:
            buffer.fill(call.leaves[position])

    def _replay_backward(
        self,
        entry: _Backward,
        forward: _Forward,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        assert entry.graph is not None
        assert call.state is not None
        self._fill(forward, call, inputs)
        for buffer, gradient in zip(entry.gradients, gradients, strict=True):
            if buffer is not None and gradient is not None:
                buffer.fill_always(gradient)
        found = rng_state(self._device)
        set_rng_state(self._device, call.state.rng)
        try:
            entry.graph.replay()
        finally:
            set_rng_state(self._device, found)
        self.replays += 1
        results = [None if b is None else b.tensor.clone() for b in entry.results]
        if entry.stretch is None:
            return results
        pieces = iter(entry.stretch.views(entry.stretch.flat.clone()))
        absent = entry.layouts[len(results) :]
        return results + [None if layout is None else next(pieces) for layout in absent]

    # -- capturing -----------------------------------------------------------------------------

    def _capture_forward(
        self,
        entry: _Forward,
        key: ForwardKey,
        call: BlockCall,
        wanted: Sequence[bool],
    ) -> None:
        assert call.state is not None
        state, modules = call.state, call.block.modules
        entry.caches = _caches(call)
        entry.inputs = [self._buffer("input", i, x) for i, x in enumerate(key.inputs)]
        entry.arguments = [
            (position, self._buffer("argument", position, layout))
            for position, layout in enumerate(key.arguments)
            if isinstance(layout, Layout)
        ]
        entry.results = [
            self._buffer("result", i, layout) if source is None else None
            for i, (layout, source) in enumerate(zip(entry.outputs, entry.passed, strict=True))
        ]
        static = self._static_call(entry, call)

        def body() -> None:
            with torch.enable_grad(), restored(state, modules, rng=False), nothing_saved():
                leaves = leaves_of([b.tensor for b in entry.inputs], wanted)
                found = static.run(leaves, bound)
            with torch.no_grad():
                for buffer, tensor in zip(entry.results, found, strict=True):
                    if buffer is not None:
                        buffer.fill_always(tensor)

        entry.graph = self._capture(body, call.block)
        entry.refused = entry.graph is None

    def _capture_backward(
        self,
        entry: _Backward,
        forward: _Forward,
        call: BlockCall,
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        count = len(forward.inputs)
        entry.caches = _caches(call)
        entry.gradients = [
            None if g is None else self._buffer("gradient", i, layout_of(g))
            for i, g in enumerate(gradients)
        ]
        entry.results = [
            None if layout is None else self._buffer("passed on", i, layout)
            for i, layout in enumerate(entry.layouts[:count])
        ]
        trained = tuple(layout for layout in entry.layouts[count:] if layout is not None)
        entry.stretch = self._stretch(trained)
        static = self._static_call(forward, call)

        def body() -> None:
            found = differentiate(
                static,
                [buffer.tensor for buffer in forward.inputs],
                wanted,
                [None if buffer is None else buffer.tensor for buffer in entry.gradients],
                rng=False,
            )
            for buffer, gradient in zip(entry.results, found[:count], strict=True):
                if buffer is not None and gradient is not None:
                    buffer.fill_always(gradient)
            views = entry.stretch.views(entry.stretch.flat) if entry.stretch is not None else []
            given = [gradient for gradient in found[count:] if gradient is not None]
            for view, gradient in zip(views, given, strict=True):
                view.copy_(gradient)

        entry.graph = self._capture(body, call.block)
        entry.refused = entry.graph is None

    def _capture(self, body: Callable[[], None], block: Block) -> Replayable | None:
        """Capture what ``body`` launches, or say once why it cannot be and return None."""
        found = rng_state(self._device)
        try:
            return self._capturer.capture(body)
        except Exception as error:
            self._say_once("graph_capture_failed", block=block.name, reason=str(error)[:200])
            if isinstance(error, LostGraphs):
                self._off = True
                self.clear()
            return None
        except BaseException:  # an interrupt: nobody can say what it left half-way
            self._off = True
            self.clear()
            raise
        finally:
            set_rng_state(self._device, found)
            self._capturer.settle()

    def _static_call(self, entry: _Forward, call: BlockCall) -> BlockCall:
        leaves = list(call.leaves)
        for position, buffer in entry.arguments:
            leaves[position] = buffer.tensor
        return attrs.evolve(call, leaves=leaves)

    def _buffer(self, role: str, index: int, layout: Layout | None) -> Buffer:
        assert layout is not None
        layout = attrs.evolve(layout, wanted=False)
        key = (role, index, layout)
        buffer = self._buffers.get(key)
        if buffer is None:
            # An argument's buffer is not filled again while the argument is the same.
            lasting = role == "argument"
            memory = None if lasting else self._capturer.reserve(span_of(layout))
            buffer = self._buffers[key] = Buffer(layout, self._device, memory)
        return buffer

    def _stretch(self, layouts: tuple[Layout, ...]) -> Stretch | None:
        if not layouts:
            return None
        stretch = self._stretches.get(layouts)
        if stretch is None:
            stretch = self._stretches[layouts] = Stretch.of(layouts, self._allocate)
        return stretch

    def _allocate(self, nbytes: int) -> torch.Tensor:
        memory = self._capturer.reserve(nbytes)
        if memory is not None:
            return memory
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _constants_of(self, block: Block) -> BlockConstants:
        version, constants = self._constants.get(block, (-1, None))
        if constants is None or version != block.version:
            constants = BlockConstants(block)
            self._constants[block] = (block.version, constants)
        return constants

    def _say_once(self, event: str, *, block: str, reason: str) -> None:
        if event not in self._said:
            self._said.add(event)
            _log.warning(event, block=block, reason=reason)


def _same_memory(result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int | None:
    """Return which input a result is, all of it and as it lies there; None if it is none."""
    for index, tensor in enumerate(inputs):
        if result.data_ptr() == tensor.data_ptr() and layout_of(result) == layout_of(tensor):
            return index
    return None


def _caches(call: BlockCall) -> list[IsolatedCache]:
    return [leaf for leaf in call.leaves if isinstance(leaf, IsolatedCache)]
