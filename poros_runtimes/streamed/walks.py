"""Walks over a prepared model's modules and parameters: what torch's give, sooner.

[Note: Walks]
A training loop walks the whole model several times between a backward and the next forward:
``train()``, ``zero_grad()``, ``clip_grad_norm_(model.parameters())``, and for Transformers' count
of parameters; see [Note: Counts]. A model with LoRA on every projection has thousands of modules,
and torch's walk has a generator for each level of the tree, which every module passes on its way
up. The link has nothing to do meanwhile.

Here one loop keeps the levels on a stack. It remembers nothing between walks and reads the same
dictionaries at the same moments as torch's does, so what is added, replaced or deleted is seen, in
the midst of a walk too. A module whose class or instance has a walk of its own (PEFT has such
classes) is asked for it, as torch would ask it.

What torch builds on ``named_modules`` and ``named_parameters`` (``modules``, ``parameters``,
``buffers``, ``zero_grad``, ``requires_grad_``) needs nothing else, nor does a module that wraps the
model. ``train`` is set on what keeps the layers and not on the whole model: Transformers' models
have a ``train`` of their own, which runs as ever and ends up there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

from poros_runtimes.streamed.attach import Attachments
from poros_runtimes.streamed.model_calls import uncompiled

__all__ = ["attach_walks", "lists_as_torch", "walks_itself"]

_NAMED_MODULES = nn.Module.named_modules
_NAMED_PARAMETERS = nn.Module.named_parameters
_NAMED_MEMBERS = nn.Module._named_members
_FOR_TRAIN: dict[str, Any] = {
    name: getattr(nn.Module, name)
    for name in ("train", "children", "named_children", "__setattr__")
}

_uncompiled = cache(uncompiled)

_Levels = list[tuple[str, Iterator[tuple[str, nn.Module | None]]]]


def attach_walks(
    attachments: Attachments, roots: Iterable[nn.Module], *, layers: Iterable[nn.Module]
) -> None:
    """Set the walks on a model's modules; see [Note: Walks].

    A module that has a walk of its own keeps it.

    Args:
        attachments: notes what is set.
        roots: what training loops walk: the model that was prepared, and the one that it wraps.
        layers: the decoder layers; ``train`` is set on what keeps them.
    """
    roots, kept = list({id(root): root for root in roots}.values()), {id(layer) for layer in layers}
    keepers = {
        id(module): module
        for root in roots
        for module in root.modules()
        if any(id(child) in kept for child in module._modules.values())
    }
    for root in roots:
        if "named_modules" not in root.__dict__ and not walks_itself(root):
            attachments.set(root, "named_modules", _bound(_named_modules, root))
        if "named_parameters" not in root.__dict__ and lists_as_torch(root):
            attachments.set(root, "named_parameters", _bound(_named_parameters, root))
    for keeper in keepers.values():
        if "train" not in keeper.__dict__ and _trains_as_torch(keeper):
            attachments.set(keeper, "train", _bound(_train, keeper))


def _bound(function: Callable[..., Any], module: nn.Module) -> MethodType:
    """Make a method of one module; equal to one that was made of the same before."""
    return MethodType(_uncompiled(function), module)


# -- modules -----------------------------------------------------------------------------------


def _named_modules(
    self: nn.Module,
    memo: set[nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Module]]:
    """Stand in for ``Module.named_modules``, whose arguments these are."""
    if not remove_duplicate or type(self).named_modules is not _NAMED_MODULES:
        found: Iterator[tuple[str, nn.Module]]
        found = type(self).named_modules(self, memo, prefix, remove_duplicate)
        return found
    return _walk_modules(self, set() if memo is None else memo, prefix)


def _walk_modules(
    root: nn.Module, memo: set[nn.Module], prefix: str
) -> Iterator[tuple[str, nn.Module]]:
    if root in memo:
        return
    memo.add(root)
    yield prefix, root
    levels: _Levels = [(_dotted(prefix), iter(root._modules.items()))]
    while levels:
        above, children = levels[-1]
        for name, module in children:
            if module is None:
                continue
            path = above + name
            other = type(module).named_modules is not _NAMED_MODULES
            if (other or "named_modules" in module.__dict__) and walks_itself(module):
                yield from module.named_modules(memo, path, True)
                continue
            if module in memo:
                continue
            memo.add(module)
            yield path, module
            if below := module._modules:
                levels.append((_dotted(path), iter(below.items())))
                break
        else:
            levels.pop()


def _dotted(path: str) -> str:
    """Return what names below a path begin with."""
    return path and f"{path}."


def walks_itself(module: nn.Module) -> bool:
    """Whether a module's ``named_modules`` is neither torch's nor ours."""
    if type(module).named_modules is not _NAMED_MODULES:
        return True
    own = module.__dict__
    return "named_modules" in own and own["named_modules"] != _bound(_named_modules, module)


# -- parameters --------------------------------------------------------------------------------


def _named_parameters(
    self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Stand in for ``Module.named_parameters``, whose arguments these are."""
    if not recurse or not remove_duplicate or not lists_as_torch(self):
        return type(self).named_parameters(self, prefix, recurse, remove_duplicate)
    return _walk_parameters(self, prefix)


def _walk_parameters(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Walk as ``_walk_modules`` does, and yield no modules on the way, which would take time."""
    memo, given = {root}, set[nn.Parameter]()
    yield from _parameters_of(root, prefix, given)
    levels: _Levels = [(_dotted(prefix), iter(root._modules.items()))]
    while levels:
        above, children = levels[-1]
        for name, module in children:
            if module is None:
                continue
            other = type(module).named_modules is not _NAMED_MODULES
            if (other or "named_modules" in module.__dict__) and walks_itself(module):
                for path, owner in module.named_modules(memo, above + name, True):
                    yield from _parameters_of(owner, path, given)
                continue
            if module in memo:
                continue
            memo.add(module)
            if module._parameters:
                yield from _parameters_of(module, above + name, given)
            if below := module._modules:
                levels.append((_dotted(above + name), iter(below.items())))
                break
        else:
            levels.pop()


def _parameters_of(
    module: nn.Module, path: str, given: set[nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's own parameters that were not given yet."""
    start = _dotted(path)
    for key, param in module._parameters.items():
        if param is not None and param not in given:
            given.add(param)
            yield start + key, param


def lists_as_torch(module: nn.Module) -> bool:
    """Whether a module's parameters are those of the modules that it walks over."""
    return (
        type(module).named_parameters is _NAMED_PARAMETERS
        and type(module)._named_members is _NAMED_MEMBERS
        and "_named_members" not in module.__dict__
        and not walks_itself(module)
    )


# -- train and eval ----------------------------------------------------------------------------


def _train(self: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for ``Module.train``."""
    if not isinstance(mode, bool) or not _trains_as_torch(self):
        return type(self).train(self, mode)
    _set_training(self, mode, {})
    return self


def _set_training(module: nn.Module, mode: bool, plain: dict[type[nn.Module], bool]) -> None:
    """Set the flag of a module and of those below it, in the order of torch's ``train``.

    Args:
        module: its ``train`` is torch's.
        mode: the flag.
        plain: of the classes that were met, whether ``train`` is torch's.
    """
    module.__dict__["training"] = mode
    seen: set[nn.Module] = set()
    for child in module._modules.values():
        if child is None or child in seen:
            continue
        seen.add(child)
        kind, own = type(child), child.__dict__
        if kind not in plain:
            plain[kind] = _is_plain(kind)
        if not plain[kind] or "train" in own or "children" in own or "named_children" in own:
            child.train(mode)
        else:
            _set_training(child, mode, plain)


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether ``train`` of a class is torch's, and sets no more than an entry of ``__dict__``."""
    return not hasattr(kind, "training") and all(
        getattr(kind, name) is found for name, found in _FOR_TRAIN.items()
    )


def _trains_as_torch(module: nn.Module) -> bool:
    """Whether a module's ``train`` is torch's, or was before ours was set."""
    own = module.__dict__
    return _is_plain(type(module)) and "children" not in own and "named_children" not in own
