"""Further steps of a loop under a profiler, and what the host takes to launch one."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import asdict
from torch.profiler import ProfilerActivity, profile
from trace_reading import read_profile

HOST_STEPS = 3


class Steps(Protocol):
    """A loop that can go on."""

    def run(self, steps: int) -> Iterator[None]:
        """Train; yields after each step."""
        ...


def wake_profiler(device: torch.device) -> None:
    """Start the profiler once before any graph is captured, so that it knows the kernels in it."""
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.ones(1, device=device).add_(1)
            torch.cuda.synchronize(device)


def profiled(loop: Steps, steps: int, device: torch.device) -> dict[str, Any]:
    """Run ``HOST_STEPS`` and then ``steps`` more steps of a loop.

    Returns:
        ``host_seconds``, the median time that the host takes to issue a step to an idle device,
        and what ``read_profile`` says of the profiled steps; None for what needs a GPU.
    """
    cuda = device.type == "cuda"
    taken = []
    for _ in range(HOST_STEPS):
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in loop.run(1):
            taken.append(time.perf_counter() - start)
    host = {"host_seconds": statistics.median(taken), "profiled_steps": steps}
    if not cuda:
        return {**host, "trace": None}
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in loop.run(steps):
            pass
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="poros-trace-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = read_profile(events)
    return {**host, "trace": None if found is None else asdict(found)}
