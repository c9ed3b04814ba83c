"""The 16 values of NF4, built once a load instead of once a weight.

[Note: One table]
bitsandbytes builds the table that a quantised weight carries from a list of numbers, for every
weight: a copy to the device that is awaited, and four kernels. While ``one_table`` is entered, this
thread gets copies of the first instead: the same bytes, in memory of their own. Other threads get
what they always got. The function is put back when the last that entered has left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bitsandbytes.functional as bnb_functional
import torch

__all__ = ["one_table"]

_lock = threading.Lock()
_entered = 0
_build: Any = None
_own = threading.local()


@contextmanager
def one_table(tables: dict[Any, torch.Tensor] | None = None) -> Iterator[None]:
    """Build a table once a device. See [Note: One table].

    Args:
        tables: those that are built already, and then all.
    """
    global _entered, _build
    with _lock:
        if not _entered:
            _build = bnb_functional.get_4bit_type
            bnb_functional.get_4bit_type = _copied
        _entered += 1
    before = getattr(_own, "tables", None)
    _own.tables = {} if tables is None else tables
    try:
        yield
    finally:
        _own.tables = before
        with _lock:
            _entered -= 1
            if not _entered:
                bnb_functional.get_4bit_type = _build


def _copied(typename: str, device: Any = None, blocksize: int = 64) -> torch.Tensor:
    tables: dict[Any, torch.Tensor] | None = getattr(_own, "tables", None)
    if tables is None or device is None:
        built: torch.Tensor = _build(typename, device=device, blocksize=blocksize)
        return built
    key = (typename, device, blocksize)
    if key not in tables:
        tables[key] = _build(typename, device=device, blocksize=blocksize)
    return tables[key].clone()
