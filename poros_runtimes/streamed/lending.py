"""Lending the arena, between a backward and the next forward, to an optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from poros_core.host_store import ALIGNMENT
from poros_core.schedule import Region
from poros_core.scratch import register
from poros_runtimes.streamed.arena import Arena
from poros_runtimes.streamed.budget import Budget
from poros_runtimes.streamed.unit_memory import UnitMemory

__all__ = ["ArenaLender"]

_STATE = 2
"""Tensors that an optimizer keeps for each parameter, as Adam does. State that is larger than the
arena lies beside it in every step but the first, when it came while the arena stood aside."""


class ArenaLender:
    """Lends the end of one model's arena, or frees all of it until it is needed. Implements
    ``Lender``."""

    def __init__(
        self,
        memory: UnitMemory,
        model: nn.Module,
        *,
        device: torch.device,
        budget: Budget | None,
        unused: Callable[[], bool],
        moved: Callable[[Arena | None], None],
    ) -> None:
        """Make the arena known to whoever borrows.

        Args:
            memory: has the arena.
            model: an optimizer may keep state for what is trained of it.
            device: where the arena is.
            budget: must know of state that is elsewhere; None for none.
            unused: a method that sees to it that neither head nor layers are needed before the
                next forward, and says whether that is so.
            moved: a method that is told of another arena, and of None while there is none. Neither
                the model nor whose methods they are is kept alive.
        """
        self._memory = memory
        self._model = weakref.ref(model)
        self._device = device
        self._budget = budget
        self._unused = weakref.WeakMethod(unused)
        self._told = weakref.WeakMethod(moved)
        self._reclaim: Callable[[], None] | None = None
        register(self)

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._device

    @property
    def lent(self) -> bool:
        """Whether somebody has borrowed it."""
        return self._reclaim is not None

    def reclaim(self) -> None:
        """See that nobody else has the arena."""
        if self._reclaim is not None:
            self._reclaim()

    def have(self) -> None:
        """See that nobody else has the arena, and that there is one."""
        self.reclaim()
        if self._memory.arena is None:
            self._rebuild()

    @torch.inference_mode(False)
    def _rebuild(self) -> None:
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()  # the arena's pool cannot use what others left
        self._memory.rebuild()
        self._moved(self._memory.arena)

    def _idle(self) -> bool:
        """Whether the arena is as it was made, and nobody needs it before the next forward."""
        unused = self._unused()
        if unused is None or not unused():
            return False
        return self._memory.shared and self._memory.shareable and not self.lent

    def _moved(self, arena: Arena | None) -> None:
        told = self._told()
        if told is not None:
            told(arena)

    def _state_comes(self) -> None:
        """An optimizer's state comes to the device for its step: make room."""
        if self._budget is not None:
            self._budget.state_elsewhere()
        if self._memory.window.ahead is not None:
            self._memory.window.ahead.cut_short()

    def lend(self, nbytes: int, reclaim: Callable[[], None]) -> torch.Tensor | None:
        """Lend the end of the arena; see ``Lender``."""
        self._state_comes()
        window = self._memory.window
        start = (window.arena.nbytes - nbytes) // ALIGNMENT * ALIGNMENT
        if not self._idle() or start < 0 or not window.clear(Region(start, nbytes)):
            return None
        self._reclaim = reclaim
        return window.arena[start : start + nbytes]

    def take_back(self) -> None:
        """The borrower is done; see ``Lender``."""
        self._reclaim = None
        self._memory.window.written()

    def stand_aside(self) -> None:
        """Free the arena until the next forward; see ``Lender``."""
        self._state_comes()
        window = self._memory.window
        whole = window.arena.nbytes
        if not self._idle() or not window.clear(Region(0, whole)):
            return
        if self._budget is not None and _STATE * self._trained_bytes() > whole:
            self._budget.state_elsewhere(aside=whole)
        window.drop()
        self._moved(None)
        self._memory.arena = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _trained_bytes(self) -> int:
        model = self._model()
        params = () if model is None else model.parameters()
        return sum(param.nbytes for param in params if param.requires_grad)
