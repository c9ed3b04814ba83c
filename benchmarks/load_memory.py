"""How much host memory a load takes; see ``load_texts.LOAD_METHOD``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from pathlib import Path
from types import TracebackType

import torch

from poros_core.load_progress import host_memory
from poros_core.machine import available_memory
from poros_core.page_locking import lockable_memory, populate

__all__ = ["HostMemoryWatch", "memory_disk", "touch_memory"]

_EVERY_S = 0.02
_MAPPED_EVERY_S = 0.25
_SMAPS_BYTES = 8 << 20


def memory_disk(path: Path) -> bool:
    """Say whether a folder is on a memory disk (tmpfs)."""
    found = (0, "")
    here = str(path.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, point, kind, *_ = line.split()
            inside = here == point or here.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= found[0]:
                found = (len(point), kind)
    return found[1] == "tmpfs"


def touch_memory(nbytes: int) -> int:
    """Make memory and give it up, so that a virtual machine has it; return how many bytes."""
    free = available_memory()
    nbytes = nbytes if free is None else min(nbytes, free // 2)
    memory = lockable_memory(nbytes)
    populate(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), nbytes)
    memory.close()
    return nbytes


class HostMemoryWatch:
    """Follows this process's own host memory while it is entered."""

    def __init__(self, *folders: Path) -> None:
        """Begin.

        Args:
            folders: mapped files in them are no memory of this process.
        """
        self._folders = tuple(
            re.compile(
                rb" %b/([^\n]*)\n.*?^Rss: +(\d+) kB.*?^Anonymous: +(\d+) kB"
                % re.escape(os.fsencode(folder.resolve())),
                re.DOTALL | re.MULTILINE,
            )
            for folder in folders
            if memory_disk(folder)
        )
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._highest: int | None = None
        self._recent = 0
        self._mapped = 0
        self.before = 0

    def __enter__(self) -> HostMemoryWatch:
        self._mapped = self._mapped_now()
        self.before = self.now()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._quit.set()
        self._thread.join()
        self._recent = max(self._recent, _counted())
        self._close()

    def now(self) -> int:
        """Return the memory in use now."""
        return _counted() - self._mapped_now()

    @property
    def peak(self) -> int | None:
        """Most memory that was in use, over the level before."""
        return None if self._highest is None else self._highest - self.before

    def _sample(self) -> None:
        last = time.monotonic()
        while not self._quit.wait(_EVERY_S):
            self._recent = max(self._recent, _counted())
            if not self._folders or time.monotonic() - last > _MAPPED_EVERY_S:
                self._close()
                last = time.monotonic()

    def _close(self) -> None:
        """Settle the samples since the last reading of what is mapped."""
        mapped = self._mapped_now()
        least = min(mapped, self._mapped)
        self._highest = max(self._highest or 0, self._recent - least)
        self._mapped, self._recent = mapped, 0

    def _mapped_now(self) -> int:
        if not self._folders:
            return 0
        content = _mappings()
        return sum(
            (int(resident) - int(anonymous)) * 1024
            for folder in self._folders
            for name, resident, anonymous in folder.findall(content)
            if not name.endswith(b"(deleted)")
        )


def _mappings() -> bytes:
    """Return ``/proc/self/smaps``. The system gives it in small pieces; the C library puts them
    together, so that the thread that loads is not stopped for each."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    libc.fread.restype = ctypes.c_size_t
    file = ctypes.c_void_p(libc.fopen(b"/proc/self/smaps", b"rb"))
    if not file:
        raise OSError("/proc/self/smaps cannot be opened")
    content = bytearray()
    part = ctypes.create_string_buffer(_SMAPS_BYTES)
    try:
        while count := libc.fread(part, ctypes.c_size_t(1), ctypes.c_size_t(_SMAPS_BYTES), file):
            content += memoryview(part)[:count]
    finally:
        libc.fclose(file)
    return bytes(content)


def _counted() -> int:
    """Return anonymous and shared anonymous pages, and what torch's pinned allocator holds."""
    pinned = 0
    if torch.cuda.is_initialized():
        pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    return (host_memory() or 0) + pinned
