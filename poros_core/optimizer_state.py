"""An optimizer's state tensors: which of them can stand on the host, and where each is bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define, field
from torch.optim import Optimizer

from poros_core.errors import StateError

__all__ = ["StateTensor", "StretchKey", "bind", "found_state", "state_tensors"]

StretchKey = tuple[int, torch.device]
"""What decides the stretch of a state tensor: the parameter's group, and its device."""


@define(eq=False)
class StateTensor:
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


def bind(slots: Sequence[StateTensor], tensors: Sequence[torch.Tensor]) -> None:
    """Bind each state tensor to the tensor at its place in the order."""
    for slot, tensor in zip(slots, tensors, strict=True):
        slot.set(tensor)


def state_tensors(
    optimizer: Optimizer,
) -> tuple[list[StateTensor], dict[StretchKey, list[StateTensor]]]:
    """Return the slot of every state tensor, in order, and the slots by stretch. A tensor that is
    bound at several places is one slot.

    Raises:
        StateError: one of them is of a kind that cannot be moved as plain bytes.
    """
    order: list[StateTensor] = []
    stretches: dict[StretchKey, list[StateTensor]] = {}
    by_tensor: dict[int, StateTensor] = {}
    for key, container, index, tensor in found_state(optimizer):
        slot = by_tensor.get(id(tensor))
        if slot is None:
            _check(index, tensor)
            strides = torch.empty_like(tensor, device="meta").stride()
            slot = by_tensor[id(tensor)] = StateTensor(str(index), strides, tensor)
            stretches.setdefault(key, []).append(slot)
        slot.places.append((container, index))
        order.append(slot)
    return order, stretches


def found_state(optimizer: Optimizer) -> Iterator[tuple[StretchKey, Any, Any, torch.Tensor]]:
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
