"""How many parameters a prepared model has: what Transformers counts, looked up.

[Note: Counts]
After every backward HF Trainer asks ``num_parameters(exclude_embeddings=True)`` for its count of
operations, while the link has nothing to do. Transformers walks the tree twice and asks every
parameter for its size. The answer depends on which modules and parameters there are, under which
names, and on sizes. So it is remembered together with these, and before it is given again they are
read anew, which takes a few passes over lists; if anything differs, Transformers counts. Sizes of
4-bit weights are not read, which takes longest: a layer that streams keeps its weights' shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import attrgetter, call, contains, is_, itemgetter
from types import MethodType
from typing import Any

import torch
from attrs import define
from torch import nn

from poros_runtimes.streamed.attach import Attachments
from poros_runtimes.streamed.model_calls import uncompiled
from poros_runtimes.streamed.walks import lists_as_torch, walks_itself

__all__ = ["attach_counts"]

_NAME = "num_parameters"
_WALK = "named_modules"


def attach_counts(attachments: Attachments, roots: Iterable[nn.Module]) -> None:
    """Set ``num_parameters`` on those of a model's modules that have Transformers' own; see
    [Note: Counts].

    Args:
        attachments: notes what is set.
        roots: the model that was prepared, and the one that it wraps.
    """
    from transformers import PreTrainedModel

    for root in {id(root): root for root in roots}.values():
        own = getattr(type(root), _NAME, None)
        if own is PreTrainedModel.num_parameters and _NAME not in root.__dict__:
            attachments.set(root, _NAME, MethodType(uncompiled(_Counts().count), root))


class _Counts:
    """Stands in for ``PreTrainedModel.num_parameters`` of one model."""

    def __init__(self) -> None:
        self._tree: _Tree | None = None
        self._found: dict[tuple[bool, bool], int] = {}

    def count(
        self, model: Any, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        """Return how many parameters there are; see ``PreTrainedModel.num_parameters``."""
        asked = bool(exclude_embeddings), bool(getattr(model, "is_loaded_in_4bit", False))
        if only_trainable:
            return int(type(model).num_parameters(model, only_trainable, exclude_embeddings))
        if self._tree is None or not self._tree.still():
            self._tree, self._found = None, {}
        if asked in self._found:
            return self._found[asked]
        found: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
        if self._tree is None and _comparable(model):
            self._tree = _Tree.of(model)
        if self._tree is not None:
            self._found[asked] = found
        return found


def _comparable(model: nn.Module) -> bool:
    """Whether torch's walk finds all modules and parameters of a model."""
    modules = list(model.modules())
    children = {*chain.from_iterable(module._modules.values() for module in modules), None}
    return (
        lists_as_torch(model)
        and children <= {*modules, None}  # none is behind a walk that leaves it out
        and not any(map(walks_itself, modules))
    )


_Refs = list[Callable[[], Any]]


def _refs(objects: Iterable[Any]) -> _Refs:
    return [type(None) if each is None else weakref.ref(each) for each in objects]


@define
class _Tree:
    """The modules and parameters of a model as they were. Keeps none of them alive.

    Attributes:
        modules: all modules.
        types: their classes.
        walks: the instance attributes that are walks, by number of the module.
        widths: how many children each has, and then how many parameters.
        names: of the children, and then of the parameters.
        held: the children, and then the parameters, None among them.
        sized: the parameters whose sizes are compared.
        sizes: these, in elements.
    """

    modules: _Refs
    types: list[type]
    walks: dict[int, object]
    widths: list[int]
    names: list[str]
    held: _Refs
    sized: _Refs
    sizes: list[int]

    @classmethod
    def of(cls, model: nn.Module) -> _Tree:
        """Return a model's."""
        modules = list(model.modules())
        owns = [module.__dict__ for module in modules]
        walks = {number: own[_WALK] for number, own in enumerate(owns) if _WALK in own}
        widths, names, held = _below(owns)
        sized = [each for each in held if type(each) is nn.Parameter]
        return cls(
            _refs(modules),
            [*map(type, modules)],
            walks,
            widths,
            names,
            _refs(held),
            _refs(sized),
            [*map(torch.Tensor.numel, sized)],
        )

    def still(self) -> bool:
        """Whether nothing differs."""
        modules = [*map(call, self.modules)]
        if [*map(type, modules)] != self.types:  # one that is gone is None
            return False
        owns = [*map(attrgetter("__dict__"), modules)]
        if sum(map(contains, owns, repeat(_WALK))) != len(self.walks):
            return False
        if any(owns[number].get(_WALK) != walk for number, walk in self.walks.items()):
            return False
        widths, names, held = _below(owns)
        if widths != self.widths or names != self.names:
            return False
        if not all(map(is_, held, map(call, self.held))):
            return False
        return [*map(torch.Tensor.numel, map(call, self.sized))] == self.sizes


def _below(owns: list[dict[str, Any]]) -> tuple[list[int], list[str], list[Any]]:
    """Return ``widths``, ``names`` and ``held`` of ``_Tree``, of modules' instance attributes."""
    tables: list[dict[str, Any]] = [
        *map(itemgetter("_modules"), owns),
        *map(itemgetter("_parameters"), owns),
    ]
    return (
        [*map(len, tables)],
        [*chain.from_iterable(tables)],
        [*chain.from_iterable(map(dict.values, tables))],
    )
