"""Pools of the CUDA caching allocator.

[Note: The end of a pool]
While any thread draws from a pool, or captures a graph, the allocator destroys no pool: it ends the
process instead. Nobody can say when the last reference to a pool goes; the collector may find it in
the midst of a layer, or another thread be done with a model. So a pool that nobody refers to is
kept until nobody draws.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Pool", "drawing"]

_lock = threading.RLock()  # the collector may come while this thread holds it
_drawing = 0
_ended: list[Any] = []


class Pool:
    """A pool on one device; see [Note: The end of a pool]."""

    def __init__(self, device: torch.device) -> None:
        """Make a pool that is empty.

        Args:
            device: a CUDA device, which need not be the current one.
        """
        self._device = device
        with torch.cuda.device(device):
            self._pool: list[Any] = [torch.cuda.MemPool()]
        weakref.finalize(self, _end, self._pool).atexit = False

    @property
    def id(self) -> Any:
        """What torch calls it."""
        return self._pool[0].id

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw what this thread allocates on the device from the pool."""
        with drawing(), torch.cuda.use_mem_pool(self._pool[0], self._device):
            yield

    def lies_free(self, start: int, nbytes: int) -> bool:
        """Whether nothing in the pool that is in use reaches into a stretch of memory."""
        for segment in self._pool[0].snapshot():
            address: int = segment["address"]
            for block in segment["blocks"]:
                end = address + block["size"]
                if block["state"] != "inactive" and address < start + nbytes and start < end:
                    return False
                address = end
        return True


@contextmanager
def drawing() -> Iterator[None]:
    """Enter what no pool may end in."""
    global _drawing
    with _lock:
        _drawing += 1
    try:
        yield
    finally:
        with _lock:
            _drawing -= 1
            if not _drawing:
                _ended.clear()


def _end(pool: list[Any]) -> None:
    with _lock:
        if _drawing:
            _ended.extend(pool)
        pool.clear()
