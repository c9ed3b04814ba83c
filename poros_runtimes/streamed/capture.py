"""Capturing work as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from poros_runtimes.streamed.arena import GraphArena
from poros_runtimes.streamed.pools import drawing

__all__ = ["Capturer", "CudaCapturer", "LostGraphs", "Replayable"]

_LEFT_ALONE = 0.05
"""Share of the device's memory that graphs of further lengths leave to what a longer batch may
need: they lie outside the allocator, which cannot have it back."""


class LostGraphs(RuntimeError):
    """A capture failed in a way that makes earlier graphs useless, and later ones unlikely."""


class Replayable(Protocol):
    """Something captured that can be run again."""

    def replay(self) -> None:
        """Run the captured kernels on the current stream."""
        ...


class Capturer(Protocol):
    """Turns work into something that can be replayed."""

    def capture(self, body: Callable[[], None]) -> Replayable:
        """Capture what ``body`` launches, without running it.

        Raises:
            LostGraphs: something in it cannot be captured, and no earlier graph may be replayed.
            RuntimeError: something in it cannot be captured.
        """
        ...

    def has_room(self) -> bool:
        """Say whether the device has memory for graphs beyond those of one length."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Return a context in which work that runs once, eagerly, may have its temporaries where
        those of captures are. What lasts must be copied out of it; then ``settle`` follows."""
        ...

    def settle(self) -> None:
        """Called after each capture, also one that failed, when its temporaries are gone."""
        ...

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """Return device memory that keeps its bytes only while blocks run, flat uint8; None if
        there is none to spare."""
        ...


class _Captured:
    """A graph, and after it the arena whose addresses it uses: they go in this order."""

    def __init__(self, graph: torch.cuda.CUDAGraph, arena: GraphArena) -> None:
        self.replay = graph.replay
        self._arena = arena


class CudaCapturer:
    """Captures CUDA graphs, all in one pool; see [Note: Graphs and memory]."""

    def __init__(
        self,
        arena: GraphArena,
        *,
        device: torch.device,
        lends: Callable[[], bool],
        allows: Callable[[], bool] | None = None,
    ) -> None:
        """Make a capturer whose graphs keep their temporaries in ``arena`` where they fit.

        Args:
            arena: the arena.
            device: the compute device.
            lends: whether the arena is lent to work that runs once. What does not fit there stays
                in its pool for good, as memory that graphs will want.
            allows: whether a budget has room for graphs of one more length.
        """
        self._allows = allows
        self._held: GraphArena | None = arena
        self._device = device
        self._lends = lends

    @property
    def _arena(self) -> GraphArena:
        assert self._held is not None
        return self._held

    def use(self, arena: GraphArena | None) -> None:
        """Capture in another arena from here on; None, in none for the moment."""
        self._held = arena

    def capture(self, body: Callable[[], None]) -> Replayable:
        """Capture on a stream of its own; see ``Capturer``.

        Only this thread is watched for calls that a capture forbids, so a data loader's threads
        may go on pinning memory. The collector waits: freeing a CUDA object would break it.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        stream = self._arena.stream
        stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()
        self._arena.lend()
        try:
            with drawing(), torch.cuda.stream(stream):
                try:
                    graph.capture_begin(pool=self._arena.pool.id, capture_error_mode="thread_local")
                    body()
                    graph.capture_end()
                except BaseException as error:
                    lost = self._abandon(graph)
                    if lost and isinstance(error, Exception):  # an interrupt goes on as it is
                        raise LostGraphs(str(error)) from error
                    raise
        finally:
            current.wait_stream(stream)
            if collecting:
                gc.enable()
        return _Captured(graph, self._arena)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> bool:
        """Undo what a capture that failed leaves behind, and say whether earlier graphs are lost.

        CUDA reports the end of such a capture as an error, before torch has closed the pool and
        told the random-number generator that the capture is over; and where CUDA does not even let
        it begin, torch has told both of it already. The generator then gets a fresh state of the
        same value, and graphs draw from the old one. A graph that the generator itself refused is
        made known to it now: torch ends the process when one that is not goes.
        """
        bindings: Any = torch._C
        generator: Any = torch.cuda.default_generators[self._device.index]
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            graph.register_generator_state(generator)
        with suppress(RuntimeError):
            bindings._cuda_endAllocateToPool(self._device.index, self._arena.pool.id)
        try:
            torch.rand(1, device=self._device)  # the caller puts the random-number state back
        except RuntimeError:
            generator.graphsafe_set_state(generator.clone_state())
            return True
        return False

    def has_room(self) -> bool:
        """Whether more than ``_LEFT_ALONE`` of the device is free, or idle in the allocator, and
        the budget allows it; see ``Capturer``."""
        if self._allows is not None and not self._allows():
            return False
        free, total = torch.cuda.mem_get_info(self._device)
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + idle > _LEFT_ALONE * total

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Run on the stream of captures; see ``Capturer``."""
        arena, current = self._arena, torch.cuda.current_stream(self._device)
        if not arena.room or not self._lends():
            yield
            return
        arena.stream.wait_stream(current)
        arena.lend()
        try:
            with torch.cuda.stream(arena.stream), arena.pool.used():
                yield
        finally:
            current.wait_stream(arena.stream)

    def settle(self) -> None:
        """Let the arena take back what was lent; see ``Capturer``."""
        self._arena.settle()

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """Reserve memory in the arena; see ``Capturer``."""
        return self._arena.reserve(nbytes)
