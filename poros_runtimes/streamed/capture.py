"""Capturing work as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

__all__ = ["Capturer", "CudaCapturer", "Replayable"]


class Replayable(Protocol):
    """Something captured that can be run again."""

    def replay(self) -> None:
        """Run the captured kernels on the current stream."""
        ...


class Capturer(Protocol):
    """Turns work into something that can be replayed."""

    def capture(self, body: Callable[[], None]) -> Replayable:
        """Capture what ``body`` launches, without running it.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        ...


class CudaCapturer:
    """Captures CUDA graphs, all in one pool; see [Note: Graphs and memory]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], None]) -> Replayable:
        """Capture on a stream of its own; see ``Capturer``.

        Only this thread is watched for calls that a capture forbids, so a data loader's threads
        may go on pinning memory. The collector waits: freeing a CUDA object would break it.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    body()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            current.wait_stream(self._stream)
            if collecting:
                gc.enable()
        return graph
