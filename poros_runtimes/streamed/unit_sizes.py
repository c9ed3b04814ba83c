"""The sizes of a model's units, and what follows from them: where they go, and which can stay."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from attrs import frozen

from poros_core.schedule import Region, Regions, most_resident

__all__ = ["UnitSizes"]


@frozen
class UnitSizes:
    """What units take, in bytes.

    Attributes:
        layers: of each layer; 0 for one with nothing to stream.
        head: of the head; 0 if it does not stream.
        slots: how many slots layers recycle.
    """

    layers: tuple[int, ...]
    head: int
    slots: int

    def regions(
        self, *, head: bool, resident: Collection[int]
    ) -> tuple[Regions, dict[int, Region]]:
        """Lay out an arena for what streams; return that, and each unit's region.

        Args:
            head: whether the head shares it.
            resident: layers that have memory of their own.
        """
        streaming = [layer for layer in range(len(self.layers)) if layer not in resident]
        sizes = [self.layers[layer] for layer in streaming]
        regions = Regions.lay_out(sizes, slots=self.slots, head_bytes=self.head if head else 0)
        found = dict(zip(streaming, regions.layers, strict=True))
        if regions.head is not None:
            found[len(self.layers)] = regions.head
        return regions, found

    def side_by_side(self, layers: Collection[int]) -> tuple[int, dict[int, Region]]:
        """Give some layers regions of their own; return what these take, and each region."""
        ordered = sorted(layers)
        *starts, end = accumulate((self.layers[layer] for layer in ordered), initial=0)
        return end, {
            layer: Region(start, self.layers[layer])
            for layer, start in zip(ordered, starts, strict=True)
        }

    def most_resident(self, *, spare: int, slot_bytes: int) -> frozenset[int]:
        """Choose as many layers as fit, so that those that stream still fit the slots, beyond which
        graphs keep their temporaries: where layers differ in size, others may come to share one.

        Args:
            spare: bytes that there are for them.
            slot_bytes: bytes that the slots have.
        """
        while chosen := most_resident(self.layers, spare=spare):
            slots, _ = self.regions(head=False, resident=chosen)
            if slots.slot_bytes <= slot_bytes:
                return chosen
            spare = sum(self.layers[layer] for layer in chosen) - 1
        return chosen
