"""The hooks a plugin may implement. Registered under the entry-point group ``poros``.

A plugin is a module (or object) with functions marked by ``poros_core.hookimpl``. Poros calls each
hook once, when its plugin manager is first asked for something; no hook is called while a model
trains. A hook whose name is not one of these is an error at start-up, so a misspelling cannot
pass unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from poros_core.family import Family
from poros_core.protocols import LoaderStrategy, Runtime

__all__ = ["PROJECT", "hookimpl", "hookspec", "poros_families", "poros_loaders", "poros_runtimes"]

PROJECT = "poros"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def poros_families() -> Sequence[Family]:
    """Offer architecture families.

    When: once, when families are first needed (``prepare``, ``load``, ``list-families``,
    ``check``, ``gate``). Must not import torch or transformers.

    Returns: the families that the plugin adds. A name or a ``model_type`` that another plugin has
    too is an error that names both plugins: the first result never simply wins.
    """
    raise AssertionError("a specification is never called")


@hookspec
def poros_loaders() -> Sequence[LoaderStrategy]:
    """Offer loader strategies: how base weights are read, quantised and laid out in tensors.

    When: once, when loaders are first needed (``prepare``, ``load``, ``gate``). Must not import
    torch at module level.

    Returns: the strategies that the plugin adds. A pair of precision and strategy that another
    plugin has too is an error that names both plugins.
    """
    raise AssertionError("a specification is never called")


@hookspec
def poros_runtimes() -> Sequence[Runtime]:
    """Offer runtimes: where blocks live and how they move.

    When: once, when runtimes are first needed (``prepare``). Must not import torch at module
    level.

    Returns: the runtimes that the plugin adds. A name that another plugin has too is an error
    that names both plugins.
    """
    raise AssertionError("a specification is never called")
