"""Stretches of host memory that units stand in, and how tensors lie in them."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from attrs import frozen

from poros_core.errors import PrepareError
from poros_core.file_tensors import LARGE, MappedFiles, read_span
from poros_core.log import get_logger
from poros_core.machine import available_memory
from poros_core.page_locking import lock, lockable_memory, populate
from poros_core.protocols import TensorRef

__all__ = [
    "ALIGNMENT",
    "HostBuffer",
    "HostMemory",
    "TensorEntry",
    "fill",
    "layout",
    "layout_of",
]

_log = get_logger("host_store")

ALIGNMENT = 256
"""Bytes. The CUDA allocator aligns to 512 and kernels choose by alignment up to 256 at most; a
smaller alignment than a resident run's could select other kernels, and other bits."""


@frozen
class TensorEntry:
    """Where one tensor lies in its unit's stretch.

    Attributes:
        ref: the place in the model that it is bound to.
        offset: bytes from the start of the stretch, a multiple of ``ALIGNMENT``.
        nbytes: its size in bytes.
        dtype: its element type.
        shape: its shape.
        origin: the device that it was on when it was adopted.
    """

    ref: TensorRef
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    origin: torch.device


class _MappedPointer:
    """Carries a device pointer into ``torch.as_tensor`` by the CUDA array interface (version 2),
    and keeps the memory behind it alive."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


class HostMemory(Protocol):
    """A stretch that a unit stands in: memory, or a file that is mapped."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def bytes(self) -> torch.Tensor:
        """Its content as the host reads it, flat uint8."""
        ...

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return a view of one tensor, as the device sees it if the device can."""
        ...

    def view(self) -> memoryview:
        """Return the bytes as the host reads and writes them."""
        ...

    def will_need(self) -> None:
        """Be told that all of it will be read now. May wait for a disk."""
        ...


class HostBuffer:
    """A page-aligned stretch of host memory, page-locked and mapped if a CUDA device will read it.

    The size is exact: ``pin_memory()`` would round it up to a power of two. See
    [Note: Page-locked memory] in ``page_locking``.
    """

    def __init__(
        self, nbytes: int, *, device: torch.device, locked: bool = True, later: bool = False
    ) -> None:
        """Allocate ``nbytes`` bytes for use with ``device``.

        Args:
            nbytes: the size.
            device: the compute device.
            locked: page-lock it, if the device is a CUDA device.
            later: only make its pages, and leave the locking to ``lock``.

        Raises:
            PrepareError: the memory cannot be had or cannot be page-locked.
        """
        self.nbytes = nbytes
        self.device = device
        self.locked = False
        wanted = locked and device.type == "cuda"
        self._lock_later = wanted and later
        free = available_memory()
        if free is not None and nbytes > free:
            _say_short(nbytes, free, device)
        try:
            self._map = lockable_memory(nbytes) if wanted else mmap.mmap(-1, max(nbytes, 1))
        except OSError as error:
            raise PrepareError(
                f"Host memory for the base cannot be had: {nbytes / 1e9:.2f} GB more were asked "
                f"for ({error}). Free memory, or use a smaller model."
            ) from error
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes)
        if wanted:
            populate(self.bytes.data_ptr(), nbytes)
            if not later:
                self._lock()

    def lock(self) -> None:
        """Page-lock what is to be and was not until now.

        Raises:
            PrepareError: it cannot be page-locked.
        """
        if self._lock_later:
            self._lock()
            self._lock_later = False

    def _lock(self) -> None:
        unlock = lock(self.bytes.data_ptr(), self.bytes.numel(), self.device)
        weakref.finalize(self, unlock).atexit = False
        self.locked = True

    def shrink(self, nbytes: int) -> None:
        """Leave out what is behind the first ``nbytes`` bytes, of which nothing is used."""
        assert nbytes <= self.nbytes
        self.nbytes = nbytes
        self.bytes = self.bytes[:nbytes]

    def will_need(self) -> None:
        """Do nothing: it is in memory."""

    def view(self) -> memoryview:
        """Return the bytes as the host reads and writes them."""
        return memoryview(self._map)[: self.nbytes]

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return a view of one tensor with a storage of its own: as ``device`` sees it if the
        stretch is page-locked, else as the host does."""
        if self.locked:
            pointer = self.bytes.data_ptr() + entry.offset
            with torch.cuda.device(self.device):
                flat = torch.as_tensor(
                    _MappedPointer(pointer, entry.nbytes, self), device=self.device
                )
            return flat.view(entry.dtype).view(entry.shape)
        count = entry.nbytes // entry.dtype.itemsize
        return torch.frombuffer(
            self._map, dtype=entry.dtype, count=count, offset=entry.offset
        ).view(entry.shape)


def _say_short(nbytes: int, free: int, device: torch.device) -> None:
    """Refuse on a CPU, where the process would be killed while it copies. Page-locking answers for
    itself, and a virtual machine may be given more memory as it is used, so there only a warning.
    """
    if device.type == "cuda":
        _log.warning("host_memory_low", needed=nbytes, available=free)
        return
    raise PrepareError(
        f"Host memory for the base cannot be had: {nbytes / 1e9:.2f} GB more are needed, and "
        f"{free / 1e9:.2f} GB are available. Free memory, or use a smaller model."
    )


def layout(refs: Iterable[TensorRef]) -> tuple[list[TensorEntry], int]:
    """Lay tensors out in a stretch, in the order given.

    Returns:
        The table, and the size of the stretch in bytes.
    """
    placed = [(ref, ref.get()) for ref in refs]
    offsets, end = layout_of([tensor.nbytes for _, tensor in placed])
    return [
        TensorEntry(ref, offset, tensor.nbytes, tensor.dtype, tensor.shape, tensor.device)
        for (ref, tensor), offset in zip(placed, offsets, strict=True)
    ], end


def layout_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offset of each of some tensors in a stretch, and the size of the stretch.

    Args:
        sizes: their bytes, in order.
    """
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def fill(buffer: HostBuffer, entries: Iterable[TensorEntry]) -> None:
    """Copy the tensors that are bound now to where they lie in a stretch; large ones that are views
    of files are read from there. See [Note: Read, not looked at] in ``file_tensors``.

    Raises:
        CheckpointError: a file is damaged.
        OSError: a file cannot be read.
    """
    files: MappedFiles | None = None
    for entry in entries:
        tensor = entry.ref.get().detach()
        end = entry.offset + entry.nbytes
        if tensor.nbytes >= LARGE:
            files = files or MappedFiles()
            span = files.span_of(tensor)
            if span is not None:
                read_span(span, buffer.view()[entry.offset : end])
                continue
        buffer.bytes[entry.offset : end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
