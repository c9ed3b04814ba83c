"""What a block's graph will hand out, guessed from other blocks of the same kind.

[Note: Guesses]
A graph can only be captured once it is known what the block hands out, and once its kernels have
run at these shapes. Both are so as soon as one block of the same kind has run: all others can be
captured the first time that they meet a length, and a step with a new length runs one block of each
kind kernel by kernel instead of all. A capture checks its guess, and a guess that does not hold is
dropped: then the block runs eagerly and is looked at for itself. Graphs cost time and memory, so
nothing is guessed where calls are seldom seen again, as with lengths that are not padded, nor in
the first steps, whose memory is looked after differently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs

from poros_runtimes.streamed.graph_entries import BackwardEntry, ForwardEntry
from poros_runtimes.streamed.signature import Layout

__all__ = ["Guesses"]

_KINDS = 256
"""Kinds that are remembered, forwards and backwards each; those not met for longest go first."""
_RECENT = 4096
"""Calls of blocks, about, by which it is judged whether calls are seen again."""


class Guesses:
    """What is known of kinds of blocks; see [Note: Guesses]."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        """Know nothing yet.

        Args:
            ready: whether anything may be guessed.
        """
        self._ready = ready
        self._forwards: OrderedDict[object, ForwardEntry] = OrderedDict()
        self._backwards: OrderedDict[object, tuple[Layout | None, ...]] = OrderedDict()
        self._again = 0
        self._new = 0

    def met(self, *, before: bool) -> None:
        """A block was called, in a way in which it had been called before or not."""
        self._again += before
        self._new += not before
        if self._again + self._new > _RECENT:
            self._again //= 2
            self._new //= 2

    def forward(self, kind: object, *, epoch: int) -> ForwardEntry | None:
        """Return a forward to capture for a call of this kind; None if there is nothing to go by.

        Args:
            kind: as ``forward_kind`` returns it.
            epoch: the entry's.
        """
        known = self._forwards.get(kind)
        if known is None or not self._likely:
            return None
        self._forwards.move_to_end(kind)
        return attrs.evolve(known, epoch=epoch, guessed=True)

    def backward(self, kind: object) -> BackwardEntry | None:
        """Return a backward to capture; None if there is nothing to go by."""
        known = self._backwards.get(kind)
        if known is None or not self._likely:
            return None
        self._backwards.move_to_end(kind)
        return BackwardEntry(list(known), guessed=True)

    def saw_forward(self, entry: ForwardEntry) -> None:
        """A forward ran eagerly, which is not refused."""
        self._forwards[entry.kind] = attrs.evolve(entry)
        if len(self._forwards) > _KINDS:
            self._forwards.popitem(last=False)

    def saw_backward(self, kind: object, layouts: Sequence[Layout | None]) -> None:
        """A backward ran eagerly, and its gradients had these layouts."""
        self._backwards[kind] = tuple(layouts)
        if len(self._backwards) > _KINDS:
            self._backwards.popitem(last=False)

    @property
    def _likely(self) -> bool:
        """Whether a call that is new is likely to come again."""
        return self._again >= self._new and self._ready()
