"""What a loader strategy offers besides, if its bases can be kept in the packed cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    from torch import nn

    from poros_core.packed_entry import Entry
    from poros_core.protocols import LoadRequest

__all__ = ["LAYER", "BaseSizes", "PackingStrategy"]

LAYER = "layer "
"""What the name of a decoder layer's unit begins with; see ``plan.Unit``."""


@frozen(kw_only=True)
class BaseSizes:
    """How large a base is on the host, in bytes.

    Attributes:
        layers: all decoder layers.
        rest: head, embeddings, and what stands on the device.
        largest: the largest layer.
    """

    layers: int
    rest: int
    largest: int

    @classmethod
    def of_entry(cls, entry: Entry) -> BaseSizes:
        """Return the sizes of a base in the cache."""
        layers = [unit.nbytes for unit in entry.units if unit.unit.startswith(LAYER)]
        return cls(
            layers=sum(layers), rest=entry.nbytes - sum(layers), largest=max(layers, default=0)
        )


@runtime_checkable
class PackingStrategy(Protocol):
    """What a loader strategy offers besides, if its bases can be kept in the packed cache."""

    def cache_key(self, request: LoadRequest) -> Mapping[str, Any]:
        """Return everything that decides the base's bytes, as JSON knows it, with ``precision``.

        Read from config and headers; no weight is touched.

        Raises:
            CacheRefusal: something decides them that cannot be told beforehand.
        """
        ...

    def estimate(self, request: LoadRequest) -> BaseSizes:
        """Return about how large the base will be, from config and headers."""
        ...

    def describe(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what ``skeleton`` needs to know of a loaded model besides its tensors, as JSON
        knows it."""
        ...

    def skeleton(self, request: LoadRequest, described: Mapping[str, Any]) -> nn.Module:
        """Return the model as ``load`` gives it, without reading a weight.

        Whatever a codec names is bound afterwards, so it may hold anything, of any size.

        Raises:
            CheckpointError: the checkpoint does not fit.
        """
        ...
