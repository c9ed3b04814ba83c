"""The host: interpreter, memory, disk, and how much memory may be page-locked."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants

from poros_core import machine
from poros_core.doctor.findings import Finding, good, not_measured, warning

__all__ = [
    "disk_finding",
    "host_findings",
    "memory_finding",
    "page_lock_finding",
    "python_finding",
    "system_finding",
]

_OLDEST_PYTHON = (3, 11)
_NF4_BYTES = 0.56
"""Bytes of host memory per parameter of an NF4 base: half a byte packed, its quantisation state,
and embeddings and head in BF16."""
_BF16_BYTES = 2.0
_SMALL_MODEL = 7.6e9
"""Parameters of a 7B model, the smallest that is worth streaming on a common card."""


def host_findings() -> list[Finding]:
    """Look at everything here that needs no GPU and no torch, but for the page-lock limit."""
    return [
        python_finding(sys.version_info[:2], platform.python_version()),
        system_finding(platform.system(), platform.release()),
        memory_finding(
            _said(machine.available_memory),
            _said(machine.total_memory),
            _said(machine.container_headroom),
        ),
        disk_finding(Path(constants.HF_HUB_CACHE)),
    ]


def _said(look: Callable[[], int | None]) -> int | None:
    """Return what the system says; None where that cannot be understood."""
    try:
        return look()
    except (ValueError, IndexError):
        return None


def python_finding(version: tuple[int, int], text: str) -> Finding:
    """Judge the interpreter's version."""
    if version < _OLDEST_PYTHON:
        return warning("Python", text, fix="Use Python 3.11 or newer.")
    return good("Python", text)


def system_finding(system: str, release: str) -> Finding:
    """Judge the operating system."""
    text = f"{system} {release}"
    if system != "Linux":
        return warning("system", text, fix="Use Linux: nothing else is tested.")
    if "microsoft" in release.lower():
        return warning(
            "system",
            f"{text} (WSL), which limits page-locked memory to a part of what Windows has",
            fix="Use Linux itself if the base cannot be page-locked.",
        )
    return good("system", text)


def memory_finding(available: int | None, total: int | None, headroom: int | None) -> Finding:
    """Judge host memory, where the frozen base stands.

    Args:
        available: bytes that the system can give.
        total: bytes that there are.
        headroom: bytes that the container may still use; None for no limit.
    """
    if available is None or not total:
        return not_measured(
            "host memory", "/proc/meminfo cannot be read", fix="Run on Linux, with /proc mounted."
        )
    limited = headroom is not None and headroom < available
    usable = headroom if headroom is not None and limited else available
    text = f"{usable / 1e9:.1f} GB of {total / 1e9:.1f} GB free"
    text += " under the container's limit" if limited else ""
    text += f": an NF4 base of up to {_billions(usable, _NF4_BYTES)} parameters"
    values = {"available_bytes": usable, "total_bytes": total}
    if usable < _SMALL_MODEL * _NF4_BYTES:
        fix = (
            "Free host memory, or give the container more: the whole base stands there. Or leave "
            "its layers on disk: poros.load(..., host='mmap')."
        )
        return warning("host memory", text, fix=fix, **values)
    return good("host memory", text, **values)


def disk_finding(cache: Path) -> Finding:
    """Judge the disk that checkpoints are downloaded to."""
    free = machine.free_disk(cache)
    if free is None:
        return not_measured(
            "disk", f"{cache} cannot be asked", fix="Set HF_HOME to a folder on a local disk."
        )
    text = (
        f"{free / 1e9:.0f} GB free at {cache}: a BF16 checkpoint of up to "
        f"{_billions(free, _BF16_BYTES)} parameters"
    )
    if free < _SMALL_MODEL * _BF16_BYTES:
        fix = "Free disk space, or set HF_HOME to a folder on a larger disk."
        return warning("disk", text, fix=fix, free_bytes=free)
    return good("disk", text, free_bytes=free)


def page_lock_finding(limit: int | None, *, locked: int | None, refused: str | None) -> Finding:
    """Judge how much memory may be page-locked.

    Args:
        limit: what ``ulimit -l`` says, in bytes; None for no limit.
        locked: bytes that were page-locked for the device as a test; None if that was not tried.
        refused: why that failed, or None.
    """
    name = "page-lock limit"
    said = "none" if limit is None else f"{limit / 1e6:.1f} MB (ulimit -l)"
    fix = (
        "Raise it: `ulimit -l unlimited`, `memlock` in /etc/security/limits.conf, or "
        "`docker run --ulimit memlock=-1`. Or load with poros.load(..., host='pageable')."
    )
    if refused is not None:
        return warning(name, f"{said}; page-locking failed: {refused}", fix=fix, limit_bytes=limit)
    if limit is None:
        return good(name, said, limit_bytes=None)
    if locked is not None and locked > limit:
        text = f"{said}, which this driver is not bound by: {locked / 1e6:.0f} MB were page-locked"
        return good(name, text, limit_bytes=limit)
    text = f"{said}; whether the driver is bound by it shows only where torch has a GPU"
    return warning(name, text, fix=fix, limit_bytes=limit)


def _billions(nbytes: float, per_parameter: float) -> str:
    return f"{nbytes / per_parameter / 1e9:.0f} billion"
