"""Letting threads that read go on while the main thread runs Python, and letting that run.

[Note: Short turns]
A thread that comes back from a read waits for the interpreter until the thread that runs has had
its turn: 5 ms. Making a skeleton is Python from start to end, so readers would wait longer than
they read. While a load runs, turns are ten times shorter.

[Note: No collections]
A model is many thousands of objects, all of which stay. Python looks through all there are for
garbage several times while they are made, and every thread waits. So it is asked not to, where what
is made holds no memory of weights.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["short_turns", "without_collections"]

_TURN_S = 0.0005

_lock = threading.Lock()
_loads = 0
_before = 0.0
_builds = 0
_collected = True


@contextmanager
def short_turns() -> Iterator[None]:
    """Keep turns short while this is entered, by one thread or by several."""
    global _loads, _before
    with _lock:
        if not _loads:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, _TURN_S))
        _loads += 1
    try:
        yield
    finally:
        with _lock:
            _loads -= 1
            if not _loads:
                sys.setswitchinterval(_before)


@contextmanager
def without_collections() -> Iterator[None]:
    """Look for no garbage while this is entered, by one thread or by several. See
    [Note: No collections]."""
    global _builds, _collected
    with _lock:
        if not _builds:
            _collected = gc.isenabled()
            gc.disable()
        _builds += 1
    try:
        yield
    finally:
        with _lock:
            _builds -= 1
            if not _builds and _collected:
                gc.enable()
