"""CUDA streams beside the one that computes.

[Note: Streams from the driver]
The first stream that torch makes brings its whole pool into being, 32 streams of each priority,
and the driver keeps device memory for every one. Here the driver makes the few that are needed.
They are never destroyed, since the allocator knows its memory by their handles; one that is not
used any more goes to whoever asks next.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch

__all__ = ["own_stream"]

_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING`` (CUDA driver API, stream management): not ordered against the legacy
default stream, as no stream of torch's pool is."""

_lock = threading.Lock()
_idle: dict[int, list[Any]] = {}


def own_stream(owner: object, device: torch.device) -> Any:
    """Return a stream that nobody else is given while ``owner`` lives; it comes after everything
    that is issued so far on the stream that is current.

    Args:
        owner: what uses the stream.
        device: a CUDA device.

    Raises:
        RuntimeError: the driver makes no stream.
    """
    current = torch.cuda.current_stream(device)
    issued = current.record_event()  # it also makes the device's context that of this thread
    with _lock:
        idle = _idle.setdefault(current.device_index, [])
        stream = idle.pop() if idle else _made(device)
    weakref.finalize(owner, idle.append, stream).atexit = False
    stream.wait_event(issued)
    return stream


def _made(device: torch.device) -> Any:
    cuda: Any = torch.cuda
    if torch.version.cuda is None:  # another driver
        return cuda.Stream(device)
    handle = ctypes.c_void_p()
    with cuda.device(device):
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if status:
        raise RuntimeError(f"The CUDA driver could not make a stream: cuStreamCreate said {status}")
    return cuda.ExternalStream(handle.value, device)
