"""Live figures of a prepared model: what its steps cost, without waiting for the device."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import frozen
from torch import nn

from poros_core.errors import PrepareError
from poros_core.prepare import prepared_of

__all__ = ["RECENT", "Stats", "StepClock", "Timed", "stats", "tokens_in"]

RECENT = 32
"""Steps that figures are taken over: the last ones, or all if there were fewer."""


@frozen(kw_only=True)
class Stats:
    """What the steps of a prepared model cost.

    A step runs from the start of one forward with gradients to the start of the next, so it has
    in it whatever the loop does in between; with gradient accumulation it is one micro-batch, and
    with ``poros.accumulate`` all that one call takes.
    Figures per step are medians over the last ``RECENT`` steps, which an evaluation now and then
    does not move. None means that nothing is known: no step is complete, or there is no such
    thing here.

    Attributes:
        steps: steps completed since the model was prepared.
        step_seconds: time of a step, by the host's clock. Nothing waits for the device, so it is
            the device's time as soon as the loop, or a full launch queue, does.
        tokens_per_second: tokens of a step's batch, padding included, over its time.
        bytes_streamed_per_step: bytes that a step copied to the device.
        link_gb_per_second: those bytes over the whole step's time, in 1e9 bytes: what the link
            carried, not what it could.
        stalled_share: share of the last steps in which kernels waited for a copy to arrive, by
            events around each such wait; None on a CPU.
        peak_bytes: highest that the allocator held on the device since its peak was last reset,
            by anything in this process; None on a CPU.
        resident_units: units that stay on the device.
        graph_share: share of the last steps' blocks that replayed a graph, forward and backward.
    """

    steps: int
    step_seconds: float | None
    tokens_per_second: float | None
    bytes_streamed_per_step: int | None
    link_gb_per_second: float | None
    stalled_share: float | None
    peak_bytes: int | None
    resident_units: int
    graph_share: float | None


def stats(model: nn.Module) -> Stats:
    """Return the live figures of a prepared model.

    Cheap enough to ask at every step: a step notes a time and some totals when its forward starts,
    and neither that nor asking waits for the device.

    Args:
        model: the object that was given to ``prepare``.

    Raises:
        PrepareError: it is not prepared.
    """
    prepared = prepared_of(model)
    if prepared is None:
        raise PrepareError(
            "This model is not prepared, so there is nothing to tell of it. Pass the object that "
            "poros.prepare() was given."
        )
    handle, device = prepared.handle, prepared.plan.device
    clock = handle.clock if isinstance(handle, Timed) else StepClock()
    recent = clock.recent()
    return Stats(
        steps=clock.steps,
        step_seconds=_median([step.seconds for step in recent]),
        tokens_per_second=_median([step.tokens / step.seconds for step in recent]),
        bytes_streamed_per_step=(
            statistics.median_low([step.nbytes for step in recent]) if recent else None
        ),
        link_gb_per_second=_median([step.nbytes / step.seconds / 1e9 for step in recent]),
        stalled_share=_stalled_share(recent),
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        resident_units=handle.counters()["resident_units"],
        graph_share=_graph_share(recent),
    )


@runtime_checkable
class Timed(Protocol):
    """A runtime's handle that notes when steps start."""

    @property
    def clock(self) -> StepClock:
        """Marked at the start of every forward with gradients."""
        ...


@frozen
class _Mark:
    """The start of a step: when, its batch, and how the runtime's totals stood."""

    seconds: float
    tokens: int
    nbytes: int
    replayed: int
    eager: int
    stalled: float | None


@frozen(kw_only=True)
class _Step:
    """One complete step: what it took, and by how much the runtime's totals rose."""

    seconds: float
    tokens: int
    nbytes: int
    replayed: int
    eager: int
    stalled: float | None


class StepClock:
    """Notes when steps start, and the runtime's totals at that moment."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = 0
        self._marks: deque[_Mark] = deque(maxlen=RECENT + 1)

    @property
    def steps(self) -> int:
        """Steps that are complete: the next one has started."""
        return max(0, self._started - 1)

    def mark(
        self, counters: Mapping[str, int], *, tokens: int, stalled: float | None = None
    ) -> None:
        """Note that a step starts.

        Args:
            counters: the runtime's running totals; see ``RuntimeHandle.counters``.
            tokens: of the step's batch.
            stalled: seconds that kernels waited for copies so far; None if that is not known.
        """
        self._started += 1
        self._marks.append(
            _Mark(
                self._now(),
                tokens,
                counters["bytes_streamed"],
                counters["graph_replays"],
                counters["eager_blocks"],
                stalled,
            )
        )

    def recent(self) -> Sequence[_Step]:
        """Return the last complete steps, ``RECENT`` at most."""
        return [
            _Step(
                seconds=max(end.seconds - start.seconds, 1e-9),
                tokens=start.tokens,
                nbytes=end.nbytes - start.nbytes,
                replayed=end.replayed - start.replayed,
                eager=end.eager - start.eager,
                stalled=_rise(start.stalled, end.stalled),
            )
            for start, end in pairwise(self._marks)
        ]


def tokens_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens a decoder is called with, padding included."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    embedded = kwargs.get("inputs_embeds")
    return embedded.shape[:-1].numel() if isinstance(embedded, torch.Tensor) else 0


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _rise(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _stalled_share(recent: Sequence[_Step]) -> float | None:
    known = [(step.stalled, step.seconds) for step in recent if step.stalled is not None]
    if not known:
        return None
    return sum(stalled for stalled, _ in known) / sum(seconds for _, seconds in known)


def _graph_share(recent: Sequence[_Step]) -> float | None:
    replayed = sum(step.replayed for step in recent)
    blocks = replayed + sum(step.eager for step in recent)
    return replayed / blocks if blocks else None
