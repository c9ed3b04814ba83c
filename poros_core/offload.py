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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define, field
from torch.optim import LBFGS, Optimizer

from poros_core.errors import PrepareError, StateError
from poros_core.host_store import HostBuffer, TensorEntry, layout
from poros_core.log import get_logger
from poros_core.scratch import Loan, borrow, stand_aside
from poros_core.settings import Settings

__all__ = ["OffloadedOptimizer", "offload_optimizer"]

_log = get_logger("offload")
_MARK = "_poros_offloaded"
_POISON = 0xFF


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


@define(eq=False)
class _Slot:
    """A state tensor and every place that it is bound at. Implements ``TensorRef``."""

    name: str
    strides: tuple[int, ...]
    bound: torch.Tensor
    places: list[tuple[Any, Any]] = field(factory=list)

    @property
    def key(self) -> tuple[int, str]:
        """Identity of its first place; see ``TensorRef``."""
        container, index = self.places[0]
        return id(container), str(index)

    def get(self) -> torch.Tensor:
        """Return the tensor bound now; see ``TensorRef``."""
        return self.bound

    def set(self, value: torch.Tensor) -> None:
        """Bind ``value`` at every place; see ``TensorRef``."""
        self.bound = value
        for container, index in self.places:
            container[index] = value


class _Stretch:
    """The state of one parameter group on one device, as it lies in host memory."""

    def __init__(
        self, slots: Sequence[_Slot], device: torch.device, *, old: _Stretch | None
    ) -> None:
        """Lay the state out and copy it to the host, into ``old``'s memory where that fits."""
        self.slots = slots
        self.device = device
        self.entries, nbytes = layout(slots)
        self.buffer: HostBuffer = (
            old.buffer
            if old is not None and old.can_take(self.entries)
            else _host_buffer(nbytes, device)
        )
        self.host = [
            self.buffer.tensor(entry).as_strided(entry.shape, slot.strides)
            for slot, entry in zip(slots, self.entries, strict=True)
        ]
        for view, slot in zip(self.host, slots, strict=True):
            view.copy_(slot.bound)
        self._memory: torch.Tensor | None = None
        if device.type == "cuda":
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def can_take(self, entries: Sequence[TensorEntry]) -> bool:
        """Say whether tensors laid out so can be written to this host memory. None of them may be
        read from it: they could have changed places."""
        start = self.buffer.bytes.data_ptr()
        end = start + self.buffer.nbytes
        return [(e.offset, e.nbytes) for e in entries] == [
            (e.offset, e.nbytes) for e in self.entries
        ] and not any(start <= entry.ref.get().data_ptr() < end for entry in entries)

    def bring_in(self, memory: torch.Tensor | None, *, poison: bool) -> list[torch.Tensor]:
        """Copy the state to the device; return it as tensors, one a slot.

        Args:
            memory: device memory for it, flat uint8; None allocates.
            poison: fill the host's copy with 0xFF.
        """
        if memory is None:
            memory = torch.empty(self.buffer.nbytes, dtype=torch.uint8, device=self.device)
        memory.copy_(self.buffer.bytes, non_blocking=True)
        if poison:
            self._host_bytes().fill_(_POISON)
        self._memory = memory
        typed = {entry.dtype: memory.view(entry.dtype) for entry in self.entries}
        return [
            (flat := typed[entry.dtype]).as_strided(
                entry.shape,
                slot.strides,
                flat.storage_offset() + entry.offset // entry.dtype.itemsize,
            )
            for slot, entry in zip(self.slots, self.entries, strict=True)
        ]

    def take_out(self, *, poison: bool) -> None:
        """Copy the state back, and let the device memory go."""
        assert self._memory is not None, "optimizer state is taken out before it was brought in"
        self.buffer.bytes.copy_(self._memory, non_blocking=True)
        if poison:
            self._memory.fill_(_POISON)
        self._memory = None

    def _host_bytes(self) -> torch.Tensor:
        """Return the host memory as the device sees it."""
        size = self.buffer.nbytes
        return self.buffer.tensor(
            TensorEntry(self.slots[0], 0, size, torch.uint8, torch.Size((size,)), self.device)
        )


def _host_buffer(nbytes: int, device: torch.device) -> HostBuffer:
    try:
        return HostBuffer(nbytes, device=device)
    except PrepareError as error:
        raise StateError(
            f"The optimizer's state cannot be kept on the host. {error} Or leave "
            "poros.offload_optimizer() out."
        ) from error


class OffloadedOptimizer:
    """Moves an optimizer's state; see [Note: Optimizer state on the host]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._poison = Settings().poison
        self._stretches: dict[_Key, _Stretch] = {}
        self._order: list[_Slot] = []
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
            _bind(slots, tensors)
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

    def _borrow(self) -> dict[_Key, torch.Tensor]:
        """Return memory for each stretch that others lend memory for."""
        found: dict[_Key, torch.Tensor] = {}
        for device in {device for _, device in self._stretches}:
            here = {key: s.buffer.nbytes for key, s in self._stretches.items() if key[1] == device}
            loan = borrow(device, sum(here.values()), reclaim=self._reclaim)
            if loan is not None:
                self._loans.append(loan)
                found.update(zip(here, torch.split(loan.memory, list(here.values())), strict=True))
        return found

    def _knows(self, optimizer: Optimizer) -> bool:
        """Say whether the state is what was bound last: nothing new, nothing replaced."""
        tensors = [tensor for *_, tensor in _found(optimizer)]
        return len(tensors) == len(self._order) and all(
            tensor is slot.bound for tensor, slot in zip(tensors, self._order, strict=True)
        )

    def _adopt(self, optimizer: Optimizer) -> None:
        """Lay out the state anew, as it is now, and bind it to the host."""
        old = self._stretches
        order, sorted_slots = _slots(optimizer)
        # what fails here leaves the state where it was, and is tried again at the next step
        stretches = {
            key: _Stretch(slots, key[1], old=old.get(key)) for key, slots in sorted_slots.items()
        }
        self._order, self._stretches = order, stretches
        for device in {device for _, device in old if device.type == "cuda"}:
            # what leaves now may still be read or written by copies that were issued
            torch.cuda.synchronize(device)
        self._bind_host()
        _log.info("optimizer_state_on_host", tensors=len(self._order), host_bytes=self.nbytes)

    def _bind_host(self) -> None:
        for stretch in self._stretches.values():
            _bind(stretch.slots, stretch.host)
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


def _bind(slots: Sequence[_Slot], tensors: Sequence[torch.Tensor]) -> None:
    for slot, tensor in zip(slots, tensors, strict=True):
        slot.set(tensor)


_Key = tuple[int, torch.device]
"""What decides the stretch of a state tensor: the parameter's group, and its device."""


def _slots(optimizer: Optimizer) -> tuple[list[_Slot], dict[_Key, list[_Slot]]]:
    """Return the slot of every state tensor, in order, and the slots by stretch. A tensor that is
    bound at several places is one slot.

    Raises:
        StateError: one of them is of a kind that cannot be moved as plain bytes.
    """
    order: list[_Slot] = []
    stretches: dict[_Key, list[_Slot]] = {}
    by_tensor: dict[int, _Slot] = {}
    for key, container, index, tensor in _found(optimizer):
        slot = by_tensor.get(id(tensor))
        if slot is None:
            _check(index, tensor)
            strides = torch.empty_like(tensor, device="meta").stride()
            slot = by_tensor[id(tensor)] = _Slot(str(index), strides, tensor)
            stretches.setdefault(key, []).append(slot)
        slot.places.append((container, index))
        order.append(slot)
    return order, stretches


def _found(optimizer: Optimizer) -> Iterator[tuple[_Key, Any, Any, torch.Tensor]]:
    """Yield every state tensor that moves, in the order of groups and parameters.

    Yields:
        What decides its stretch, the container that holds it, its key there, and the tensor.
    """
    state = optimizer.state
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param in state:
                key = (number, param.device)
                for place in _tensors(state[param], param.device):
                    yield (key, *place)


def _tensors(container: Any, device: torch.device) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for index, value in items:
        if isinstance(value, torch.Tensor):
            if value.numel() > 1 and value.device == device:
                yield container, index, value
        elif isinstance(value, dict | list):
            yield from _tensors(value, device)


def _check(index: object, value: torch.Tensor) -> None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise StateError(
            f"The optimizer's state '{index}' is a {type(value).__name__} of layout "
            f"{value.layout}, which cannot be moved as plain bytes. Use an optimizer with plain "
            "dense state, such as torch.optim.AdamW, or leave poros.offload_optimizer() out."
        )
