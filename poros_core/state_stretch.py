"""Optimizer state as it lies in host memory; see [Note: Optimizer state on the host]."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from poros_core.errors import PrepareError, StateError
from poros_core.host_store import HostBuffer, TensorEntry, layout
from poros_core.optimizer_state import StateTensor

__all__ = ["StateStretch"]

_POISON = 0xFF


class StateStretch:
    """The state of one parameter group on one device, as it lies in host memory."""

    def __init__(
        self, slots: Sequence[StateTensor], device: torch.device, *, old: StateStretch | None
    ) -> None:
        """Lay the state out and copy it to the host, into ``old``'s memory where that fits."""
        self.slots = slots
        self.device = device
        self.entries, nbytes = layout(slots)
        self.buffer: HostBuffer = (
            old.buffer
            if old is not None and old.can_take(self.entries)
            else _host_buffer(nbytes, device)
        )
        self.host = [
            self.buffer.tensor(entry).as_strided(entry.shape, slot.strides)
            for slot, entry in zip(slots, self.entries, strict=True)
        ]
        for view, slot in zip(self.host, slots, strict=True):
            view.copy_(slot.bound)
        self._memory: torch.Tensor | None = None
        if device.type == "cuda":
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def can_take(self, entries: Sequence[TensorEntry]) -> bool:
        """Say whether tensors laid out so can be written to this host memory. None of them may be
        read from it: they could have changed places."""
        start = self.buffer.bytes.data_ptr()
        end = start + self.buffer.nbytes
        return [(e.offset, e.nbytes) for e in entries] == [
            (e.offset, e.nbytes) for e in self.entries
        ] and not any(start <= entry.ref.get().data_ptr() < end for entry in entries)

    def bring_in(self, memory: torch.Tensor | None, *, poison: bool) -> list[torch.Tensor]:
        """Copy the state to the device; return it as tensors, one a slot.

        Args:
            memory: device memory for it, flat uint8; None allocates.
            poison: fill the host's copy with 0xFF.
        """
        if memory is None:
            memory = torch.empty(self.buffer.nbytes, dtype=torch.uint8, device=self.device)
        memory.copy_(self.buffer.bytes, non_blocking=True)
        if poison:
            self._host_bytes().fill_(_POISON)
        self._memory = memory
        typed = {entry.dtype: memory.view(entry.dtype) for entry in self.entries}
        return [
            (flat := typed[entry.dtype]).as_strided(
                entry.shape,
                slot.strides,
                flat.storage_offset() + entry.offset // entry.dtype.itemsize,
            )
            for slot, entry in zip(self.slots, self.entries, strict=True)
        ]

    def take_out(self, *, poison: bool) -> None:
        """Copy the state back, and let the device memory go."""
        assert self._memory is not None, "optimizer state is taken out before it was brought in"
        self.buffer.bytes.copy_(self._memory, non_blocking=True)
        if poison:
            self._memory.fill_(_POISON)
        self._memory = None

    def _host_bytes(self) -> torch.Tensor:
        """Return the host memory as the device sees it."""
        size = self.buffer.nbytes
        return self.buffer.tensor(
            TensorEntry(self.slots[0], 0, size, torch.uint8, torch.Size((size,)), self.device)
        )


def _host_buffer(nbytes: int, device: torch.device) -> HostBuffer:
    try:
        return HostBuffer(nbytes, device=device)
    except PrepareError as error:
        raise StateError(
            f"The optimizer's state cannot be kept on the host. {error} Or leave "
            "poros.offload_optimizer() out."
        ) from error
