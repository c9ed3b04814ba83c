"""What one measurement of a load does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

from poros_core.gate.options import GateOptions, Subject, subject_of

__all__ = ["METHODS", "LoadWork", "Way"]


@frozen(kw_only=True)
class Way:
    """How a method loads.

    Attributes:
        precision: of the base.
        strategy: ``load_strategy`` of ``poros.load``.
        host: ``host`` of ``poros.load``.
        cache: None for none, ``"write"`` for a first load, ``"read"`` for a second.
        generated: weights are drawn where a checkpoint would be read.
    """

    precision: str = "nf4"
    strategy: str = "streamed"
    host: str = "pinned"
    cache: str | None = None
    generated: bool = False


METHODS: Mapping[str, Way] = {
    "streamed": Way(),
    "standard": Way(strategy="standard"),
    "bf16": Way(precision="bf16"),
    "bf16-standard": Way(precision="bf16", strategy="standard"),
    "cache-write": Way(cache="write"),
    "cache-read": Way(cache="read"),
    "mmap-first": Way(cache="write", host="mmap"),
    "mmap": Way(cache="read", host="mmap"),
    "pageable": Way(host="pageable"),
    "generated": Way(generated=True),
}


@frozen(kw_only=True)
class LoadWork:
    """What one process measures.

    Attributes:
        method: one of ``METHODS``.
        family: the family of the shape.
        shape: a shape of the family.
        layers: decoder layers, instead of the shape's own number.
        seed: of the weights.
        double: whether scales are quantised too.
        verify: compare all bytes with a standard load's afterwards, weight by weight.
        cold: drop what is to be read from the page cache first.
        checkpoint: the folder of the checkpoint.
        cache: the folder of the packed cache.
    """

    method: str
    shape: str
    family: str = "qwen2"
    layers: int | None = None
    seed: int = 0
    double: bool = False
    verify: bool = False
    cold: bool = False
    checkpoint: str
    cache: str

    @property
    def way(self) -> Way:
        """How the method loads."""
        return METHODS[self.method]

    def subject(self) -> Subject:
        """Settle the config."""
        asked = GateOptions(
            family=self.family,
            shape=self.shape,
            precision=self.way.precision,
            seed=self.seed,
            layers=self.layers,
        )
        return subject_of(asked)

    def described(self) -> dict[str, Any]:
        """Return what a record says of the work."""
        subject = self.subject()
        way = self.way
        return {
            "kind": "load-cost",
            "method": self.method,
            "strategy": way.strategy,
            "family": subject.family.name,
            "shape": subject.shape,
            "layers": subject.depth,
            "precision": way.precision,
            "seed": self.seed,
            "settings": {
                "host": way.host,
                "cache": way.cache,
                "double_quantisation": self.double,
                "cold": self.cold,
            },
        }


def as_plain(work: LoadWork) -> dict[str, Any]:
    """Return the work as plain data, for the process that measures it."""
    return asdict(work)
