"""Negative controls: defects planted in the streamed arm, each of which a gate must find.

[Note: Planting a defect]
A runtime has no switch that makes it wrong. What a control does is done from outside, to one
prepared model: it puts a wrapper around what runs its blocks, or around its window's lane, and the
wrapper gets wrong what the wrapped one gets right. ``_places`` has the names that it needs of a
handle; a runtime without them cannot be disturbed, which is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from poros_core.call_state import rng_state
from poros_core.errors import GateError
from poros_core.gate.fault import PlantedDefect
from poros_core.prepare import prepared_of

__all__ = ["disturb"]

_DELAY_CYCLES = 50_000_000
"""How long a copy is held back on CUDA: some 25 ms, longer than a layer computes."""
_DELAY_LAYERS = 2
"""How many layers a copy is held back on a CPU: the layer that it is for has run by then."""

Result = tuple[list[torch.Tensor], list[bool]]


class _Executor(Protocol):
    def forward(
        self, call: Any, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> Result: ...

    def backward(
        self,
        call: Any,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]: ...


class _Wrong:
    """Does what the wrapped executor does. Each control gets one thing wrong."""

    def __init__(self, right: _Executor) -> None:
        self.right = right

    def forward(self, call: Any, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> Result:
        return self.right.forward(call, inputs, wanted)

    def backward(
        self,
        call: Any,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        return self.right.backward(call, inputs, wanted, gradients)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)


class _RngNotRestored(_Wrong):
    """The recompute draws from where the generators stand in the backward."""

    def backward(self, call: Any, *rest: Any) -> list[torch.Tensor | None]:
        call.state = attrs.evolve(call.state, rng=rng_state(call.state.device))
        return self.right.backward(call, *rest)


class _AutocastNotRestored(_Wrong):
    """The recompute runs under the autocast of the backward, which is usually none."""

    def backward(self, call: Any, *rest: Any) -> list[torch.Tensor | None]:
        now = tuple(
            (kind, torch.is_autocast_enabled(kind), dtype) for kind, _, dtype in call.state.autocast
        )
        call.state = attrs.evolve(call.state, autocast=now)
        return self.right.backward(call, *rest)


class _NoGradForward(_Wrong):
    """The first forward runs under ``no_grad``, which saves memory and lets other kernels run."""

    def forward(self, call: Any, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> Result:
        with torch.no_grad():
            found = call.run([tensor.detach() for tensor in inputs], call.block.passing)
        return [tensor.detach() for tensor in found], [t.is_floating_point() for t in found]


class _LateArguments(_Wrong):
    """A block's arguments are kept in one place, where the next call overwrites them."""

    def __init__(self, right: _Executor) -> None:
        super().__init__(right)
        self._last: dict[Any, list[Any]] = {}

    def forward(self, call: Any, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> Result:
        self._last[call.block] = call.leaves
        return self.right.forward(call, inputs, wanted)

    def backward(self, call: Any, *rest: Any) -> list[torch.Tensor | None]:
        call.leaves = self._last[call.block]
        return self.right.backward(call, *rest)


class _EarlyRead:
    """A lane whose compute does not wait for copies, which are late."""

    def __init__(self, right: Any) -> None:
        self.right = right
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._released = 0

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Any], poison: bool
    ) -> Any:
        if target.is_cuda:
            with torch.cuda.stream(self.right._stream):
                torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
            return self.right.copy(target, source, after=after, poison=poison)
        after = list(after)
        self._late.append(
            (
                self._released + _DELAY_LAYERS,
                lambda: self.right.copy(target, source, after=after, poison=poison),
            )
        )
        return self.right.record()

    def wait(self, event: Any) -> None:
        """Do not wait."""

    def record(self) -> Any:
        self._released += 1
        due = [copy for when, copy in self._late if when <= self._released]
        self._late = self._late[len(due) :]
        for copy in due:
            copy()
        return self.right.record()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)


_WRONG: Mapping[str, tuple[type[_Wrong] | type[_EarlyRead], str]] = {
    "rng-not-restored": (
        _RngNotRestored,
        "the recompute draws other random numbers than its forward",
    ),
    "no-grad-forward": (_NoGradForward, "the first forward of each block runs under no_grad"),
    "early-read": (_EarlyRead, "layers are computed before their weights have arrived"),
    "late-arguments": (_LateArguments, "the recompute is given the latest call's arguments"),
    "autocast-not-restored": (
        _AutocastNotRestored,
        "the recompute runs under the autocast of the backward",
    ),
}


def disturb(model: nn.Module, name: str) -> PlantedDefect:
    """Plant a defect in the runtime of one prepared model; see [Note: Planting a defect].

    Args:
        model: a prepared model.
        name: of ``poros_core.gate.options.PLANTS``, all but the flipped bit.

    Raises:
        GateError: the model's runtime is not one that can be disturbed.
    """
    prepared = prepared_of(model)
    assert prepared is not None, "a defect is planted in a prepared model"
    wrong, what = _WRONG[name]
    place, attribute = _places(prepared.handle, lane=wrong is _EarlyRead)
    right = getattr(place, attribute, None)
    if right is None:
        raise GateError(
            f"--plant {name}: runtime '{prepared.settings.runtime}' has nothing to disturb. Plant "
            "it in the streamed runtime."
        )
    setattr(place, attribute, wrong(right))
    return PlantedDefect(name=name, what=what)


def _places(handle: Any, *, lane: bool) -> tuple[Any, str]:
    """Return where a handle keeps its lane, or what runs its blocks: graphs if it has them."""
    units = getattr(handle, "units", None)
    if lane:
        return getattr(units, "window", None), "_lane"
    return units, "eager" if getattr(units, "graphs", None) is None else "graphs"
