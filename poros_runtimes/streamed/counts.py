"""How many parameters a prepared model has: what Transformers counts, looked up.

[Note: Counts]
After every backward HF Trainer asks ``num_parameters(exclude_embeddings=True)`` for its count of
operations, while the link has nothing to do. Transformers walks the tree twice and asks every
parameter for its size. The answer depends on which modules and parameters there are, under which
names, and on their classes and sizes. So it is remembered together with these, and before it is
given again they are read anew, which takes a few passes over lists; if anything differs,
Transformers counts. Sizes of what streams are not read, which takes longest: its shapes stay.

Parameters are known by ``id`` alone, since nothing may refer to a tensor that torch is to swap. One
that has taken the place and the ``id`` of another counts the same if class and size are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from itertools import chain, compress, repeat
from operator import attrgetter, call, contains, itemgetter
from types import MethodType
from typing import Any

from attrs import define
from torch import nn

from poros_runtimes.streamed.attach import Attachments
from poros_runtimes.streamed.model_calls import uncompiled
from poros_runtimes.streamed.walks import lists_as_torch, walks_itself

__all__ = ["attach_counts"]

_NAME = "num_parameters"
_WALKS = ("named_modules", "named_parameters")
_TABLES = ("_modules", "_parameters")


def attach_counts(
    attachments: Attachments, roots: Iterable[nn.Module], *, streamed: Collection[int]
) -> None:
    """Set ``num_parameters`` on those of a model's modules that have Transformers' own; see
    [Note: Counts].

    Args:
        attachments: notes what is set.
        roots: the model that was prepared, and the one that it wraps.
        streamed: the ``id`` of every parameter that streams.
    """
    for root in {id(root): root for root in roots}.values():
        if _counted_by_transformers(root) and _NAME not in root.__dict__:
            counts = _Counts(frozenset(streamed))
            attachments.set(root, _NAME, MethodType(uncompiled(counts.count), root))


def _counted_by_transformers(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return getattr(type(model), _NAME, None) is PreTrainedModel.num_parameters


class _Counts:
    """Stands in for ``PreTrainedModel.num_parameters`` of one model."""

    def __init__(self, streamed: frozenset[int]) -> None:
        self._streamed = streamed
        self._seen: tuple[_Tree, dict[tuple[bool, bool], int]] | None = None

    def count(
        self, model: Any, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        """Return how many parameters there are; see ``PreTrainedModel.num_parameters``."""
        seen = self._seen
        asked = bool(exclude_embeddings), bool(getattr(model, "is_loaded_in_4bit", False))
        known = not only_trainable and _counted_by_transformers(model) and lists_as_torch(model)
        tree: _Tree | None = None
        found: dict[tuple[bool, bool], int] = {}
        if known and seen is not None and seen[0].still():
            tree, found = seen
            if asked in found:
                return found[asked]
        elif known:
            tree = _Tree.of(model, self._streamed)
        count: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
        if tree is not None and tree.still():  # another thread may change the model meanwhile
            self._seen = tree, {**found, asked: count}
        return count


_Module = Callable[[], nn.Module | None]


@define
class _Tree:
    """The modules and parameters of a model as they were. Keeps none of them alive.

    Attributes:
        modules: all modules.
        types: their classes.
        walks: the instance attributes that are walks, by number of the module.
        below: what they hold; see ``_below``.
        sized: of all parameters, None among them, those whose sizes are compared.
        sizes: these.
    """

    modules: list[_Module]
    types: list[type]
    walks: list[dict[int, object]]
    below: tuple[list[Any], ...]
    sized: list[bool]
    sizes: list[tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module, streamed: frozenset[int]) -> _Tree | None:
        """Return a model's; None if torch's walk does not find all that there is."""
        modules = [module for _, module in model.named_modules()]
        owns = [module.__dict__ for module in modules]
        if any(type(own.get(table)) is not dict for own in owns for table in _TABLES):
            return None  # a TorchScript module has tables of another kind
        children = {id(child) for own in owns for child in own["_modules"].values()}
        if not children <= {id(None), *map(id, modules)} or any(map(walks_itself, modules)):
            return None
        below, params = _below(owns)
        sized = [param is not None and id(param) not in streamed for param in params]
        return cls(
            [weakref.ref(module) for module in modules],
            [*map(type, modules)],
            [{n: own[walk] for n, own in enumerate(owns) if walk in own} for walk in _WALKS],
            below,
            sized,
            _sizes(params, sized),
        )

    def still(self) -> bool:
        """Whether nothing differs."""
        modules = [*map(call, self.modules)]
        if [*map(type, modules)] != self.types:  # one that is gone is None
            return False
        owns: list[dict[str, Any]] = [*map(attrgetter("__dict__"), modules)]
        for name, walks in zip(_WALKS, self.walks, strict=True):
            if sum(map(contains, owns, repeat(name))) != len(walks):
                return False
            if any(owns[number].get(name) != walk for number, walk in walks.items()):
                return False
        below, params = _below(owns)
        return below == self.below and _sizes(params, self.sized) == self.sizes


def _below(owns: list[dict[str, Any]]) -> tuple[tuple[list[Any], ...], list[Any]]:
    """Return what modules hold, given their instance attributes: how many children and then
    parameters each has, their names, the ``id`` of each child and parameter, and the class of each
    parameter; and all parameters, None among them."""
    children = [*map(itemgetter("_modules"), owns)]
    tables = [*map(itemgetter("_parameters"), owns)]
    params = [*chain.from_iterable(map(dict.values, tables))]
    below = (
        [*map(len, children), *map(len, tables)],
        [*chain.from_iterable(children), *chain.from_iterable(tables)],
        [*map(id, chain.from_iterable(map(dict.values, children))), *map(id, params)],
        [*map(type, params)],
    )
    return below, params


def _sizes(params: list[Any], sized: list[bool]) -> list[tuple[int, int]]:
    """Return the elements of parameters, and the bytes of an element."""
    return [(param.numel(), param.element_size()) for param in compress(params, sized)]
