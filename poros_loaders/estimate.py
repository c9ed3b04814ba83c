"""How large a base and its units will be on the host, told from a checkpoint's headers."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from poros_core.packing_strategy import LAYER, BaseSizes

if TYPE_CHECKING:
    import torch

    from poros_loaders.checkpoint import Checkpoint, TensorHeader

__all__ = ["estimated", "layer_matrices", "quantised_bytes", "unit_sizes"]

_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
_FLOATS = {"F64", "F32", "BF16", "F16"}
_ALIGNMENT = 256
"""``poros_core.host_memory.ALIGNMENT``, which cannot be imported where there is no torch."""
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
    decoder = _decoder(checkpoint)
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


def unit_sizes(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None, item: int, double: bool
) -> dict[str, int]:
    """Return about how large each unit of an NF4 base will be, by its name in the plan.

    Args:
        checkpoint: the headers, of an unquantised checkpoint.
        dtype: what is not quantised is cast to it; None leaves it as it is.
        item: bytes of an element of the storage that packed weights have.
        double: whether scales are quantised too.
    """
    sizes: Counter[str] = Counter()
    tables: dict[str, int] = {}
    decoder = _decoder(checkpoint)
    matrices = layer_matrices(checkpoint)
    for name, header in checkpoint.tensors.items():
        found = _LAYER.match(name)
        nbytes = _aligned(_nbytes(header, dtype, quantised=False, double=False))
        if found is not None and found[1] == decoder:
            if name in matrices:
                count = math.prod(header.shape)
                nbytes = quantised_bytes(count, item=item, block=_BLOCK, double=double)
            sizes[f"{LAYER}{found[2]}"] += nbytes
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tables[name.split(".")[-2]] = nbytes
    head, table = tables.get("lm_head"), tables.get("embed_tokens")
    if head is None and table is not None:
        sizes["head"] = table
    elif head is not None and table is not None:
        sizes["head"] = head
        if not checkpoint.config.get("tie_word_embeddings", False):
            sizes["embedding"] = table
    return dict(sizes)


def layer_matrices(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what an ordinary NF4 load quantises, the matrices in decoder layers: the name of each,
    and of its unit in the plan."""
    decoder = _decoder(checkpoint)
    return {
        name: f"{LAYER}{found[2]}"
        for name, header in checkpoint.tensors.items()
        if len(header.shape) == 2
        and header.dtype in _FLOATS
        and (found := _LAYER.match(name)) is not None
        and found[1] == decoder
    }


def quantised_bytes(count: int, *, item: int, block: int, double: bool) -> int:
    """Return what a weight takes with its quantisation state, each tensor rounded up.

    Args:
        count: its elements.
        item: bytes of an element of the storage that packed weights have.
        block: elements that share a scale.
        double: whether scales are quantised too.
    """
    scales = -(-count // block)
    sizes = [-(-count // (2 * item)) * item, 16 * 4]
    sizes += [scales, -(-scales // 256) * 4, 256 * 4, 4] if double else [scales * 4]
    return sum(_aligned(size) for size in sizes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _decoder(checkpoint: Checkpoint) -> str | None:
    """Return what the names of the decoder's layers begin with."""
    groups: Counter[str] = Counter()
    for name, header in checkpoint.tensors.items():
        found = _LAYER.match(name)
        if found is not None:
            groups[found[1]] += header.nbytes
    return max(groups, key=lambda group: groups[group], default=None)
