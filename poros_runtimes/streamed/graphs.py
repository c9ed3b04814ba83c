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

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from poros_core.call_state import rng_state, set_rng_state
from poros_core.log import get_logger
from poros_runtimes.streamed.block import Block
from poros_runtimes.streamed.block_call import BlockCall
from poros_runtimes.streamed.buffers import Pages, SharedBuffers, copied, largest_call
from poros_runtimes.streamed.capture import Capturer, LostGraphs, Replayable
from poros_runtimes.streamed.executor import EagerExecutor
from poros_runtimes.streamed.graph_entries import BackwardEntry, ForwardEntry, same_memory
from poros_runtimes.streamed.guesses import Guesses
from poros_runtimes.streamed.signature import (
    BlockConstants,
    ForwardKey,
    backward_key,
    backward_kind,
    forward_key,
    forward_kind,
    layout_of,
)

__all__ = ["SIGNATURES", "GraphExecutor"]

_log = get_logger("graphs")

SIGNATURES = 16
"""Calls of different shape or state that one block keeps two graphs for, if there is no budget;
those that were not used for longest go first. As many as lengths padded to multiples of 64 come to
up to 512 tokens, with a mask and without one, as a batch has that needs no padding. A graph takes
about 1 MB of device memory outside the allocator, so there are fewer where that runs out."""


class GraphExecutor:
    """Replays what it has captured; everything else runs eagerly."""

    def __init__(
        self,
        eager: EagerExecutor,
        device: torch.device,
        capturer: Capturer,
        first: Callable[[], AbstractContextManager[None]] = nullcontext,
        settled: Callable[[], bool] = bool,
    ) -> None:
        """Make an executor that has captured nothing yet.

        Args:
            eager: runs what is not captured.
            device: the compute device.
            capturer: captures the rest.
            first: a context for what runs eagerly because it was not seen before. Its units are
                bound outside of it: they may move to make room, and not into memory of the context.
            settled: whether the first steps are over; see [Note: Guesses].
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
        self._buffers = SharedBuffers(device, capturer)
        self._seen: dict[Block, OrderedDict[ForwardKey, ForwardEntry]] = {}
        self._guesses = Guesses(settled)
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
        self._guesses.met(before=entry is not None)
        kind = None
        if entry is None:
            kind = forward_kind(key, call, constants)
            entry = self._guesses.forward(kind, epoch=self._epoch)
        else:
            seen.move_to_end(key)
            call.replay = entry
        if entry is not None and not entry.refused:
            with call.block.holding(call.layers, backward=False):
                there = entry.epoch == self._epoch  # units may have moved to make room
                if there and entry.graph is None:
                    self._attempt(entry, call, entry.body(key, call, wanted, self._buffers))
                if there and entry.graph is not None:
                    if kind is not None:
                        self._keep(seen, key, entry, call)
                    entry.fill(call, inputs)
                    entry.graph.replay()
                    self.replays += 1
                    call.left_spec = entry.left_spec
                    return entry.handed_out(inputs, self._pages), entry.differentiable
        if kind is None or self._off:
            return self._eager.forward(call, inputs, wanted)
        return self._see(call, inputs, wanted, key=key, kind=kind)

    def _see(
        self,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        *,
        key: ForwardKey,
        kind: object,
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Run a forward that was not seen before, and remember what left it."""
        assert call.state is not None
        with call.block.holding(call.layers, backward=False), self._first():
            results, differentiable = self._eager.forward(call, inputs, wanted)
        layouts = [layout_of(result) for result in results]
        if None not in layouts:
            entry = ForwardEntry(
                [layout for layout in layouts if layout],
                differentiable,
                self._epoch,
                call.left_spec,
                [same_memory(result, inputs) for result in results],
                refused=self._drew_on_the_host(call.state.rng, call.block),
                kind=kind,
            )
            if not entry.refused:
                self._guesses.saw_forward(entry)
            self._keep(self._seen.setdefault(call.block, OrderedDict()), key, entry, call)
        return results, differentiable

    def _keep(
        self,
        seen: OrderedDict[ForwardKey, ForwardEntry],
        key: ForwardKey,
        entry: ForwardEntry,
        call: BlockCall,
    ) -> None:
        call.replay = seen[key] = entry
        self._forget(seen)

    def _drew_on_the_host(self, before: Sequence[torch.Tensor], block: Block) -> bool:
        """Whether a block drew from the CPU generator: a graph would repeat what it decided.

        Args:
            before: random-number states from before it ran.
            block: the block.
        """
        if self._device.type == "cpu" or torch.equal(torch.get_rng_state(), before[0]):
            return False
        reason = "it draws random numbers on the host"
        self._say_once("block_runs_eagerly", block=block.name, reason=reason)
        return True

    def backward(
        self,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Recompute and differentiate; see ``Executor``."""
        forward: ForwardEntry | None = call.replay
        if forward is not None and forward.epoch != self._epoch:
            forward = None
        if forward is None or forward.refused:
            return self._eager.backward(call, inputs, wanted, gradients)
        key = backward_key(call, wanted, gradients, self._constants_of(call.block))
        if key is None:
            return self._eager.backward(call, inputs, wanted, gradients)
        known = forward.backward
        entry = known[1] if known is not None and known[0] == key else None
        kind = None
        if entry is None:
            kind = forward.kind, backward_kind(key)
            entry = self._guesses.backward(kind) if forward.graph is not None else None
        if entry is not None and not entry.refused and forward.graph is not None:
            with call.block.holding(call.layers, backward=True):
                there = forward.epoch == self._epoch  # units may have moved to make room
                if there and entry.graph is None:
                    self._attempt(
                        entry,
                        call,
                        entry.body(forward, call, wanted, gradients, self._buffers),
                    )
                if there and entry.graph is not None:
                    forward.backward = key, entry
                    found = entry.replay(forward, call, inputs, gradients, device=self._device)
                    self.replays += 1
                    return found
        if kind is None or self._off:
            return self._eager.backward(call, inputs, wanted, gradients)
        before = rng_state(self._device)
        with call.block.holding(call.layers, backward=True):
            found = self._eager_backward(call, inputs, wanted, gradients)
        layouts = [None if g is None else layout_of(g) for g in found]
        lost = any(g is not None and x is None for g, x in zip(found, layouts, strict=True))
        refused = lost or self._drew_in_the_backward(before, call.block)
        forward.backward = key, BackwardEntry(layouts, refused=refused)
        if not refused:
            self._guesses.saw_backward(kind, layouts)
        return found

    def _drew_in_the_backward(self, before: Sequence[torch.Tensor], block: Block) -> bool:
        """Whether gradients drew random numbers: a graph would draw them from the forward's state,
        and leave the caller's as it was."""
        if all(map(torch.equal, before, rng_state(self._device))):
            return False
        reason = "its backward draws random numbers"
        self._say_once("block_runs_eagerly", block=block.name, reason=reason)
        return True

    def _eager_backward(
        self,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Run a backward that was not seen before, its temporaries where captures have theirs. If
        there is too little memory so, run it anywhere: nothing of it has been left behind."""
        found: list[torch.Tensor | None] = []
        try:
            with self._capturer.lent():
                found = self._eager.backward(call, inputs, wanted, gradients)
            with self._first():
                return [None if gradient is None else copied(gradient) for gradient in found]
        except torch.OutOfMemoryError:
            pass  # the handler keeps the memory of what failed alive
        finally:
            found = []
            self._capturer.settle()
        torch.cuda.empty_cache()
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

    def _forget(self, seen: OrderedDict[ForwardKey, ForwardEntry]) -> None:
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

    # -- capturing -----------------------------------------------------------------------------

    def _attempt(
        self, entry: ForwardEntry | BackwardEntry, call: BlockCall, body: Callable[[], None]
    ) -> None:
        """Capture ``body`` as the graph of ``entry``, or refuse it from here on."""
        self._leave_room(call.block)
        graph = self._capture(body, call.block)
        entry.graph = graph if entry.fits else None
        entry.refused = entry.graph is None

    def _leave_room(self, block: Block) -> None:
        """Keep no more signatures than any block has by now, if the device is nearly full."""
        kept = max(
            sum(entry.graph is not None for entry in seen.values()) for seen in self._seen.values()
        )
        if 0 < kept < self._signatures and not self._capturer.has_room():
            reason = f"neither device nor budget has room for graphs of more than {kept} lengths"
            self._say_once("graphs_limited", block=block.name, reason=reason)
            self.keep(kept)

    def _capture(self, body: Callable[[], None], block: Block) -> Replayable | None:
        """Capture what ``body`` launches, or say once why it cannot be and return None."""
        found = rng_state(self._device)
        try:
            graph = self._capturer.capture(body)
            return None if self._drew_on_the_host(found, block) else graph
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
