"""Where a model's units stand on the device: in the arena's slots, or in memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from poros_core.host_store import ALIGNMENT, UnitImage
from poros_core.log import get_logger
from poros_core.schedule import Region
from poros_runtimes.streamed.arena import Arena, GraphArena, PlainArena
from poros_runtimes.streamed.lane import Lane
from poros_runtimes.streamed.unit_sizes import UnitSizes
from poros_runtimes.streamed.window import Window

__all__ = ["UnitMemory"]

_log = get_logger("runtime")

_START = 2
"""Units that stay in the window between steps: what the next forward starts with. The first
computes while the second waits and the third is on its way."""


class UnitMemory:
    """The window of one model, and the memory that its units have there. Gives them other memory;
    when they may move, and that graphs go with that, is for ``Units`` to know.

    Attributes:
        sizes: of the units.
        window: what stands where.
        arena: the arena; None while it is freed.
        slot_bytes: bytes of the arena that graphs never use.
        shared: whether the head takes the arena from its start, slots and all.
        resident: layers that have memory of their own.
    """

    def __init__(
        self,
        layers: Sequence[UnitImage | None],
        head: UnitImage | None,
        *,
        slots: int,
        lane: Lane,
        device: torch.device,
        graphs: bool,
        poison: bool,
    ) -> None:
        """Allocate the arena, and make the window.

        Args:
            layers: one image per layer; None for one with nothing to stream.
            head: the head's; None if it does not stream.
            slots: how many slots layers recycle.
            lane: moves the bytes.
            device: the compute device.
            graphs: graphs keep their temporaries in the arena.
            poison: see ``Window``.
        """
        self._count = len(layers)
        self._lane = lane
        self._device = device
        self._graphs = graphs
        self.resident: frozenset[int] = frozenset()
        self.sizes = UnitSizes(
            tuple(0 if image is None else image.nbytes for image in layers),
            0 if head is None else head.nbytes,
            slots=slots,
        )
        laid_out, regions = self.sizes.regions(head=True, resident=())
        arena = self._new_arena(laid_out.size, kept=laid_out.slot_bytes)
        self.arena: Arena | None = arena
        self.slot_bytes = laid_out.slot_bytes
        self.shared = head is not None
        self.window = Window(
            [*layers, head],
            [regions.get(unit) for unit in range(self._count + 1)],
            arena=arena.memory,
            lane=lane,
            device=device,
            poison=poison,
            readable=frozenset({self._count}),
        )

    @property
    def shareable(self) -> bool:
        """Whether the head may be copied into the part of the arena that graphs use."""
        return self.arena is not None and self.arena.shareable

    @property
    def kept(self) -> set[int]:
        """Units that stay in the window between steps."""
        streaming = (layer for layer in range(self._count) if layer not in self.resident)
        return {*self.resident, *islice(streaming, _START)}

    def _new_arena(self, size: int, *, kept: int) -> Arena:
        size = max(size, ALIGNMENT)  # where nothing streams, graphs want a pool all the same
        arena: Arena = (
            GraphArena(size, kept=kept, device=self._device)
            if self._graphs
            else PlainArena(size, device=self._device)
        )
        self._lane.adopt(arena)
        return arena

    def rebuild(self) -> None:
        """Allocate the arena anew, after it was freed."""
        slots, regions = self.sizes.regions(head=True, resident=self.resident)
        self.arena = self._new_arena(slots.size, kept=slots.slot_bytes)
        self.slot_bytes = slots.slot_bytes
        self.window.rebuild(regions, self.arena.memory)

    def keep_resident(self, *, spare: int) -> bool:
        """Give as many layers as fit memory of their own. Returns whether there are any.

        Args:
            spare: bytes that there are for them.
        """
        chosen = self.sizes.most_resident(spare=spare, slot_bytes=self.slot_bytes)
        nbytes, own = self.sizes.side_by_side(chosen)
        _log.info("units_kept", units=len(chosen), bytes=nbytes, spare=spare)
        if not chosen:
            return False
        kept = PlainArena(nbytes, device=self._device)
        self._lane.adopt(kept)
        _, streaming = self.sizes.regions(head=self.shared, resident=chosen)
        self.window.move(own, kept.memory)
        self.window.move(streaming, self.window.arena)
        self.resident = chosen
        return True

    def move_layers(self, reason: str) -> None:
        """Give layers an arena that the head has no part of.

        Raises:
            StateError: one of them is bound.
        """
        slots, regions = self.sizes.regions(head=False, resident=self.resident)
        arena = self._new_arena(slots.size, kept=slots.size)
        self.window.rebuild(regions, arena.memory)
        self.arena, self.shared, self.slot_bytes = arena, False, slots.size
        _log.info("layers_moved", reason=reason, bytes=slots.size)

    def move_head(self, reason: str) -> None:
        """Give the head memory of its own."""
        arena = PlainArena(self.sizes.head, device=self._device)
        self._lane.adopt(arena)
        self.window.move({self._count: Region(0, self.sizes.head)}, arena.memory)
        self.shared = False
        _log.info("head_moved", reason=reason, bytes=self.sizes.head)
