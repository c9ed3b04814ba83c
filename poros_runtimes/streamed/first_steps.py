"""The steps in which memory and its use come into being.

[Note: The first steps' memory]
What a first step frees, the allocator keeps, and what comes into being then and lasts (optimizer
state, workspaces) takes room inside of it: pieces of the size of logits, or of a layer's
temporaries, come to be held by little, and later steps reserve as much again. So in the first two
steps cached memory is given back wherever a step turns: from layers to the loss, from the loss to
the layers, to the optimizer, and to the next forward. Between two turns, the forward of blocks that
were not seen before, and the gradients that their backward hands out, draw from a pool that ends
with the turn. What stays in the end lies close together, and what comes and goes in every step
finds the pieces of the step before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from poros_core.workspaces import drop_workspaces
from poros_runtimes.streamed.pools import Pool

__all__ = ["FirstSteps"]

MOST = 16
"""Backwards after which steps are not first any more, where optimizer steps cannot be told because
gradients are zeroed in place."""


class FirstSteps:
    """Follows the first steps of a model, and gives cached memory back in them."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        optimizer_steps: Callable[[], None] | None = None,
    ) -> None:
        """Follow a model from its first step on.

        Args:
            model: the model.
            device: the compute device.
            optimizer_steps: called before an optimizer of this model steps, once a backward is
                behind; None if nobody wants to know how a whole step went.
        """
        self._device = device
        self._optimizer_steps = optimizer_steps
        self._stepped = 0
        self._backwards = 0
        self._seen = 0
        self._over = device.type != "cuda"
        self._optimized = False
        self._measured = optimizer_steps is None
        self._pool: Pool | None = None
        trained = [param for param in model.parameters() if param.requires_grad]
        self._trained = frozenset(map(id, trained))
        self._param = weakref.ref(trained[0] if trained else nn.Parameter(torch.empty(0)))
        self._hooks: list[Any] = []
        if not (self._over and self._measured):
            self._hooks.append(register_optimizer_step_pre_hook(_Turn(self.before_optimizer)))
            self._hooks.append(register_optimizer_step_post_hook(_Turn(self.after_optimizer)))
            weakref.finalize(self, _remove, self._hooks).atexit = False

    def going_on(self) -> bool:
        """Whether this is still one of the first steps."""
        return not self._over

    def forward(self) -> bool:
        """A forward with gradients starts. Returns True once: when it is the first that comes after
        a whole step, optimizer and all. Where gradients go but no optimizer of torch's steps,
        ``MOST`` of them must have gone: one that steps later would not have been seen."""
        param = self._param()
        if self._backwards > self._seen and (param is None or param.grad is None):
            self._stepped += 1  # gradients were there and are gone
        self._seen = self._backwards
        self.turn()
        if self._stepped >= 2 or self._backwards >= MOST:
            self._over = True
        whole = self._backwards > 0 and (self._optimized or self._stepped >= MOST)
        reports = whole and not self._measured
        self._measured = self._measured or whole
        if self._over and self._measured:
            _remove(self._hooks)
        return reports

    def eager(self) -> AbstractContextManager[None]:
        """Return a context for a block that runs eagerly."""
        if self._over:
            return nullcontext()
        if self._pool is None:
            self._pool = Pool(self._device)
        return self._pool.used()

    def turn(self) -> None:
        """A step turns from one thing to the next."""
        if self._over or torch.cuda.is_current_stream_capturing():
            return
        self._pool = None
        drop_workspaces()
        torch.cuda.empty_cache()

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if self._optimizer_steps is not None and self._backwards and self._owns(optimizer):
            self._optimizer_steps()
        self.turn()

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._optimized = self._optimized or self._owns(optimizer)

    def _owns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer trains something of this model."""
        groups = optimizer.param_groups
        return any(id(param) in self._trained for group in groups for param in group["params"])

    def backward(self) -> None:
        """A backward ends."""
        self.turn()
        self._backwards += 1


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class _Turn:
    """Tells the first steps of an optimizer's step, and does not keep them alive."""

    def __init__(self, told: Callable[[Optimizer], None]) -> None:
        self._told = weakref.WeakMethod(told)

    def __call__(self, optimizer: Optimizer, *args: object) -> None:
        if (told := self._told()) is not None:
            told(optimizer)
