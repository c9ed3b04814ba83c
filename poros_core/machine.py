"""What Linux says of this machine's memory, limits and disks. Needs no torch.

Every function returns None where the system does not say.
"""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

__all__ = [
    "available_memory",
    "container_headroom",
    "free_disk",
    "page_lock_limit",
    "total_memory",
]

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Where a container sees its own limit, what it uses, and what of that is cached files that give
way: control groups of version 2, and of version 1."""


def available_memory() -> int | None:
    """Return how many bytes of memory can be used without swapping (``MemAvailable``, proc(5))."""
    return _meminfo("MemAvailable:")


def total_memory() -> int | None:
    """Return how many bytes of memory there are (``MemTotal``, proc(5))."""
    return _meminfo("MemTotal:")


def container_headroom() -> int | None:
    """Return how many bytes more the control group of this process may use; None for no limit."""
    total = total_memory()
    for folder, limit_name, usage_name, cached_name in _CGROUPS:
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or (total is not None and limit >= total):
            continue
        cached = _labelled(folder / "memory.stat", cached_name) or 0
        return max(0, limit - usage + cached)
    return None


def page_lock_limit() -> int | None:
    """Return the bytes that this process may lock (``ulimit -l``); None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk(path: Path) -> int | None:
    """Return the bytes that are free where ``path`` is, or will be when it is made."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _meminfo(label: str) -> int | None:
    kibibytes = _labelled(_MEMINFO, label)
    return None if kibibytes is None else kibibytes * 1024


def _labelled(path: Path, label: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    rows = [line.split() for line in lines]
    return next((int(row[1]) for row in rows if row[:1] == [label]), None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
