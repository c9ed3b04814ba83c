"""An optimizer whose state stands in host memory between steps.

[Note: Optimizer state on the host]
Adam keeps two tensors a parameter that nobody reads outside ``step()``, while the peak of a
training step is elsewhere: at the loss. So between steps they stand in a page-locked stretch of
host memory, one a parameter group, and each step brings all of them in with one copy a group and
takes them out with another. During the step they are ordinary device tensors, views of one flat
allocation with the strides that the optimizer gave them, so every kernel finds what it would find
otherwise, and the bits are the same. Between steps each is bound to a view of the stretch (see
[Note: Parked tensors]): it takes no device memory, and reads true for ``state_dict()`` and for
whoever else looks. Copies are issued on the stream that steps, so they are ordered against its
kernels, and the host waits for none of them. During the step the state stands in the arena of a
prepared model, where there is one and the state fits: nothing else needs it then. A first step
makes the state where the optimizer likes, so the arena is freed for it and made anew afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from poros_core.errors import PrepareError, StateError
from poros_core.log import get_logger
from poros_core.optimizer_state import StateTensor, StretchKey, bind, found_state, state_tensors
from poros_core.scratch import Loan, borrow, stand_aside
from poros_core.settings import Settings
from poros_core.state_stretch import StateStretch

__all__ = ["OffloadedOptimizer", "offload_optimizer"]

_log = get_logger("offload")
_MARK = "_poros_offloaded"


def offload_optimizer(optimizer: Optimizer) -> OffloadedOptimizer:
    """Keep an optimizer's state in page-locked host memory between steps, in place.

    Every state tensor of more than one element (``exp_avg``, ``momentum_buffer``, …) is moved to
    its parameter's device before ``step()`` and back after it; scalars such as ``step`` stay where
    they are. Training gives the same bits. State that exists already is moved at once, state that
    appears later after the step that made it. ``state_dict()`` and ``load_state_dict()`` work as
    before; loading needs the state's size in device memory for the moment, as does a ``step``
    with a closure, which runs with the state on the device.

    Args:
        optimizer: any optimizer that keeps its state per parameter. One that Accelerate wrapped
            is unwrapped.

    Returns:
        A handle, which may be dropped; ``remove()`` puts the state back on the device for good.

    Raises:
        PrepareError: it is no optimizer, is offloaded already, or is of a kind whose state cannot
            be moved: LBFGS, bitsandbytes' paged and 8-bit optimizers, ``differentiable=True``.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise PrepareError(
            f"poros.offload_optimizer() takes a torch optimizer, not {type(optimizer).__name__}. "
            "Pass the optimizer, for example torch.optim.AdamW(...)."
        )
    if _MARK in optimizer.__dict__:
        raise PrepareError(
            f"The state of this {type(optimizer).__name__} is kept on the host already. Call "
            "poros.offload_optimizer() once."
        )
    _refuse(optimizer)
    return OffloadedOptimizer(optimizer)


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise PrepareError(
            f"{name} keeps one history for all parameters and runs the model inside step(), so its "
            "state cannot leave the device. Use an optimizer with state per parameter, such as "
            "torch.optim.AdamW, or leave poros.offload_optimizer() out."
        )
    if any(base.__module__.startswith("bitsandbytes") for base in type(optimizer).__mro__):
        kind = _bitsandbytes_kind(optimizer)
        if kind is not None:
            raise PrepareError(
                f"{name} is {kind} optimizer of bitsandbytes, which places its state itself. "
                "Use torch.optim.AdamW with poros.offload_optimizer(), or keep "
                f"{name} and leave poros.offload_optimizer() out."
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise PrepareError(
            f"{name} was made with differentiable=True, so its state is part of a graph and "
            "cannot be moved. Make it without, or leave poros.offload_optimizer() out."
        )


def _bitsandbytes_kind(optimizer: Any) -> str | None:
    if getattr(optimizer, "is_paged", False):
        return "a paged"
    eight = getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8
    return "an 8-bit" if eight or getattr(optimizer, "name2qmap", None) else None


class OffloadedOptimizer:
    """Moves an optimizer's state; see [Note: Optimizer state on the host]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._poison = Settings().poison
        self._stretches: dict[StretchKey, StateStretch] = {}
        self._order: list[StateTensor] = []
        self._inside = False
        self._loans: list[Loan] = []
        self._stepped = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        optimizer.__dict__[_MARK] = self
        self._adopt(optimizer)

    @property
    def nbytes(self) -> int:
        """Bytes of page-locked host memory that the state takes."""
        return sum(stretch.buffer.nbytes for stretch in self._stretches.values())

    def remove(self) -> None:
        """Put the state back on its device, in memory of its own, and stop moving it."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.__dict__.get(_MARK) is not self:
            return
        for hook in self._hooks:
            hook.remove()
        del optimizer.__dict__[_MARK]
        if self._inside or not self._knows(optimizer):
            self._adopt(optimizer)
        for stretch in self._stretches.values():
            for slot, view in zip(stretch.slots, stretch.host, strict=True):
                own = torch.empty_strided(
                    view.shape, slot.strides, dtype=view.dtype, device=stretch.device
                )
                slot.set(own.copy_(view))
        self._stretches, self._order = {}, []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        on_cuda = any(device.type == "cuda" for _, device in self._stretches)
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "optimizer.step() is being captured as a CUDA graph, and the graph would not move "
                "the state. Call step() outside the capture, or leave poros.offload_optimizer() "
                "out."
            )
        if not self._knows(optimizer):
            self._adopt(optimizer)
        if self._inside:
            return
        if not self._stepped:
            self._stepped = True
            for device in {param.device for param in _params(optimizer)}:
                stand_aside(device)
        # A closure runs the model while the state is on the device.
        lent = {} if _has_closure(args, kwargs) else self._borrow()
        # every copy is issued before the first tensor is bound: binding takes longer
        brought = [
            (stretch.slots, stretch.bring_in(lent.get(key), poison=self._poison))
            for key, stretch in self._stretches.items()
        ]
        for slots, tensors in brought:
            bind(slots, tensors)
        self._inside = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._settle(optimizer)

    def _settle(self, optimizer: Optimizer) -> None:
        """Put the state on the host, whatever a step made of it."""
        if not self._knows(optimizer):
            self._adopt(optimizer)
        elif self._inside:
            for stretch in self._stretches.values():
                stretch.take_out(poison=self._poison)
            self._bind_host()
        else:
            self._end_loans()

    def _reclaim(self) -> None:
        """A forward needs the memory that was lent: a step must have failed."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._settle(optimizer)
        else:
            self._end_loans()

    def _after_load(self, optimizer: Optimizer) -> None:
        self._adopt(optimizer)

    def _borrow(self) -> dict[StretchKey, torch.Tensor]:
        """Return memory for each stretch that others lend memory for."""
        found: dict[StretchKey, torch.Tensor] = {}
        for device in {device for _, device in self._stretches}:
            here = {key: s.buffer.nbytes for key, s in self._stretches.items() if key[1] == device}
            loan = borrow(device, sum(here.values()), reclaim=self._reclaim)
            if loan is not None:
                self._loans.append(loan)
                found.update(zip(here, torch.split(loan.memory, list(here.values())), strict=True))
        return found

    def _knows(self, optimizer: Optimizer) -> bool:
        """Say whether the state is what was bound last: nothing new, nothing replaced."""
        tensors = [tensor for *_, tensor in found_state(optimizer)]
        return len(tensors) == len(self._order) and all(
            tensor is slot.bound for tensor, slot in zip(tensors, self._order, strict=True)
        )

    def _adopt(self, optimizer: Optimizer) -> None:
        """Lay out the state anew, as it is now, and bind it to the host."""
        old = self._stretches
        order, sorted_slots = state_tensors(optimizer)
        # what fails here leaves the state where it was, and is tried again at the next step
        stretches = {
            key: StateStretch(slots, key[1], old=old.get(key))
            for key, slots in sorted_slots.items()
        }
        self._order, self._stretches = order, stretches
        for device in {device for _, device in old if device.type == "cuda"}:
            # what leaves now may still be read or written by copies that were issued
            torch.cuda.synchronize(device)
        self._bind_host()
        _log.info("optimizer_state_on_host", tensors=len(self._order), host_bytes=self.nbytes)

    def _bind_host(self) -> None:
        for stretch in self._stretches.values():
            bind(stretch.slots, stretch.host)
        self._inside = False
        self._end_loans()

    def _end_loans(self) -> None:
        while self._loans:
            self._loans.pop().end()


def _params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether ``step`` was called with a closure; ``args`` starts with the optimizer."""
    return kwargs.get("closure") is not None or any(value is not None for value in args[1:])
