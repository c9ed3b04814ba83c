"""What a profiler's trace says of a step: who was busy, and where kernels waited for a copy.

[Note: Stalls]
A stall is time in which no kernel ran and a copy to the device did: the compute stream had nothing
to do but wait for it, or for the host. It counts for the block of the first kernel after it, which
is the block whose label covers that kernel's time on the device.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

BLOCK = re.compile(r"^poros (forward|backward) block (.+)$")
ELSEWHERE = "outside blocks"
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch", "cudaMemcpyAsync")
_LEAST_GAP = 2.0
"""Microseconds; what lies between two kernels that follow each other at once is shorter."""

Span = tuple[float, float]


@frozen(kw_only=True)
class Profile:
    """What a trace says.

    Attributes:
        seconds: from the first kernel or copy to the end of the last.
        link_busy: share of that time in which a copy from host to device ran.
        back_busy: the same from device to host.
        gpu_busy: share in which a kernel ran.
        stalled: share in which none did while a copy to the device ran; see [Note: Stalls].
        idle: share in which neither did.
        launches: calls of the host that launch a kernel, a graph or a copy.
        launch_seconds: time that those calls took.
        stall_seconds: by block and direction, for example ``"forward 12"``, in order of first use.
    """

    seconds: float
    link_busy: float
    back_busy: float
    gpu_busy: float
    stalled: float
    idle: float
    launches: int
    launch_seconds: float
    stall_seconds: Mapping[str, float]


def read_profile(events: Iterable[Mapping[str, Any]]) -> Profile | None:
    """Return what the events of a Chrome trace say; None if no kernel ran on a GPU.

    Args:
        events: its ``traceEvents``, with times in microseconds.
    """
    kernels: list[Span] = []
    to_device: list[Span] = []
    to_host: list[Span] = []
    labels: list[tuple[float, float, str]] = []
    launches: list[float] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat", ""), str(event.get("name", ""))
        start = float(event["ts"])
        span = (start, start + float(event.get("dur", 0)))
        if category == "kernel":
            kernels.append(span)
        elif category == "gpu_memcpy" and "HtoD" in name:
            to_device.append(span)
        elif category == "gpu_memcpy" and "DtoH" in name:
            to_host.append(span)
        elif category == "gpu_user_annotation" and (found := BLOCK.match(name)):
            labels.append((*span, f"{found[1]} {found[2]}"))
        elif category in ("cuda_runtime", "cuda_driver") and name.startswith(_LAUNCHES):
            launches.append(float(event.get("dur", 0)))
    if not kernels:
        return None
    everything = [*kernels, *to_device, *to_host]
    whole = (min(start for start, _ in everything), max(end for _, end in everything))
    length = whole[1] - whole[0]
    running, copying = merged(kernels), merged(to_device)
    gaps = [gap for gap in between(running, whole) if gap[1] - gap[0] >= _LEAST_GAP]
    stalls = [(gap, overlap(gap, copying)) for gap in gaps]
    stalled = sum(taken for _, taken in stalls)
    busy = total(running)
    return Profile(
        seconds=length / 1e6,
        link_busy=total(copying) / length,
        back_busy=total(merged(to_host)) / length,
        gpu_busy=busy / length,
        stalled=stalled / length,
        idle=max(0.0, (length - busy - stalled) / length),
        launches=len(launches),
        launch_seconds=sum(launches) / 1e6,
        stall_seconds=_by_block(stalls, sorted(labels)),
    )


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the union of spans as spans that do not touch, in order."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def total(spans: Sequence[Span]) -> float:
    """Return the length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def between(union: Sequence[Span], whole: Span) -> list[Span]:
    """Return what is left of ``whole`` without the spans of ``union``."""
    edges = [whole[0], *(edge for span in union for edge in span), whole[1]]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def overlap(span: Span, union: Sequence[Span]) -> float:
    """Return how much of ``span`` the spans of ``union`` cover."""
    first = max(0, bisect.bisect_left(union, (span[0], span[0])) - 1)
    covered = 0.0
    for start, end in union[first:]:
        if start >= span[1]:
            break
        covered += max(0.0, min(end, span[1]) - max(start, span[0]))
    return covered


def _by_block(
    stalls: Sequence[tuple[Span, float]], labels: Sequence[tuple[float, float, str]]
) -> dict[str, float]:
    """Sum the stalls by the label that covers the end of the gap; labels do not overlap."""
    starts = [label[0] for label in labels]
    found: dict[str, float] = {label[2]: 0.0 for label in labels}
    for (_, end), taken in stalls:
        at = bisect.bisect_right(starts, end + _LEAST_GAP) - 1
        inside = at >= 0 and labels[at][1] > end
        name = labels[at][2] if inside else ELSEWHERE
        found[name] = found.get(name, 0.0) + taken / 1e6
    return found
