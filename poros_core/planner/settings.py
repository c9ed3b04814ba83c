"""What a run is asked to be, and how sizes and rates are written."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs
from attrs import field, frozen, validators

from poros_core.errors import SettingsError
from poros_core.planner.weights import Precision

__all__ = ["CHUNK", "RunSettings", "parse_rate"]

CHUNK = 1024
"""Tokens in a chunk of ``poros.chunked_loss``; as in ``poros_core.chunked_loss``, which needs
torch. A test holds the two together."""


def _positive(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise SettingsError(f"{attribute.name} must be 1 or more; got {value}.")


@frozen(kw_only=True)
class RunSettings:
    """A training run, as far as memory and time depend on it.

    Attributes:
        precision: of the base.
        seq_len: tokens per sequence.
        batch: sequences per micro-batch.
        accumulate: micro-batches per optimizer step.
        rank: of LoRA on all linear layers, with float32 adapters and AdamW.
        block_size: layers that share one recompute boundary.
        graphs: whether blocks are captured as CUDA graphs.
        optimizer_state: where AdamW's two tensors are between steps.
        fused: whether AdamW is the fused one, as HF Trainer's is; torch's default needs a temporary
            of the adapters' size.
        host: where layers stand: ``"pinned"`` is page-locked memory, ``"pageable"`` ordinary
            memory, ``"mmap"`` the files of the packed cache, of which the system keeps in memory
            what it can.
        loss_chunk: tokens that have logits at a time with ``poros.chunked_loss``; None means all,
            with the model's own loss.
    """

    precision: Precision = "nf4"
    seq_len: int = field(default=512, validator=_positive)
    batch: int = field(default=1, validator=_positive)
    accumulate: int = field(default=1, validator=_positive)
    rank: int = field(default=16, validator=_positive)
    block_size: int = field(default=1, validator=_positive)
    graphs: bool = True
    optimizer_state: Literal["device", "host"] = "device"
    fused: bool = False
    host: Literal["pinned", "pageable", "mmap"] = "pinned"
    loss_chunk: int | None = field(default=None, validator=validators.optional(_positive))

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.seq_len * self.batch

    @property
    def tokens_with_logits(self) -> int:
        """Tokens that have logits at a time."""
        return self.tokens if self.loss_chunk is None else min(self.tokens, self.loss_chunk)


def parse_rate(text: str, *, what: str, unit: str, factor: float) -> float:
    """Return a rate.

    Args:
        text: a number, with or without its unit.
        what: which setting it is, for the error.
        unit: the unit, as ``GB/s``.
        factor: what one of that unit is.

    Raises:
        SettingsError: it is no rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\S*)", text.strip())
    if match is None or match[2].lower() not in ("", unit.lower()) or float(match[1]) == 0:
        raise SettingsError(f"{what} must be a number of {unit}, such as 25{unit}; got '{text}'.")
    return float(match[1]) * factor
