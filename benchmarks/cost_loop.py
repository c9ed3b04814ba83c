"""The loop that training's cost is measured on, and what is measured."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cost_models import Refused, build, compute_device
from cost_work import Work
from device_figures import LINK_BYTES, DeviceMemory, cap_memory, link_rates, used_before

import poros
from poros_core.gate.stack import stack_of
from poros_core.host_store import layout
from poros_core.prepare import prepared_of

LOOP = (
    "outputs = model(**batch); outputs.loss.backward(); optimizer.step(); "
    "optimizer.zero_grad(set_to_none=True); outputs is held; batches stand on the device and have "
    "input_ids and labels; AdamW, fused; no deterministic kernels"
)
TIME_METHOD = (
    "step_seconds: on CUDA the time between events on the compute stream after each step, without "
    "a wait in between, as the loop has none; on a CPU the host's clock."
)


def _batches(work: Work, device: torch.device) -> list[dict[str, torch.Tensor]]:
    subject = work.subject()
    generator = torch.Generator().manual_seed(work.seed)
    shape = (subject.batch, subject.seq_len)
    made = []
    for _ in range(work.warmup + work.steps):
        ids = torch.randint(3, subject.vocabulary, shape, generator=generator).to(device)
        made.append({"input_ids": ids, "labels": ids})
    return made


class _Stopwatch:
    """Times steps without waiting for any; see ``TIME_METHOD``."""

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


class Loop:
    """The plain training loop of one model."""

    def __init__(self, work: Work, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.watch = _Stopwatch(device)
        self.losses: list[torch.Tensor] = []
        self._batches = iter(_batches(work, device))
        trained = [param for param in model.parameters() if param.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
        self._host_state = (
            poros.offload_optimizer(self._optimizer) if work.optimizer_state == "host" else None
        )
        torch.manual_seed(work.seed + 1)

    def run(self, steps: int) -> Iterator[None]:
        """Train; yields after each step, at its mark."""
        model, optimizer = self.model, self._optimizer
        for _ in range(steps):
            batch = next(self._batches)
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.watch.mark()
            self.losses.append(outputs.loss.detach())
            yield  # ``outputs`` is held until the next forward has returned, as in a plain loop

    def totals(self) -> dict[str, int]:
        """Return the runtime's running totals; empty for a model that Poros does not touch."""
        prepared = prepared_of(self.model)
        return {} if prepared is None else dict(prepared.handle.counters())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state that each step brings in."""
        return 0 if self._host_state is None else self._host_state.nbytes

    def unit_bytes(self) -> int | None:
        """Return the size of the largest layer's unit in the host store, or None."""
        prepared = prepared_of(self.model)
        if prepared is None:
            return None
        return max(layout(unit.refs)[1] for unit in prepared.plan.layers)


def measure(work: Work, path: Path | None) -> dict[str, Any]:
    """Build the model of ``work``, train it, and return what that cost.

    Raises:
        Refused: the method cannot train this.
        torch.OutOfMemoryError: it does not fit.
    """
    device = compute_device()
    cuda = device.type == "cuda"
    before = used_before(device)
    memory = DeviceMemory(device)
    memory.restart()
    cap = None
    if cuda and work.cap_bytes is not None:
        cap = cap_memory(device, cap=work.cap_bytes, reserve=work.cap_reserve_bytes)
    start = time.perf_counter()
    with memory.watching():
        model = build(work, path, device)
    built = time.perf_counter() - start
    memory.look()
    build_peak, build_allocated = memory.peak, _allocated_peak(cuda)
    _clear(cuda)
    memory.restart()
    return {
        **_train(work, model, device, memory),
        "device_bytes_before": before,
        "driver_sampled": memory.sampled,
        "build_seconds": built,
        "build_peak_device_bytes": build_peak,
        "build_peak_allocated_bytes": build_allocated,
        "card": cap,
        "stack": stack_of(device),
    }


def _train(work: Work, model: Any, device: torch.device, memory: DeviceMemory) -> dict[str, Any]:
    cuda = device.type == "cuda"
    with _loss(work, model):
        loop = Loop(work, model, device)
        with memory.watching():
            for _ in loop.run(work.warmup - 1):
                memory.look()
        for _ in loop.run(1):  # the last one's mark starts the first timed step
            pass
        first = loop.totals()
        begin = len(loop.losses) - 1
        for _ in loop.run(work.steps):
            pass
        last = loop.totals()
        seconds = loop.watch.seconds()[begin:]
    memory.look()
    peaks = {
        "peak_allocated_bytes": _allocated_peak(cuda),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_device_bytes": memory.peak,
        "allocated_between_steps_bytes": torch.cuda.memory_allocated() if cuda else None,
    }
    rise = {name: last[name] - first[name] for name in first}
    streamed = rise.get("bytes_streamed", 0) / work.steps + loop.optimizer_bytes
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)  # the link is measured beside the card
    sizes = [LINK_BYTES, *([] if (unit := loop.unit_bytes()) is None else [unit])]
    losses = [loss.item() for loss in loop.losses]
    return {
        **peaks,
        "step_seconds": {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
        },
        "step_seconds_all": [round(taken, 6) for taken in seconds],
        "bytes_streamed_per_step": round(streamed),
        "optimizer_bytes_per_step": loop.optimizer_bytes,
        "link": link_rates(device, sizes) if cuda else None,
        "resident_units": last.get("resident_units", 0),
        "graph_replays": rise.get("graph_replays", 0),
        "eager_blocks": rise.get("eager_blocks", 0),
        "losses": losses,
    }


@contextmanager
def _loss(work: Work, model: Any) -> Iterator[None]:
    """Train with the loss that was asked for."""
    if work.chunk is None:
        yield
        return
    with poros.chunked_loss(model, chunk=work.chunk):
        yield


def _allocated_peak(cuda: bool) -> int | None:
    return torch.cuda.max_memory_allocated() if cuda else None


def _clear(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def outcome(work: Work, path: Path | None) -> dict[str, Any]:
    """Measure, and say how it went: trained, refused, or out of memory."""
    try:
        return {"outcome": "trained", "error": None, **measure(work, path)}
    except (Refused, poros.PorosError) as error:
        found = {"outcome": "refused", "error": str(error)}
    except torch.OutOfMemoryError as error:
        found = {"outcome": "out of memory", "error": str(error).splitlines()[0]}
    return {**found, "stack": stack_of(compute_device())}
