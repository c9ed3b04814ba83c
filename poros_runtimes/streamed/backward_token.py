"""The backwards that a call of the decoder has still to come."""

from __future__ import annotations

__all__ = ["BackwardToken"]


class BackwardToken:
    """Counts the backwards that one decoder call has still to come.

    Lives as long as that call's graph: once the graph is dropped, nothing is outstanding.
    """

    def __init__(self) -> None:
        self.head = False
        self._blocks: set[int] = set()

    @property
    def outstanding(self) -> bool:
        """Whether a backward of this call is still to come."""
        return self.head or bool(self._blocks)

    def expect(self, block: int) -> None:
        """A block's first forward is done; its backward is to come."""
        self._blocks.add(block)

    def done(self, block: int) -> None:
        """A block's backward is done."""
        self._blocks.discard(block)

    def drop(self) -> None:
        """No backward of this call will come any more."""
        self.head = False
        self._blocks.clear()
