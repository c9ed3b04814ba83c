"""Device memory that is idle at times, lent to whoever can use it then.

A runtime's arena holds layers and head, and neither is needed while an optimizer steps. So a
runtime registers as a lender, and an optimizer whose state stands on the host borrows the arena for
the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from attrs import frozen

__all__ = ["Lender", "Loan", "borrow", "register", "stand_aside"]


class Lender(Protocol):
    """Has device memory that is idle between a backward and the next forward."""

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        ...

    def lend(self, nbytes: int, reclaim: Callable[[], None]) -> torch.Tensor | None:
        """Lend memory.

        Args:
            nbytes: how much.
            reclaim: called when the memory is needed after all; takes everything out of it and
                returns it.

        Returns:
            A flat uint8 tensor of ``nbytes`` bytes, or None if there is none to lend now.
        """
        ...

    def take_back(self) -> None:
        """The borrower is done: all its work on the memory has been issued."""
        ...

    def stand_aside(self) -> None:
        """Free the memory until it is needed again, if that is possible now."""
        ...


@frozen(eq=False)
class Loan:
    """Memory that was lent, as a flat uint8 tensor, and by whom."""

    memory: torch.Tensor
    lender: Lender

    def end(self) -> None:
        """Return it."""
        self.lender.take_back()


_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()


def register(lender: Lender) -> None:
    """Make a lender known for as long as it lives."""
    _lenders.add(lender)


def borrow(device: torch.device, nbytes: int, *, reclaim: Callable[[], None]) -> Loan | None:
    """Borrow idle memory on ``device``; see ``Lender.lend``. None if nobody has any."""
    for lender in list(_lenders):
        if lender.device == device and (memory := lender.lend(nbytes, reclaim)) is not None:
            return Loan(memory, lender)
    return None


def stand_aside(device: torch.device) -> None:
    """Ask every lender on ``device`` to free its memory until it is needed again."""
    for lender in list(_lenders):
        if lender.device == device:
            lender.stand_aside()
