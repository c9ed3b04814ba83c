"""One block: its layers, the places of what trains in it, and how its units are bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import nn

from poros_core.call_state import BlockModules

__all__ = ["Block", "LayerCall", "TrainedPlace", "UnitAccess"]

TrainedPlace = tuple[nn.Module, str, nn.Parameter]
"""The module that owns a parameter, its name there, and the parameter."""


@frozen(eq=False)
class LayerCall:
    """One call of one decoder layer: its number and its arguments after the hidden state."""

    layer: int
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)


class UnitAccess(Protocol):
    """How a block gets at its units."""

    def acquire(self, layer: int, *, backward: bool) -> None:
        """Bind a layer's unit."""
        ...

    def release(self, layer: int, *, backward: bool) -> None:
        """Park it, and copy what will be needed next."""
        ...


class Block:
    """Consecutive layers with one recompute boundary."""

    def __init__(
        self,
        layers: range,
        *,
        modules: Sequence[nn.Module],
        forwards: Sequence[Callable[..., torch.Tensor]],
        streamed: frozenset[int],
        units: UnitAccess,
    ) -> None:
        """Describe a block.

        Args:
            layers: the numbers of its layers.
            modules: its layers' modules, in order.
            forwards: their own forwards, in order.
            streamed: ids of the parameters that the window binds, which can never train.
            units: how it gets at its units.
        """
        self.layers = layers
        self.roots = tuple(modules)
        self.units = units
        self.forwards = dict(zip(layers, forwards, strict=True))
        self.modules = BlockModules(modules)
        self.name = f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
        self.version = 0
        self._held = False
        self._streamed = streamed
        self._list()

    def _list(self) -> None:
        self.version += 1
        self.slots = [
            (module, name)
            for module in self.modules.modules
            for name, param in module._parameters.items()
            if param is not None and id(param) not in self._streamed
        ]

    def refresh(self) -> None:
        """Find adapters that came or went since the last call."""
        if self.modules.refresh():
            self._list()

    @contextmanager
    def passing(self, layer: int) -> Iterator[None]:
        """Bind a layer's unit for its forward only."""
        if self._held:
            yield
            return
        self.units.acquire(layer, backward=False)
        try:
            yield
        finally:
            self.units.release(layer, backward=False)

    @contextmanager
    def holding(self, layers: Sequence[int], *, backward: bool) -> Iterator[None]:
        """Bind all of these units until the end: gradient kernels and graphs read them too. What
        binds them again meanwhile finds them bound."""
        if self._held:
            yield
            return
        held: list[int] = []
        self._held = True
        try:
            for layer in layers:
                self.units.acquire(layer, backward=backward)
                held.append(layer)
            yield
        finally:
            self._held = False
            for layer in reversed(held):
                self.units.release(layer, backward=backward)

    def trainable(self) -> list[TrainedPlace]:
        """Return the places of parameters that want gradients now, last first.

        A parameter that several modules share is there once for each: autograd adds what a
        boundary hands out in this order, which is the order of a resident backward.
        """
        return [
            (module, name, param)
            for module, name in reversed(self.slots)
            if (param := module._parameters.get(name)) is not None and param.requires_grad
        ]
