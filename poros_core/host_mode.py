"""Where the layers of a base stand on the host, and what each way costs.

``pinned``: page-locked memory, read by the device in place; the fastest. ``pageable``: ordinary
memory, and ``mmap``: files of the packed cache, both copied through a ring of page-locked buffers;
see [Note: Staged units] in ``host_store``. Head, embeddings and the ring are page-locked always.
"""

from __future__ import annotations

import resource
from typing import Literal, cast, get_args

import torch
from attrs import frozen

from poros_core import machine
from poros_core.errors import PrepareError, SettingsError
from poros_core.host_memory import HostBuffer
from poros_core.ring import SLOTS

__all__ = ["HostChoice", "HostMode", "Limits", "choose_host", "named_mode", "read_limits"]

HostMode = Literal["pinned", "pageable", "mmap"]

_MODES = ("auto", *get_args(HostMode))
_PROBE = 1 << 20
"""Bytes that are page-locked to find out whether the driver keeps to a limit."""


@frozen(kw_only=True)
class Limits:
    """What this process may use, in bytes; None for what has no limit or is not known.

    Attributes:
        total: memory of the machine.
        container: what the process's control group leaves it.
        locked: what may be page-locked.
    """

    total: int | None
    container: int | None
    locked: int | None


@frozen(kw_only=True)
class HostChoice:
    """A way, why it was chosen, and what it costs.

    Attributes:
        mode: where layers stand.
        reason: why, in one clause.
        cost: what it costs, in one clause.
    """

    mode: HostMode
    reason: str
    cost: str


def named_mode(host: str) -> HostMode | Literal["auto"]:
    """Return ``host`` if it is a way.

    Raises:
        SettingsError: it is none.
    """
    if host not in _MODES:
        raise SettingsError(f"host must be one of {', '.join(_MODES)}; got {host!r}.")
    return cast(HostMode, host)


def read_limits(device: torch.device, *, wanted: int) -> Limits:
    """Return the limits of this process. On CUDA a limit of ``ulimit -l`` is tried, because most
    drivers are not bound by it.

    Args:
        device: the compute device.
        wanted: bytes that are to be page-locked.
    """
    locked = machine.page_lock_limit() if device.type == "cuda" else None
    if locked is not None and wanted > locked and _locks_beyond(device):
        locked = None
    return Limits(
        total=machine.total_memory(), container=machine.container_headroom(), locked=locked
    )


def choose_host(
    host: HostMode | Literal["auto"], *, layers: int, rest: int, largest: int, limits: Limits
) -> HostChoice:
    """Return where the layers go.

    Args:
        host: what was asked for.
        layers: bytes of all layers.
        rest: bytes of head and embeddings, which are page-locked always.
        largest: bytes of the largest layer.
        limits: what the process may use.

    Raises:
        PrepareError: not even head, embeddings and the ring fit into what may be page-locked.
    """
    mode, reason = ("pinned", "nothing limits it") if host == "auto" else (host, "asked for")
    if host == "auto" and limits.locked is not None and layers + rest > limits.locked:
        mode = "pageable"
        reason = f"{limits.locked / 1e9:.2f} GB may be page-locked (ulimit -l)"
    room = min((x for x in (limits.total, limits.container) if x is not None), default=None)
    if host == "auto" and room is not None and layers + rest > room:
        mode = "mmap"
        reason = f"{room / 1e9:.2f} GB of host memory may be used"
    ring = SLOTS * largest
    if mode != "pinned" and limits.locked is not None and rest + ring > limits.locked:
        raise PrepareError(
            f"{(rest + ring) / 1e9:.2f} GB must be page-locked for head, embeddings and the ring "
            f"that layers are copied through, and {limits.locked / 1e9:.2f} GB may be. Raise the "
            "limit that `ulimit -l` shows."
        )
    return HostChoice(mode=cast(HostMode, mode), reason=reason, cost=_cost(mode, layers, ring))


def _cost(mode: str, layers: int, ring: int) -> str:
    if mode == "pinned":
        return "none"
    through = f"every copy passes a ring of {ring / 1e9:.2f} GB page-locked memory"
    if mode == "pageable":
        return f"{through}, one more pass of the host over {layers / 1e9:.2f} GB twice a step"
    return (
        f"{through}, and what host memory cannot hold is read from disk again: up to twice "
        f"{layers / 1e9:.2f} GB a step"
    )


def _locks_beyond(device: torch.device) -> bool:
    """Say whether the driver page-locks more than ``ulimit -l`` allows: a little is tried while
    nothing is allowed, because trying as much as the limit would take as long as a load."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    try:
        HostBuffer(_PROBE, device=device)
    except PrepareError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    return True
