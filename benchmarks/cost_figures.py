"""What the loops have in common: when steps end, what the runtime counted, and the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from cost_work import Work
from device_figures import LINK_BYTES, DeviceMemory, link_rates

import poros
from poros_core.host_store import layout
from poros_core.prepare import prepared_of


class Stopwatch:
    """Times steps without waiting for any; see ``cost_texts.TIME_METHOD``."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note that a step ends here."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the time between marks; waits for the last."""
        pairs = list(pairwise(self._marks))
        if not self._cuda:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def totals(model: Any) -> dict[str, int]:
    """Return the runtime's running totals; empty for a model that Poros does not touch."""
    prepared = prepared_of(model)
    return {} if prepared is None else dict(prepared.handle.counters())


def adamw(work: Work, model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer of every method, and the handle of its state on the host, or None."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
    if work.optimizer_state != "host":
        return optimizer, None
    return optimizer, poros.offload_optimizer(optimizer)


@contextmanager
def the_loss(work: Work, model: Any) -> Iterator[None]:
    """Train with the loss that was asked for."""
    if work.chunk is None:
        yield
        return
    with poros.chunked_loss(model, chunk=work.chunk):
        yield


def figures_of(
    work: Work,
    model: Any,
    *,
    seconds: Sequence[float],
    first: Mapping[str, int],
    last: Mapping[str, int],
    host_state: Any,
    memory: DeviceMemory,
    device: torch.device,
) -> dict[str, Any]:
    """Return the figures of a record, once the steps are done.

    Args:
        work: what was measured.
        model: the model as it was trained.
        seconds: of each timed step.
        first: the runtime's totals when the first timed step started.
        last: the same when the last one ended.
        host_state: the handle of optimizer state on the host, or None.
        memory: followed the device's memory since before the first step.
        device: the compute device.
    """
    cuda = device.type == "cuda"
    memory.look()
    peaks = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_device_bytes": memory.peak,
        "peak_device_bound_bytes": memory.bound(),
        "allocated_between_steps_bytes": torch.cuda.memory_allocated() if cuda else None,
    }
    rise = {name: last[name] - first[name] for name in first}
    brought_in = 0 if host_state is None else host_state.nbytes
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)  # the link is measured beside the card
    return {
        **peaks,
        "step_seconds": {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
        },
        "step_seconds_mean": statistics.fmean(seconds),
        "step_seconds_all": [round(taken, 6) for taken in seconds],
        "bytes_streamed_per_step": round(rise.get("bytes_streamed", 0) / work.steps + brought_in),
        "optimizer_bytes_per_step": brought_in,
        "activation_bytes_per_step": round(rise.get("activation_bytes", 0) / work.steps),
        "link": link_rates(device, [LINK_BYTES, *_unit_bytes(model)]) if cuda else None,
        "resident_units": last.get("resident_units", 0),
        "graph_replays": rise.get("graph_replays", 0),
        "eager_blocks": rise.get("eager_blocks", 0),
    }


def _unit_bytes(model: Any) -> list[int]:
    """Return the size of the largest layer's unit in the host store, if the model streams."""
    prepared = prepared_of(model)
    if prepared is None:
        return []
    return [max(layout(unit.refs)[1] for unit in prepared.plan.layers)]
