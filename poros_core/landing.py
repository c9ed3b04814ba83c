"""Where finished tensors wait for their unit to be laid out.

Each has memory of its own that goes back to the system when it is dropped. Ordinary allocations do
not: what is between two that live on stays with the process, and the peak of a load would hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import torch

__all__ = ["FileLanding", "give_back_free_memory", "land_in_memory", "room_for"]

_SMALL = 1 << 16
"""Bytes below which a tensor is left to the allocator, which serves it from what it has."""


def land_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory, leaving alone what is there already."""
    if tensor.device.type == "cpu" or tensor.nbytes < _SMALL:
        return tensor.cpu()
    return _copied(tensor, mmap.mmap(-1, tensor.nbytes))


def room_for(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor on a device, shaped like another."""
    if device.type != "cpu" or like.nbytes < _SMALL:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    return _mapped(like, mmap.mmap(-1, like.nbytes))


def give_back_free_memory() -> None:
    """Give what the C library holds and nobody uses back to the system, where glibc is."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class FileLanding:
    """Puts tensors into a file that has no name, where they give way when memory is short."""

    def __init__(self, folder: Path) -> None:
        """Make the file.

        Args:
            folder: on the disk that is to hold it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        path = folder / "waiting"
        self._handle = os.open(path, flags, 0o600)
        path.unlink()
        self._end = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the file.

        Raises:
            OSError: the disk is full.
        """
        if tensor.nbytes < _SMALL:
            return tensor.cpu()
        begin, size = self._end, -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fallocate(self._handle, begin, size)
        self._end += size
        return _copied(tensor, mmap.mmap(self._handle, size, offset=begin))

    def close(self) -> None:
        """Close the file; tensors in it stay."""
        os.close(self._handle)


def _copied(tensor: torch.Tensor, memory: mmap.mmap) -> torch.Tensor:
    return _mapped(tensor, memory).copy_(tensor)


def _mapped(like: torch.Tensor, memory: mmap.mmap) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
    return flat.view(like.shape)
