"""Built-in architecture families: one file each, holding only what differs."""

from __future__ import annotations

from collections.abc import Sequence

from poros_core.family import Family
from poros_core.hookspecs import hookimpl
from poros_families.gemma3 import GEMMA3
from poros_families.gemma4 import GEMMA4
from poros_families.qwen2 import QWEN2
from poros_families.qwen3 import QWEN3
from poros_families.qwen3_5 import QWEN3_5

__all__ = ["poros_families"]


@hookimpl
def poros_families() -> Sequence[Family]:
    """Offer the built-in families."""
    return (QWEN2, QWEN3, QWEN3_5, GEMMA3, GEMMA4)
