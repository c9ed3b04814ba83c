"""Train LoRA adapters with the frozen base streamed from host memory, bit for bit.

Names are resolved when they are first used, so that ``import poros`` and the command line work
without torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from poros._extras import missing_extra

if TYPE_CHECKING:
    from poros_core.accumulate import accumulate
    from poros_core.chunked_loss import chunked_cross_entropy, chunked_loss
    from poros_core.determinism import deterministic
    from poros_core.errors import (
        CheckpointError,
        GateError,
        PluginError,
        PorosError,
        PrepareError,
        SettingsError,
        StateError,
        UnsupportedModelError,
    )
    from poros_core.family import Family
    from poros_core.hookspecs import hookimpl
    from poros_core.load import load
    from poros_core.offload import offload_optimizer
    from poros_core.prepare import prepare, unprepare
    from poros_core.stats import stats
    from poros_core.stats_callback import StatsCallback

    __version__: str

__all__ = [
    "CheckpointError",
    "Family",
    "GateError",
    "PluginError",
    "PorosError",
    "PrepareError",
    "SettingsError",
    "StateError",
    "StatsCallback",
    "UnsupportedModelError",
    "__version__",
    "accumulate",
    "chunked_cross_entropy",
    "chunked_loss",
    "deterministic",
    "hookimpl",
    "load",
    "offload_optimizer",
    "prepare",
    "stats",
    "unprepare",
]

_HOMES = {
    "CheckpointError": "poros_core.errors",
    "Family": "poros_core.family",
    "GateError": "poros_core.errors",
    "PluginError": "poros_core.errors",
    "PorosError": "poros_core.errors",
    "PrepareError": "poros_core.errors",
    "SettingsError": "poros_core.errors",
    "StateError": "poros_core.errors",
    "StatsCallback": "poros_core.stats_callback",
    "UnsupportedModelError": "poros_core.errors",
    "accumulate": "poros_core.accumulate",
    "chunked_cross_entropy": "poros_core.chunked_loss",
    "chunked_loss": "poros_core.chunked_loss",
    "deterministic": "poros_core.determinism",
    "hookimpl": "poros_core.hookspecs",
    "load": "poros_core.load",
    "offload_optimizer": "poros_core.offload",
    "prepare": "poros_core.prepare",
    "stats": "poros_core.stats",
    "unprepare": "poros_core.prepare",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("poros-train")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'poros' has no attribute '{name}'")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        message = missing_extra(error, what=f"poros.{name}")
        if message is None:
            raise
        raise ImportError(message) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
