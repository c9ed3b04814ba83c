"""Layers that stay on the device because a budget leaves room for them."""

from __future__ import annotations

import torch

from poros_runtimes.streamed.budget import Budget, Spare
from poros_runtimes.streamed.graphs import GraphExecutor
from poros_runtimes.streamed.unit_memory import UnitMemory

__all__ = ["Residency"]

_SIGNATURES = (4, 2, 1)
"""Calls of different shape that a block keeps graphs for under a budget: the most that fit."""


class Residency:
    """Decides once which layers stay; see [Note: What a budget counts]."""

    def __init__(self, budget: Budget, memory: UnitMemory, *, layers: int) -> None:
        """Decide nothing yet.

        Args:
            budget: what the run may use.
            memory: gives layers memory of their own.
            layers: how many there are, each with two graphs a signature.
        """
        self.budget = budget
        self._memory = memory
        self._layers = layers
        self._graphs: GraphExecutor | None = None
        self._waiting = False

    def counts(self, graphs: GraphExecutor) -> None:
        """Count what graphs take, and let them keep no more than is counted."""
        self._graphs = graphs
        graphs.keep(_SIGNATURES[0])

    def forward(self, *, measured: bool, outstanding: bool) -> bool:
        """A forward with gradients starts.

        Args:
            measured: whether the first optimizer step is just behind.
            outstanding: whether the backward of an earlier forward is still to come: then units
                cannot move, and the next forward asks again.

        Returns:
            Whether units moved.

        Raises:
            StateError: the run needs more than the user said that it may use.
        """
        if not (measured or self._waiting):
            self.budget.start()
            return False
        self._waiting = outstanding
        return not outstanding and self._keep_resident()

    @torch.inference_mode(False)
    def _keep_resident(self) -> bool:
        """Give as many layers as the budget leaves room for memory of their own."""
        spare = self._spare()
        if spare < 0 and self.budget.fixed:
            self._waiting = True  # the next forward asks again
            raise self.budget.refuse(spare)
        return self._memory.keep_resident(spare=max(0, spare))

    def _spare(self) -> Spare:
        """Return what a budget leaves for units, beside graphs of as many signatures as fit."""
        own = self._memory.window.arena.nbytes
        if self._graphs is None:
            return self.budget.spare(own=own, graphs=0, buffers=0)
        spare = 0
        for signatures in _SIGNATURES:
            self._graphs.keep(signatures)
            spare = self.budget.spare(
                own=own,
                graphs=2 * self._layers * signatures,
                buffers=self._graphs.buffer_bytes(room=own - self._memory.slot_bytes),
            )
            if spare >= 0:
                break
        return spare
