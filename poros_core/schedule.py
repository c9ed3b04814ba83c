"""What to copy next: policy over integers, with no device and no bytes in it.

Units are numbered; each has one region of the arena for life, so that its addresses never move.
Two units *conflict* if their regions overlap. The runtime asks ``fetches`` which units to copy
now, given what will be needed, what is there and what is being read; it never has to obey for the
result to be right, because a unit that is needed and not there is copied then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from attrs import frozen

__all__ = [
    "Region",
    "Regions",
    "fetches",
    "most_resident",
    "spread",
    "upcoming_backward",
    "upcoming_forward",
]


@frozen
class Region:
    """A stretch of the arena, in bytes."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size

    def overlaps(self, other: Region) -> bool:
        """Say whether the two share a byte."""
        return self.offset < other.end and other.offset < self.end


@frozen
class Regions:
    """Where each unit's bytes go: layers in recycled slots, the head over them.

    [Note: Slot reuse]
    Layer *i* always meets slot *i* mod *S*. So a unit's addresses are the same at every use, and
    in either direction the unit that a copy overwrites is the one that was used longest ago. A
    slot is overwritten only after the last kernel that reads it: the copy stream waits for an
    event that the compute stream records there. The head and the layers are not needed at the
    same time, so the head takes the same bytes.

    Attributes:
        layers: one region per layer.
        head: the head's region, or None.
        slots: how many slots there are.
        slot_bytes: bytes that the slots take, from the arena's start.
        size: bytes that the arena takes.
    """

    layers: tuple[Region, ...]
    head: Region | None
    slots: int
    slot_bytes: int
    size: int

    @classmethod
    def lay_out(cls, layer_bytes: Sequence[int], *, slots: int, head_bytes: int) -> Regions:
        """Give each slot room for the largest layer that meets it, and the head what it needs.

        Args:
            layer_bytes: size of each layer's unit, in bytes, each a multiple of the alignment.
            slots: how many slots to recycle.
            head_bytes: size of the head's unit; 0 if it does not stream.
        """
        slots = min(slots, len(layer_bytes))
        starts: list[int] = []
        end = 0
        for slot in range(slots):
            starts.append(end)
            end += max(layer_bytes[slot::slots])
        layers = tuple(
            Region(starts[index % slots], nbytes) for index, nbytes in enumerate(layer_bytes)
        )
        head = Region(0, head_bytes) if head_bytes else None
        return cls(layers, head, slots, end, max(end, head_bytes))


def fetches(
    upcoming: Iterable[int],
    *,
    present: Collection[int],
    busy: Collection[int],
    conflict: Callable[[int, int], bool],
) -> list[int]:
    """Choose the units to copy now.

    Walks what will be needed in order, and stops at the first unit whose region is still being
    read, or holds a unit that is needed sooner.

    Args:
        upcoming: units in the order in which they will be needed.
        present: units whose bytes are on the device, or on their way.
        busy: units that a kernel not yet issued will still read.
        conflict: whether the regions of two different units overlap.

    Returns:
        The units to copy, in order.
    """
    chosen: list[int] = []
    kept = list(busy)
    for unit in upcoming:
        if unit in kept:
            continue
        if any(conflict(unit, other) for other in kept):
            break
        if unit not in present:
            chosen.append(unit)
        kept.append(unit)
    return chosen


def upcoming_forward(layer: int, *, layers: int, head: int | None) -> list[int]:
    """Return the units needed after ``layer`` in a forward: the later layers, then the head.

    Pass -1 for the start of a forward. ``head`` is the head's number, or None.
    """
    return [*range(layer + 1, layers), *([] if head is None else [head])]


def upcoming_backward(layer: int, *, lowest: int, layers: int) -> list[int]:
    """Return the units needed after ``layer`` in a backward: the earlier layers down to
    ``lowest``, then what the next forward starts with.

    Pass ``layers`` for the start of a backward.
    """
    return [*range(layer - 1, lowest - 1, -1), *range(layers)]


def spread(count: int, *, layers: int) -> frozenset[int]:
    """Choose ``count`` of the layers, spread evenly over the depth: between two that stream, the
    link has the same time everywhere."""
    return frozenset(
        layer for layer in range(layers) if (layer + 1) * count // layers > layer * count // layers
    )


def most_resident(layer_bytes: Sequence[int], *, spare: int) -> frozenset[int]:
    """Choose as many layers as ``spare`` bytes hold, spread evenly; see ``spread``."""
    layers = len(layer_bytes)
    for count in range(layers, 0, -1):
        chosen = spread(count, layers=layers)
        if sum(layer_bytes[layer] for layer in chosen) <= spare:
            return chosen
    return frozenset()
