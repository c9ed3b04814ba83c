"""The arena: one stretch of device memory for slots, head and the temporaries of graphs.

[Note: One arena]
Layers stand in slots at the arena's start. The head is on the device only while no layer computes,
so it takes the arena from its start, slots and all. It is larger than the slots as a rule; what it
has beyond them lies idle while layers compute, and there the graphs of layers keep their
temporaries. The allocator lets graphs do so because the arena is allocated in their pool: while a
graph is being captured that part is free in the pool, and afterwards it is taken back. A captured
graph goes on using the addresses it was given.

[Note: Memory that is not filled]
Under deterministic algorithms torch fills every tensor that it makes empty. For an arena it must
not: the kernel that fills runs on the stream that allocates, and the memory is used on two others,
which do not wait for it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from poros_core.workspaces import drop_workspaces
from poros_runtimes.streamed.pools import Pool
from poros_runtimes.streamed.streams import own_stream

__all__ = ["Arena", "GraphArena", "PlainArena", "not_filled"]

_BLOCK = 512
"""Bytes. What the CUDA caching allocator rounds sizes up to, so that blocks adjoin."""
_SMALL = 2 << 20
"""Bytes. The allocator serves requests of up to 1 MiB from segments of their own, of 2 MiB."""


class Arena(Protocol):
    """A stretch of device memory that units are copied into."""

    @property
    def memory(self) -> torch.Tensor:
        """All of it, a flat uint8 tensor."""
        ...

    @property
    def shareable(self) -> bool:
        """Whether a unit may be copied into the part that graphs use."""
        ...

    def used_by(self, stream: Any) -> None:
        """Tell the allocator that work on ``stream`` may outlive the arena."""
        ...


class PlainArena:
    """Ordinary memory, of which graphs use nothing."""

    shareable = True

    def __init__(self, size: int, *, device: torch.device) -> None:
        with not_filled():
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def used_by(self, stream: Any) -> None:
        """Record the stream; see ``Arena``."""
        self.memory.record_stream(stream)


class _Stretch:
    """Makes a tensor of adjoining blocks (CUDA array interface, version 2), and keeps them."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


class _Blocks:
    """The blocks that an arena holds, and the streams that use them."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None
        self.rest: torch.Tensor | None = None
        self.streams: list[Any] = []

    def free(self) -> None:
        """Give the blocks to the allocator, to be used again once the streams are done."""
        blocks = [block for block in (self.kept, self.rest) if block is not None]
        for block in blocks:
            for stream in self.streams:
                block.record_stream(stream)
        self.kept = self.rest = None


class GraphArena:
    """Memory in a pool that graphs draw from; see [Note: One arena].

    Attributes:
        pool: the pool, which graphs are to be captured in.
        stream: the stream that they are to be captured on.
    """

    def __init__(self, size: int, *, kept: int, device: torch.device) -> None:
        """Allocate an arena.

        Args:
            size: bytes.
            kept: bytes at the start that are never lent.
            device: a CUDA device.
        """
        self._device = device
        self.stream: Any = own_stream(self, device)
        self.pool = Pool(device)
        self._blocks = _Blocks()
        self._blocks.streams.append(torch.cuda.current_stream(device))  # layers compute there
        weakref.finalize(self, _Blocks.free, self._blocks).atexit = False
        self.shareable = True
        kept = min(size, -(-kept // _BLOCK) * _BLOCK)
        self._rest = size - kept
        whole = self._allocate(size)
        self._start, self._kept = whole.data_ptr(), kept
        del whole
        self._blocks.kept = self._allocate(kept)
        if self._blocks.kept.data_ptr() != self._start or not self._take_back():
            # The allocator was told not to split blocks (max_split_size_mb): nothing can be lent.
            self._blocks.free()
            self._blocks.kept = self._allocate(size)
            self._start, self._rest = self._blocks.kept.data_ptr(), 0
        self._size = size

    @property
    def memory(self) -> torch.Tensor:
        """All of it; see ``Arena``. The tensor keeps the arena alive, not the other way round."""
        with torch.cuda.device(self._device):
            return torch.as_tensor(_Stretch(self._start, self._size, self), device=self._device)

    def used_by(self, stream: Any) -> None:
        """Record the stream when the arena is dropped; see ``Arena``."""
        self._blocks.streams.append(stream)

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """Set memory beyond the slots apart for something that is idle whenever the head is on the
        device. Returns a flat uint8 tensor, or None if there is no room."""
        nbytes = -(-nbytes // _BLOCK) * _BLOCK
        if not self.shareable or nbytes < _SMALL or nbytes > self._rest:
            return None
        self._blocks.rest = None
        block = self._allocate(nbytes)
        if block.data_ptr() == self._start + self._kept:
            self._kept += nbytes
            self._rest -= nbytes
            self.shareable = self._take_back()
            return block
        del block
        self.shareable = self._take_back()
        return None

    @property
    def room(self) -> int:
        """Bytes that can be lent."""
        return self._rest if self.shareable and self._rest >= _SMALL else 0

    def lend(self) -> None:
        """Free what lies beyond the slots, for work that has its temporaries there."""
        self._blocks.rest = None

    def settle(self) -> None:
        """Take back what was lent. If something that was allocated there is still alive, the part
        is left to the graphs, and ``shareable`` turns false; a later call tries again."""
        drop_workspaces()
        self.shareable = self._take_back()
        if not self.shareable:
            gc.collect()
            self.shareable = self._take_back()

    def _take_back(self) -> bool:
        if self._rest < _SMALL or self._blocks.rest is not None:
            return True
        if not self.pool.lies_free(self._start + self._kept, self._rest):
            return False
        others = []  # free memory of that size may lie elsewhere too
        for _ in range(4):
            try:
                block = self._allocate(self._rest)
            except torch.OutOfMemoryError:  # it lies nowhere in the pool
                return False
            if block.data_ptr() == self._start + self._kept:
                self._blocks.rest = block
                return True
            others.append(block)
        return False

    def _allocate(self, nbytes: int) -> torch.Tensor:
        with not_filled(), torch.cuda.stream(self.stream), self.pool.used():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


@contextmanager
def not_filled() -> Iterator[None]:
    """See [Note: Memory that is not filled]."""
    settings: Any = torch.utils.deterministic
    found = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = found
