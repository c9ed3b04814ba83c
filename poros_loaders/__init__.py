"""Bytes on disk to tensors in a model: the built-in loader strategies.

The only package that knows bitsandbytes and safetensors. Importing it imports neither them nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from poros_core.hookspecs import hookimpl
from poros_core.protocols import LoaderStrategy
from poros_loaders.nf4 import Nf4Standard, Nf4Streamed
from poros_loaders.plain import Bf16Standard, Bf16Streamed

__all__ = ["poros_loaders"]

_STRATEGIES: tuple[LoaderStrategy, ...] = (
    Nf4Streamed(),
    Nf4Standard(),
    Bf16Streamed(),
    Bf16Standard(),
)


@hookimpl
def poros_loaders() -> Sequence[LoaderStrategy]:
    """Offer NF4 and BF16, each ``streamed`` and ``standard``."""
    return _STRATEGIES
