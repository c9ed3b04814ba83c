"""The steps in which memory and its use come into being.

[Note: The first steps' memory]
What a first step frees, the allocator keeps, and optimizer state that comes into being then takes
room inside of it: pieces of the size of logits, or of a layer's temporaries, come to be held by
little, and later steps reserve as much again. So blocks that run eagerly before the first optimizer
step draw from a pool that goes with that step, and cached memory is given back at the step's turns
and at the start of the two forwards after it. What stays then lies close together, and what comes
and goes in every step finds the pieces of the step before.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

__all__ = ["FirstSteps"]

MOST = 16
"""Backwards after which steps are not first any more, where optimizer steps cannot be told because
gradients are zeroed in place."""


class FirstSteps:
    """Follows the first steps of a model, and gives cached memory back in them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stepped = 0
        self._backwards = 0
        self._seen = 0
        self._over = False
        self._pool: Any = None
        trained = (param for param in model.parameters() if param.requires_grad)
        self._param = weakref.ref(next(trained, nn.Parameter(torch.empty(0))))

    def forward(self) -> bool:
        """A forward with gradients starts. Returns True once: when it is the first that comes
        after an optimizer step."""
        if self._over:
            return False
        before = self._stepped
        param = self._param()
        if self._backwards > self._seen and (param is None or param.grad is None):
            self._stepped += 1  # gradients were there and are gone
        if self._backwards >= MOST:
            self._stepped, self._over = max(1, self._stepped), True
        self._seen = self._backwards
        self._over = self._over or self._stepped == 2
        if self._stepped:
            self._pool = None
        if self._cuda:
            torch.cuda.empty_cache()
        return before == 0 and self._stepped > 0

    def eager(self) -> AbstractContextManager[None]:
        """Return a context for a block that runs eagerly."""
        if not self._cuda or self._over or self._stepped:
            return nullcontext()
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        pooled: AbstractContextManager[None] = torch.cuda.use_mem_pool(self._pool, self._device)
        return pooled

    def turn(self) -> None:
        """A backward starts."""
        if self._cuda and not self._over and self._stepped == 0:
            torch.cuda.empty_cache()

    def backward(self) -> None:
        """A backward ends."""
        self.turn()
        self._backwards += 1
