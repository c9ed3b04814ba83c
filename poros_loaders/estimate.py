"""How large a base will be on the host, told from a checkpoint's headers."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from poros_core.packing_strategy import BaseSizes

if TYPE_CHECKING:
    import torch

    from poros_loaders.checkpoint import Checkpoint, TensorHeader

__all__ = ["estimated"]

_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
_FLOATS = {"F64", "F32", "BF16", "F16"}
_BLOCK = 64
"""Elements that share a scale in bitsandbytes' NF4."""


def estimated(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None, quantised: bool, double: bool
) -> BaseSizes:
    """Return about how large the base will be.

    The decoder's layers are the numbered modules that hold the most bytes. Of an NF4 base every
    matrix in a layer counts as quantised.

    Args:
        checkpoint: the headers.
        dtype: what is not quantised is cast to it; None leaves it as it is.
        quantised: whether matrices in layers are quantised now.
        double: whether their scales are too.
    """
    groups: Counter[str] = Counter()
    for name, header in checkpoint.tensors.items():
        found = _LAYER.match(name)
        if found is not None:
            groups[found[1]] += header.nbytes
    decoder = max(groups, key=lambda group: groups[group], default=None)
    layers: Counter[str] = Counter()
    rest = 0
    for name, header in checkpoint.tensors.items():
        found = _LAYER.match(name)
        inside = found is not None and found[1] == decoder
        nbytes = _nbytes(header, dtype, quantised=quantised and inside, double=double)
        if found is not None and inside:
            layers[found[2]] += nbytes
        else:
            rest += nbytes
    return BaseSizes(
        layers=sum(layers.values()), rest=rest, largest=max(layers.values(), default=0)
    )


def _nbytes(
    header: TensorHeader, dtype: torch.dtype | None, *, quantised: bool, double: bool
) -> int:
    if header.dtype not in _FLOATS:
        return header.nbytes
    count = math.prod(header.shape)
    if quantised and len(header.shape) == 2:
        scales = -(-count // _BLOCK)
        return count // 2 + (scales + scales // 64 if double else 4 * scales)
    return header.nbytes if dtype is None else count * dtype.itemsize
