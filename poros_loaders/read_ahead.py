"""Reading shards into the page cache ahead of the loader that looks at them.

A mapped file is read in small pieces, each when it is first looked at, and quantising waits for
each of them. A thread asks the system for larger pieces before, in the order of the shards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["ReadAhead"]

_STEP = 64 << 20
_WINDOW = 8 << 30
"""Bytes that are asked for before what was asked for earlier has been looked at."""


class ReadAhead:
    """Reads ahead while it is entered."""

    def __init__(self, files: Sequence[Path], *, window: int = _WINDOW, step: int = _STEP) -> None:
        """Name what will be looked at.

        Args:
            files: in the order in which they will be looked at.
            window: how many bytes to be ahead at most.
            step: bytes that are asked for at once.
        """
        self.asked = 0
        self._files = files
        self._window = window
        self._step = step
        self._seen = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="poros-read-shards", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes more were looked at."""
        with self._changed:
            self._seen += nbytes
            if self._has_room():
                self._changed.notify()

    def _run(self) -> None:
        for file in self._files:
            try:
                handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return  # the loader meets the same error, and says it
            try:
                for begin in range(0, os.fstat(handle).st_size, self._step):
                    if not self._may_ask():
                        return
                    os.posix_fadvise(handle, begin, self._step, os.POSIX_FADV_WILLNEED)
                    self.asked += self._step
            finally:
                os.close(handle)

    def _may_ask(self) -> bool:
        """Wait until there is room in the window; return False if reading ahead is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room())
            return not self._stopped

    def _has_room(self) -> bool:
        return self.asked - self._seen < self._window
