"""A model's frozen weights as the planner sees them: names, shapes, and what becomes of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from attrs import frozen

from poros_core.errors import CheckpointError, SettingsError

__all__ = [
    "LINEAR_ATTENTION",
    "PRECISIONS",
    "Precision",
    "Weight",
    "Weights",
    "checked_precision",
    "sort_weights",
]

Precision = Literal["nf4", "bf16"]
LINEAR_ATTENTION = ".linear_attn."
"""In the name of every weight of a linear attention."""
PRECISIONS: tuple[Precision, ...] = ("nf4", "bf16")

_ALIGNMENT = 256
"""Bytes; as in ``poros_core.host_store``, which needs torch. A test holds the two together."""
_NF4_BLOCK = 64
_NF4_CODE = 16 * 4
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_IGNORED = re.compile(r"(^|\.)mtp\.")
"""Weights for predicting several tokens, which Transformers leaves out when it loads."""


@frozen
class Weight:
    """One parameter.

    Attributes:
        name: its name.
        shape: its shape; a linear layer's is ``(outputs, inputs)``.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def linear(self) -> bool:
        """Whether it is a linear layer's matrix, if it is no table."""
        return len(self.shape) == 2 and self.name.endswith("weight")

    def tensors(self, precision: Precision) -> list[int]:
        """Return the bytes of each tensor that it is stored as in a layer.

        Args:
            precision: in ``"nf4"`` a linear layer's matrix is a packed weight with a scale for
                every 64 numbers (no double quantisation) and a code book; the rest is BF16.
        """
        if precision == "bf16" or not self.linear:
            return [2 * self.count]
        return [-(-self.count // 2), 4 * -(-self.count // _NF4_BLOCK), _NF4_CODE]


@frozen(kw_only=True)
class Weights:
    """All weights of a model, by what becomes of them when its base streams.

    Attributes:
        layers: of each decoder layer; one unit each.
        head: the output embedding, which is the input embedding where the two are tied.
        tables: embedding tables that are read from host memory, without the head.
        decoder: the rest of the decoder, such as the final norm: on the device.
        towers: what is outside the decoder: on the device.
        uncounted: towers that the config names and whose weights are not known.
    """

    layers: tuple[tuple[Weight, ...], ...]
    head: Weight
    tables: tuple[Weight, ...]
    decoder: tuple[Weight, ...]
    towers: tuple[Weight, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        return self.head.shape[1]

    @property
    def vocabulary(self) -> int:
        """Entries of the head."""
        return self.head.shape[0]

    @property
    def count(self) -> int:
        """Parameters of the model."""
        return sum(w.count for w in self.everything())

    def everything(self) -> Iterable[Weight]:
        """Yield every weight."""
        yield from (weight for layer in self.layers for weight in layer)
        yield self.head
        yield from (*self.tables, *self.decoder, *self.towers)

    def layer_bytes(self, precision: Precision) -> list[int]:
        """Return the size of each layer's unit in bytes, as the host store lays it out."""
        return [
            sum(_aligned(n) for weight in layer for n in weight.tensors(precision))
            for layer in self.layers
        ]

    @property
    def head_bytes(self) -> int:
        """Size of the head's unit in bytes: it is not quantised."""
        return _aligned(2 * self.head.count)

    @property
    def table_bytes(self) -> int:
        """Size of the other tables in host memory, in bytes."""
        return sum(_aligned(2 * table.count) for table in self.tables)

    def rest_bytes(self, precision: Precision) -> int:
        """Size in bytes of what stays on the device."""
        return sum(sum(w.tensors(precision)) for w in (*self.decoder, *self.towers))

    def adapter_count(self, rank: int) -> int:
        """Return how many parameters LoRA of a rank has on every linear layer of the decoder."""
        return rank * sum(sum(w.shape) for w in self._adapted())

    @property
    def adapter_tensors(self) -> int:
        """How many tensors they are: two for each linear layer of the decoder."""
        return 2 * len(self._adapted())

    def _adapted(self) -> list[Weight]:
        matrices = [w for layer in self.layers for w in layer if w.linear]
        return matrices + [w for w in self.decoder if w.linear]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def sort_weights(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    tied: bool | None = None,
    uncounted: Iterable[str] = (),
) -> Weights:
    """Sort weights into layers, head, tables and the rest, by their names.

    The decoder is what the input embedding belongs to.

    Args:
        shapes: shapes by name, as a family says them or a checkpoint's headers.
        tied: what the config says of head and embedding; None means by whether there is a head.
        uncounted: towers whose weights are missing in ``shapes``.

    Raises:
        CheckpointError: there is no embedding or there are no layers.
    """
    weights = [Weight(n, tuple(s)) for n, s in shapes.items() if not _IGNORED.search(n)]
    tables = {w.name: w for w in weights if w.name.endswith(_EMBEDDING)}
    if not tables:
        raise CheckpointError(
            f"No weight is named '...{_EMBEDDING}', so the decoder cannot be told. Name a "
            "checkpoint in Transformers format."
        )
    embedding = min(tables.values(), key=lambda w: len(w.name))
    prefix = embedding.name.removesuffix(_EMBEDDING)
    layer = re.compile(re.escape(prefix) + r"layers\.(\d+)\.")
    layers: dict[int, list[Weight]] = {}
    head, other_tables, decoder, towers = None, [], [], []
    for weight in weights:
        match = layer.match(weight.name)
        if match is not None:
            layers.setdefault(int(match[1]), []).append(weight)
        elif weight.name.endswith(_HEAD):
            head = weight
        elif weight is embedding:
            continue
        elif not weight.name.startswith(prefix):
            towers.append(weight)
        elif ".embed_tokens" in weight.name:
            other_tables.append(weight)
        else:
            decoder.append(weight)
    if not layers:
        raise CheckpointError(
            f"No weight is named '{prefix}layers.N...'. Name a checkpoint in Transformers format."
        )
    if head is None or tied:
        head = embedding
    else:
        other_tables.insert(0, embedding)
    return Weights(
        layers=tuple(tuple(layers[number]) for number in sorted(layers)),
        head=head,
        tables=tuple(other_tables),
        decoder=tuple(decoder),
        towers=tuple(towers),
        uncounted=tuple(uncounted),
    )


def checked_precision(text: str) -> Precision:
    """Return a precision that the planner knows.

    Raises:
        SettingsError: it is another one.
    """
    for precision in PRECISIONS:
        if text == precision:
            return precision
    raise SettingsError(f"precision must be one of: {', '.join(PRECISIONS)}; got {text!r}.")
