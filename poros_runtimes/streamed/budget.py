"""How much device memory is left over for units that stay.

[Note: What a budget counts]
A budget is for all that the process takes of the device: what the allocator reserves, and beside it
the context, loaded kernels and graphs. What training takes is measured, not guessed: by the time
that the first optimizer step is done, gradients, optimizer state and activations have been there
once. The next peak is what is allocated then, plus what the first step rose by while it ran.
Resident units are chosen once, at the start of the forward after that. Graphs come later: a budget
counts those of so many signatures, with the buffers that these take, and no more are kept.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from poros_core.errors import StateError

__all__ = ["Budget", "Spare"]

Spare = int
"""Bytes that are left over; negative if the run needs more than it may use."""

_FRAGMENTATION = 1.06
"""Reserved over allocated memory at the peak. With ``_SLACK`` it covers what the cost records of an
H200 have, 1.04 to 1.08, logits that a loop still holds included."""
_SLACK = 64 << 20
"""Bytes beside that, for small segments and workspaces."""
_GRAPH = 2_200_000
"""Bytes that a graph takes outside the allocator at most: 1 to 2.2 MB in the cost records."""
_OUTSIDE = 1_500_000_000
"""Bytes that context, loaded kernels and libraries take at most; what the driver reports beyond
them is another process's."""
_MARGIN = 0.03
"""Share of the device that ``"auto"`` leaves alone."""


class Budget:
    """What a run may use, and what it does use; see [Note: What a budget counts]."""

    def __init__(self, budget: int | Literal["auto"], device: torch.device) -> None:
        self._budget = budget
        self._device = device
        self._before: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether the user named the bytes. Otherwise a run that needs more than seems to be left
        goes on with nothing resident: what is left is an estimate."""
        return self._budget != "auto"

    def start(self) -> None:
        """A first step starts."""
        if self._before is None and self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)

    def spare(self, *, own: int, graphs: int, buffers: int) -> Spare:
        """Return the bytes that units may take.

        Args:
            own: bytes of the arena, which is all that is known of the use of a CPU's memory.
            graphs: how many graphs will be captured.
            buffers: bytes that they copy tensors through.
        """
        if self._device.type != "cuda":
            return 0 if self._budget == "auto" else self._budget - own
        device = self._device
        allocated = torch.cuda.memory_allocated(device)
        before = allocated if self._before is None else self._before
        peak = allocated + max(0, torch.cuda.max_memory_allocated(device) - before)
        reserved = round(peak * _FRAGMENTATION) + _SLACK + buffers
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        allowed = self._allowed(total) - reserved
        if self._budget == "auto":
            left = round(total * (1 - _MARGIN)) - outside - reserved
        else:
            left = self._budget - min(outside, _OUTSIDE) - reserved
        return min(allowed, left - graphs * _GRAPH)

    def _allowed(self, total: int) -> int:
        """Return what the allocator may reserve (``set_per_process_memory_fraction``)."""
        cuda: Any = torch.cuda
        return int(cuda.get_per_process_memory_fraction(self._device) * total)

    def refuse(self, spare: Spare) -> StateError:
        """Return the error of a budget that is too small."""
        assert self._budget != "auto"
        return StateError(
            f"vram_budget is {self._budget / 1e9:.2f} GB, and this run needs "
            f"{(self._budget - spare) / 1e9:.2f} GB with nothing resident. Raise the budget, or "
            "lower what the run needs: sequence length, batch, rank, block_size, or the state of "
            "the optimizer with poros.offload_optimizer()."
        )
