"""What the runtime wraps on a model instance, and how it is put back.

Nothing of another library is changed: only attributes of this model's own modules are set, and
every one of them is recorded so that ``undo`` restores it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from poros_core.errors import StateError

__all__ = ["Attachments", "checkpointing_off", "guard_apply", "guard_root"]

_MISSING = object()


class Attachments:
    """Instance attributes that were set, in order."""

    def __init__(self) -> None:
        self._found: list[tuple[nn.Module, str, object]] = []

    def set(self, module: nn.Module, name: str, value: object) -> None:
        """Set an attribute of one module instance and remember what was there."""
        self._found.append((module, name, module.__dict__.get(name, _MISSING)))
        module.__dict__[name] = value

    def undo(self) -> None:
        """Put back everything that was found, last first."""
        for module, name, found in reversed(self._found):
            if found is _MISSING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = found
        self._found.clear()


@contextmanager
def checkpointing_off(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Keep Transformers from checkpointing layers that Poros recomputes already.

    The flags are put back, so that the model still says what the user asked for.
    """
    on = [layer for layer in layers if getattr(layer, "gradient_checkpointing", False)]
    for layer in on:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in on:
            layer.gradient_checkpointing = True  # type: ignore[assignment]


def guard_apply(
    module: nn.Module, *, streamed: frozenset[int], device: torch.device
) -> Callable[..., nn.Module]:
    """Return an ``_apply`` for one module that leaves its streamed parameters where they are.

    ``.to()``, ``.cuda()``, Trainer and Accelerate all move a model through ``_apply``. Moving to
    the compute device is what already holds, so it passes; anything else is an error, since a
    base that streams cannot change its dtype or its device.
    """
    original: Callable[..., nn.Module] = module._apply

    def _apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        hidden = {n: p for n, p in module._parameters.items() if id(p) in streamed}
        for param in hidden.values():
            assert param is not None
            _check_move(fn, param.dtype, device)
        found = dict(module._parameters)
        for name in hidden:
            del module._parameters[name]
        try:
            original(fn, recurse)
        finally:
            moved = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({n: moved.get(n, p) for n, p in found.items()})
        return module

    return _apply


def guard_root(
    module: nn.Module, *, dtypes: frozenset[torch.dtype], device: torch.device
) -> Callable[..., nn.Module]:
    """Return an ``_apply`` that refuses a move before any part of the model has moved."""
    original: Callable[..., nn.Module] = module._apply

    def _apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dtypes:
            _check_move(fn, dtype, device)
        return original(fn, recurse)

    return _apply


def _check_move(
    fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    probe: Any = fn(torch.empty(0, dtype=dtype, device=device))
    if probe.device != device or probe.dtype != dtype:
        raise StateError(
            f"A prepared model stays on {device} and its base keeps its dtype, but it was asked "
            f"to go to {probe.device}, {probe.dtype} (from {dtype}). Call poros.unprepare(model) "
            "first, convert or move it, then prepare it again."
        )
