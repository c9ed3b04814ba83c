"""Settings of a prepared model, checked once."""

from __future__ import annotations

import os
from typing import Any, Literal

from attrs import field, frozen

from poros_core.errors import SettingsError
from poros_core.sizes import parse_size

__all__ = ["POISON_VARIABLE", "Graphs", "Settings"]

POISON_VARIABLE = "POROS_POISON"
"""Environment variable; ``1`` fills released memory with NaN (0xFF), as the tests do."""

Graphs = Literal["auto", "on", "off"]


_LEAST_BUDGET = 1000
"""Bytes. Whoever gives fewer means another unit."""


def _block_size(instance: Any, attribute: Any, value: int | Literal["all"]) -> None:
    if value == "all":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(
            f"block_size must be a whole number of layers from 1 up, or 'all'; got {value!r}."
        )


def _budget(value: Any) -> Any:
    """Turn text into bytes; the validator judges the rest."""
    is_size = isinstance(value, str) and value != "auto"
    return parse_size(value, what="vram_budget") if is_size else value


def _vram_budget(instance: Any, attribute: Any, value: object) -> None:
    if value is None or value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST_BUDGET:
        raise SettingsError(
            "vram_budget must be None (everything streams), 'auto', a size such as '16GB', or "
            f"bytes; got {value!r}."
        )


def _graphs(instance: Any, attribute: Any, value: str) -> None:
    if value not in ("auto", "on", "off"):
        raise SettingsError(f"graphs must be 'auto', 'on' or 'off'; got {value!r}.")


def _yes_or_no(instance: Any, attribute: Any, value: object) -> None:
    if not isinstance(value, bool):
        raise SettingsError(f"{attribute.name} must be True or False; got {value!r}.")


@frozen(kw_only=True)
class Settings:
    """How a model is prepared.

    Attributes:
        block_size: decoder layers that share one recompute boundary, or ``"all"``. A larger block
            keeps fewer boundary activations and needs a larger device window.
        vram_budget: device memory that the run may use, in bytes or as ``"16GB"``; what it leaves
            over keeps units resident. ``"auto"`` takes what is free, None streams everything.
        graphs: whether blocks are captured as CUDA graphs: ``"auto"`` (on CUDA), ``"on"`` (an
            error elsewhere) or ``"off"``.
        offload_activations: keep the hidden state that enters each block, but for the last, in
            page-locked host memory between its forward and its backward.
        copy_ahead: between two losses, copy units into memory that the allocator has and nobody
            needs.
        runtime: name of the runtime plugin.
        poison: fill released memory with 0xFF bytes (NaN in every float format), so that a read
            of a unit that is not there shows in the numbers. For tests; costs time.
    """

    block_size: int | Literal["all"] = field(default=1, validator=_block_size)
    vram_budget: int | Literal["auto"] | None = field(
        default=None, converter=_budget, validator=_vram_budget
    )
    graphs: Graphs = field(default="auto", validator=_graphs)
    offload_activations: bool = field(default=False, validator=_yes_or_no)
    copy_ahead: bool = field(default=False, validator=_yes_or_no)
    runtime: str = "streamed"
    poison: bool = field(factory=lambda: os.environ.get(POISON_VARIABLE) == "1")
