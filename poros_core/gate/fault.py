"""Planting a fault: one bit of one streamed weight, so that a gate shows that it can fail."""

from __future__ import annotations

import random

import torch
from attrs import frozen
from torch import nn

from poros_core.errors import GateError
from poros_core.family import Family
from poros_core.plan import build_plan
from poros_core.plugins import plugins

__all__ = ["FLIPPED_BIT", "PlantedDefect", "PlantedFault", "plant"]

FLIPPED_BIT = "flipped-bit"
"""What this fault is called among ``poros_core.gate.options.PLANTS``."""

_BIT = 6
"""High enough in a packed nibble, and in a bfloat16 mantissa, to be more than rounding."""


@frozen(kw_only=True)
class PlantedFault:
    """The bit that was flipped.

    Attributes:
        unit: the unit that holds the weight.
        tensor: the weight's name in the base model.
        byte: which of its bytes.
        bit: which bit of that byte.
    """

    unit: str
    tensor: str
    byte: int
    bit: int

    def __str__(self) -> str:
        return f"bit {self.bit} of byte {self.byte} of {self.tensor} ({self.unit})"


@frozen(kw_only=True)
class PlantedDefect:
    """A defect of the runtime that was planted.

    Attributes:
        name: of ``poros_core.gate.options.PLANTS``.
        what: what was done, in words.
    """

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} ({self.what})"


def plant(model: nn.Module, *, family: Family, device: torch.device, seed: int) -> PlantedFault:
    """Flip one bit of a matrix of the middle layer, in host memory.

    Args:
        model: the streamed arm, loaded and with adapters, not prepared yet: its base is bound to
            the host store.
        family: its family.
        device: the compute device.
        seed: chooses the matrix and the byte.

    Raises:
        GateError: the middle layer has no matrix that streams.
    """
    plan = build_plan(model, family=family, codecs=plugins().codecs(), device=device)
    unit = plan.layers[len(plan.layers) // 2]
    names = {id(param): name for name, param in plan.model.named_parameters()}
    matrices = [ref for ref in unit.refs if ref.key[0] in names and ref.get().ndim == 2]
    if not matrices:
        raise GateError(
            f"--plant-fault: {unit.name} has no matrix that streams. Run the gate without it."
        )
    choice = random.Random(seed)
    ref = choice.choice(matrices)
    content = ref.get().view(-1).view(torch.uint8)
    byte = choice.randrange(0, content.numel(), 2)
    content[byte] ^= 1 << _BIT
    return PlantedFault(
        unit=unit.name,
        tensor=names[ref.key[0]].replace(".base_layer.", "."),
        byte=byte,
        bit=_BIT,
    )
