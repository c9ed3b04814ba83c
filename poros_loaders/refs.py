"""Places in a model where bytes are bound: a parameter's data, a tensor of a quantisation state.

[Note: Binding]
A ref rebinds; it never copies and never replaces the object that owns the tensor. ``.to()`` is not
used: on a 4-bit parameter it returns a new object and moves the shared quantisation state too.
Identity is the owning object's, so it survives PEFT's wrapping of the module around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

__all__ = ["ParameterData", "StateTensor", "SubclassData"]


@frozen(eq=False)
class ParameterData:
    """The data of a plain parameter. See [Note: Binding]."""

    parameter: nn.Parameter

    @property
    def name(self) -> str:
        """What it is called inside its parameter."""
        return "data"

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place."""
        return (id(self.parameter), "data")

    def get(self) -> torch.Tensor:
        """Return the tensor bound now."""
        return self.parameter.data

    def set(self, value: torch.Tensor) -> None:
        """Bind ``value`` as the parameter's data."""
        self.parameter.data = value


@frozen(eq=False)
class SubclassData:
    """The data of a parameter whose class overrides ``__torch_function__``.

    The override is passed by (``guard``): it knows nothing of binding, and costs several times
    what the binding does. See [Note: Binding].
    """

    parameter: nn.Parameter
    guard: Callable[[], Any]

    @property
    def name(self) -> str:
        """What it is called inside its parameter."""
        return "data"

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place."""
        return (id(self.parameter), "data")

    def get(self) -> torch.Tensor:
        """Return the tensor bound now."""
        with self.guard():
            return self.parameter.data

    def set(self, value: torch.Tensor) -> None:
        """Bind ``value`` as the parameter's data."""
        with self.guard():
            self.parameter.data = value


@frozen(eq=False)
class StateTensor:
    """A tensor that is an attribute of a quantisation state. See [Note: Binding].

    Attributes:
        name: what it is called inside its parameter, for example ``"state2.absmax"``.
        owner: the state that holds it.
        attribute: its name there.
    """

    name: str
    owner: object
    attribute: str

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place."""
        return (id(self.owner), self.attribute)

    def get(self) -> torch.Tensor:
        """Return the tensor bound now."""
        tensor: torch.Tensor = getattr(self.owner, self.attribute)
        return tensor

    def set(self, value: torch.Tensor) -> None:
        """Bind ``value`` as the attribute."""
        setattr(self.owner, self.attribute, value)
