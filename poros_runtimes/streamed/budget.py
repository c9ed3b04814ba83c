"""How much device memory is left over for units that stay.

[Note: What a budget counts]
A budget is for all that the process takes of the device: what the allocator reserves, and beside it
the context, loaded kernels and graphs. What training takes is measured, not guessed: by the time
that the first optimizer step is done, gradients, optimizer state and activations have been there
once. The next peak is what is allocated then, plus what the first step rose by until its optimizer
stepped; or what there was while that did, which is the same every time. Where the optimizer's state
was elsewhere meanwhile, all of the first step's rise is added. Resident units are chosen once, at
the start of the forward after that. Graphs come later: a budget counts those of so many signatures,
with the buffers that these take, and no more are kept; fewer, once what is measured says so.
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
_GRAPH = 1_200_000
"""Bytes that the graph of one layer takes outside the allocator at most, in a larger block too: 0.6
to 1.14 MB in the NF4 cost records of one length, over what a run without graphs has there."""
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
        self._stepping: int | None = None
        self._elsewhere = False
        self._aside = 0
        self._outside: int | None = None
        self._counted = self._graphs = 0

    @property
    def fixed(self) -> bool:
        """Whether the user named the bytes. Otherwise a run that needs more than seems to be left
        goes on with nothing resident: what is left is an estimate."""
        return self._budget != "auto"

    def start(self) -> None:
        """A first step starts."""
        if self._before is None and self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)

    def optimizer_steps(self) -> None:
        """An optimizer is about to step for the first time."""
        if self._stepping is None and self._device.type == "cuda":
            self._stepping = torch.cuda.max_memory_allocated(self._device)

    def state_elsewhere(self, *, aside: int = 0) -> None:
        """An optimizer's state takes memory only while it steps.

        Args:
            aside: bytes that were free while it came into being, and will not be later.
        """
        self._elsewhere = True
        self._aside = max(self._aside, aside)

    def spare(self, *, own: int, graphs: int, buffers: int) -> Spare:
        """Return the bytes that units may take.

        Args:
            own: bytes of the arena, which is all that is known of the use of a CPU's memory.
            graphs: how many graphs of a layer will be captured.
            buffers: bytes that they copy tensors through.
        """
        if self._device.type != "cuda":
            return 0 if self._budget == "auto" else self._budget - own
        device = self._device
        allocated = torch.cuda.memory_allocated(device)
        before = allocated if self._before is None else self._before
        highest = torch.cuda.max_memory_allocated(device)
        until = self._stepping
        if until is None or self._elsewhere:
            until = max(highest, until or 0)
        peak = max(highest + self._aside, allocated + max(0, until - before))
        reserved = round(peak * _FRAGMENTATION) + _SLACK + buffers
        total = torch.cuda.mem_get_info(device)[1]
        self._outside = self._beside()
        self._counted, self._graphs = self._own_part(self._outside), graphs
        left = self._whole(total) - self._counted - reserved
        return min(self._allowed(total) - reserved, left - graphs * _GRAPH)

    def has_room(self, *, graphs: int) -> bool:
        """Say whether so many graphs more would stay within it, by what is in use now. Where the
        user named the bytes, what is in use beside the allocator is taken to have grown by what
        ``spare`` counted for graphs at most: the rest is another process's."""
        if self._device.type != "cuda" or self._outside is None:
            return True
        total = torch.cuda.mem_get_info(self._device)[1]
        grown = max(0, self._beside() - self._outside)
        if self._budget != "auto":
            grown = min(grown, self._graphs * _GRAPH)
        used = torch.cuda.memory_reserved(self._device) + self._counted + grown
        return used + graphs * _GRAPH <= self._whole(total)

    def _own_part(self, outside: int) -> int:
        """Return what of the memory in use beside the allocator's counts: with bytes that the user
        named, no more than this process can take."""
        return outside if self._budget == "auto" else min(outside, _OUTSIDE)

    def _whole(self, total: int) -> int:
        return round(total * (1 - _MARGIN)) if self._budget == "auto" else self._budget

    def _beside(self) -> int:
        """Return what is in use on the device beside the allocator's memory."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

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
            "the optimizer with poros.offload_optimizer(). Counted is the highest use of this "
            "process so far: if that was something else, call "
            "torch.cuda.reset_peak_memory_stats() before the first step."
        )
