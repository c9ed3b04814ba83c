"""The frozen base in host memory.

One flat, aligned stretch per unit with a table of what lies where, so that one copy moves a unit.
On a machine with CUDA the stretch is page-locked and mapped: the device can read it in place.

[Note: Parked tensors]
Between uses, a frozen parameter is a view of its unit's host stretch. With CUDA the view is a
device tensor over mapped host memory (unified addressing): it takes no device memory, has the
right shape, dtype and device, ``.to(device)`` leaves it alone, and whoever reads it outside the
decoder's forward reads the true bytes, over the link. Embedding rows are gathered from it by the
ordinary embedding kernel, so that no token id has to come to the host first.

[Note: Staged units]
Where host memory cannot be page-locked, or cannot hold the base, the layers stand in ordinary
memory or in files (``poros.load(host=...)``), and copies go through a ring of page-locked buffers.
A device cannot read such memory in place. So while a layer is not in the window, its tensors on
CUDA are a device tensor over bytes that are NaN in every float format. Before ``prepare``, and
after ``unprepare``, they are host tensors with the true bytes. Head and embeddings are read in
place, and are page-locked always.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from poros_core.errors import StateError
from poros_core.host_memory import (
    ALIGNMENT,
    HostBuffer,
    HostMemory,
    TensorEntry,
    fill,
    layout,
)
from poros_core.protocols import TensorRef

if TYPE_CHECKING:
    from poros_core.load_progress import LoadReport
    from poros_core.ring import StagingRing

__all__ = ["ALIGNMENT", "HostBuffer", "HostStore", "TensorEntry", "UnitImage", "layout"]


class Closable(Protocol):
    """Something that is open."""

    def close(self) -> None:
        """Close it."""
        ...


class UnitImage:
    """The frozen tensors of one unit, as they lie in its stretch."""

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        buffer: HostMemory,
        *,
        ring: StagingRing | None = None,
    ) -> None:
        """Describe a unit.

        Args:
            entries: where its tensors lie.
            buffer: what they lie in.
            ring: what copies go through, if the stretch is not page-locked.
        """
        self.entries = tuple(entries)
        self.buffer = buffer
        self.ring = ring
        self._true = [(entry.ref, buffer.tensor(entry)) for entry in self.entries]
        self._parked = self._true
        if ring is not None:
            blank = ring.join(self)
            if blank is not None:
                self._parked = [(entry.ref, blank.tensor(entry)) for entry in self.entries]

    @property
    def nbytes(self) -> int:
        """Size of the stretch in bytes, which is what one copy moves."""
        return self.buffer.nbytes

    def park(self) -> None:
        """Bind every tensor to what stands for it while it is not on the device; see
        [Note: Parked tensors] and [Note: Staged units]."""
        for ref, view in self._parked:
            ref.set(view)

    def true_tensors(self) -> list[tuple[TensorRef, torch.Tensor]]:
        """Return each place with its true bytes in host memory."""
        return self._true

    def settle(self) -> None:
        """Bind every tensor to its true bytes in host memory."""
        for ref, view in self._true:
            ref.set(view)

    def is_parked(self, keys: Collection[tuple[int, str]]) -> bool:
        """Say whether the tensors of ``keys`` are bound as ``park`` or ``settle`` binds them."""
        return any(
            all(
                ref.get().data_ptr() == view.data_ptr() and ref.get().dtype == view.dtype
                for ref, view in bound
                if ref.key in keys
            )
            for bound in (self._true, self._parked)
        )

    def bytes_for_copy(self) -> torch.Tensor:
        """Return the stretch, or its copy in the ring, to be copied to the device now.

        It holds the bytes until ``copied``, and after that until the copy is done. May wait for
        a disk.
        """
        return self.buffer.bytes if self.ring is None else self.ring.staged(self)

    def copied(self, event: object) -> None:
        """Note the event that the copy of what ``bytes_for_copy`` returned is done."""
        if self.ring is not None:
            self.ring.copied(self, event)

    def views(self, memory: torch.Tensor) -> list[tuple[TensorRef, torch.Tensor]]:
        """Return each place with its view of ``memory``, a flat uint8 tensor of at least
        ``nbytes`` bytes that is laid out like the stretch."""
        return [
            (
                entry.ref,
                memory[entry.offset : entry.offset + entry.nbytes]
                .view(entry.dtype)
                .view(entry.shape),
            )
            for entry in self.entries
        ]

    def restore(self, device: torch.device | None) -> None:
        """Bind every tensor to memory of its own again.

        Args:
            device: where to; None means where each tensor was when it was adopted.
        """
        for entry in self.entries:
            source = self.buffer.tensor(entry)
            target = device if device is not None else entry.origin
            fresh = torch.empty(entry.shape, dtype=entry.dtype, device=target)
            entry.ref.set(fresh.copy_(source))


class HostStore:
    """All unit images of one model.

    A model that ``poros.load`` gave brings its store along; otherwise ``prepare`` makes one.
    """

    def __init__(
        self, device: torch.device, *, home: bool = False, ring: StagingRing | None = None
    ) -> None:
        """Make an empty store.

        Args:
            device: the compute device, which the stretches are mapped for.
            home: the store is where the base lives (``poros.load``), not a place it was moved to.
            ring: what copies of staged units go through; see [Note: Staged units].
        """
        self.device = device
        self.home = home
        self.ring = ring
        self.report: LoadReport | None = None
        self._images: list[UnitImage] = []
        self._by_key: dict[tuple[int, str], UnitImage] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the base takes."""
        return sum(image.nbytes for image in self._images)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        raise StateError(
            "A model whose base stands in Poros' host store cannot be copied. Copy the adapters "
            "(peft.get_peft_model_state_dict(model)), or call poros.unprepare(model, device=...) "
            "first."
        )

    def images(self) -> tuple[UnitImage, ...]:
        """Return every unit."""
        return tuple(self._images)

    def keep(self, owner: Closable) -> None:
        """Keep something open that units are read from, as long as this store lives."""
        weakref.finalize(self, owner.close)

    def settle(self) -> None:
        """Bind every unit to its true bytes in host memory."""
        for image in self._images:
            image.settle()

    def holds(self, key: tuple[int, str]) -> bool:
        """Say whether the bytes of a place are in this store."""
        return key in self._by_key

    def adopt(self, refs: Sequence[TensorRef], *, staged: bool = False) -> UnitImage | None:
        """Move the tensors of one unit into host memory and park them.

        A unit that the store holds already is returned as it is, unless somebody gave one of its
        tensors other memory since (``prepare_model_for_kbit_training`` casts, for example): then
        it is laid out anew from what the model holds now. The memory that the tensors had before
        is free once nothing else refers to it.

        Args:
            refs: the tensors.
            staged: leave the unit's memory pageable; copies go through the ring.

        Returns:
            The image, or None if there are no tensors.
        """
        if not refs:
            return None
        known = {id(image): image for ref in refs if (image := self._by_key.get(ref.key))}
        if len(known) == 1 and all(ref.key in self._by_key for ref in refs):
            image = next(iter(known.values()))
            if image.is_parked({ref.key for ref in refs}):
                image.park()
                return self._narrow(image, refs)
        staged = staged or any(image.ring is not None for image in known.values())
        entries, buffer = self.lay_out(refs, staged=staged)
        self._images = [other for other in self._images if id(other) not in known]
        for image in known.values():
            if image.ring is not None:
                image.ring.leave(image)
        return self.place(entries, buffer, staged=staged)

    def lay_out(
        self, refs: Sequence[TensorRef], *, staged: bool = False
    ) -> tuple[list[TensorEntry], HostBuffer]:
        """Copy the tensors of one unit into a stretch of its own, which is to be placed then.

        The store stays as it is, so several threads may lay units out at once.
        """
        entries, nbytes = layout(refs)
        buffer = HostBuffer(nbytes, device=self.device, locked=not staged)
        fill(buffer, entries)
        return entries, buffer

    def place(
        self, entries: Sequence[TensorEntry], buffer: HostMemory, *, staged: bool = False
    ) -> UnitImage:
        """Take over a unit whose bytes are in host memory already, and park its tensors."""
        assert not staged or self.ring is not None
        image = UnitImage(entries, buffer, ring=self.ring if staged else None)
        image.park()
        self._images.append(image)
        self._by_key.update((entry.ref.key, image) for entry in entries)
        return image

    def restore(self, device: torch.device | None) -> None:
        """Give every tensor memory of its own on ``device``; None means where it was adopted
        from, which for a model that ``poros.load`` gave is this store."""
        for image in self._images:
            if device is None and self.home:
                image.settle()
            else:
                image.restore(device)

    def _narrow(self, image: UnitImage, refs: Sequence[TensorRef]) -> UnitImage:
        """Return ``image`` with only the tensors that are still frozen in the model."""
        wanted = {ref.key for ref in refs}
        if len(wanted) == len(image.entries):
            return image
        entries = [entry for entry in image.entries if entry.ref.key in wanted]
        return UnitImage(entries, image.buffer, ring=image.ring)
