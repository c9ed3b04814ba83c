"""The record of a soak: memory between its phases and whether it grew, and what else was found."""

from __future__ import annotations

import datetime
import gc
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from poros_core.gate.arms import CLIP, LEARNING_RATE
from poros_core.gate.stack import stack_of
from poros_core.host_memory import HostBuffer
from poros_core.workspaces import drop_workspaces

if TYPE_CHECKING:
    from soak import Soak

_MIB = 1 << 20

FIXED = {
    "device_allocated_bytes": 2 * _MIB,
    "live_tensor_bytes": 16 << 10,
    "host_buffer_bytes": 0,
    "locked_bytes": 16 * _MIB,
}
"""What may be more, unprepared, than after the first phase: nothing of a phase is left then."""
SETTLING = {
    "device_used_bytes": 256 * _MIB,
    "pinned_bytes": 16 * _MIB,
    "rss_bytes": 256 * _MIB,
}
"""What may be more than in the first round of all ways: drivers and allocators keep some memory
that was used once. On a CPU, where little is in use, ``rss_bytes`` may be 32 MiB more."""
PREPARED = {
    "device_allocated_bytes": 64 * _MIB,
    "live_tensor_bytes": 1 * _MIB,
    "host_buffer_bytes": 64 * _MIB,
}
"""What may be more than after the first phase of the same way: buffers and host memory follow the
order of the lengths. Nothing of it lasts; see ``FIXED``."""

MEMORY_METHOD = (
    "After gc and emptying the allocator's cache. unprepared: after each phase, when the base is "
    "on the device again; device_allocated, live_tensor, host_buffer and locked against the first "
    "phase, the rest against the highest of the first round. prepared: before that, against the "
    "first phase with the same settings. device_used: the whole GPU's, by the driver. pinned: by "
    "torch's host allocator. host_buffer: Poros' own host memory, page-locked on CUDA. locked: "
    "VmLck and VmPin. live_tensor: storages of all tensors that Python holds, on a CPU."
)


def levels(device: torch.device) -> dict[str, int]:
    """Return the bytes in use now, between two steps."""
    gc.collect()
    status = _status()
    buffers, tensors = _alive()
    found = {
        "host_buffer_bytes": sum(buffer.nbytes for buffer in buffers),
        "locked_bytes": status["VmLck"] + status["VmPin"],
        "rss_bytes": status["VmRSS"],
    }
    if device.type != "cuda":
        storages = [t.untyped_storage() for t in tensors]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return {"live_tensor_bytes": sum(sizes.values()), **found}
    torch.cuda.synchronize(device)
    drop_workspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return {
        "device_allocated_bytes": torch.cuda.memory_allocated(device),
        "device_used_bytes": total - free,
        "pinned_bytes": int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)),
        **found,
    }


def _alive() -> tuple[list[HostBuffer], list[torch.Tensor]]:
    """Return Poros' host memory and the host's tensors, as far as Python holds them."""
    buffers, tensors = [], []
    for found in gc.get_objects():
        kind = type(found)
        if kind is HostBuffer:
            buffers.append(found)
        elif issubclass(kind, torch.Tensor) and found.device.type == "cpu":
            tensors.append(found)
    return buffers, tensors


def _status() -> dict[str, int]:
    """Return what the kernel says of this process (proc_pid_status(5)), in bytes."""
    found = dict.fromkeys(("VmLck", "VmPin", "VmRSS"), 0)
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found


def growth(
    unprepared: Sequence[Mapping[str, int]],
    prepared: Mapping[int, Sequence[Mapping[str, int]]],
    *,
    first_round: int,
) -> dict[str, Any]:
    """Return the series of each kind of memory, and whether it grew.

    Args:
        unprepared: levels after each phase.
        prepared: by way, levels at the end of each of its phases.
        first_round: how many phases have each way once.
    """
    found: dict[str, Any] = {"unprepared": {}, "prepared": {}}
    on_cpu = any("live_tensor_bytes" in level for level in unprepared)
    for name in unprepared[0] if unprepared else ():
        values = [level[name] for level in unprepared]
        if name in FIXED:
            series = _series(values, base=values[0], more=FIXED[name])
        else:
            more = 32 * _MIB if on_cpu and name == "rss_bytes" else SETTLING[name]
            series = _series(values, base=max(values[:first_round]), more=more)
        found["unprepared"][name] = series
    for way, phases in sorted(prepared.items()):
        found["prepared"][str(way)] = {
            name: _series(values, base=values[0], more=PREPARED[name])
            for name in phases[0]
            if name in PREPARED and (values := [level[name] for level in phases])
        }
    return found


def _series(values: Sequence[int], *, base: int, more: int) -> dict[str, Any]:
    return {
        "first": values[0],
        "highest": max(values),
        "last": values[-1],
        "limit": base + more,
        "grew": max(values) > base + more,
    }


def grown(memory: Mapping[str, Any]) -> list[str]:
    """Return what grew, in words."""
    ways = {"unprepared": memory["unprepared"]}
    ways |= {f"prepared, way {way}": found for way, found in memory["prepared"].items()}
    return [
        f"{where}: {name} rose from {series['first']} to {series['highest']}, and {series['limit']}"
        " is the limit"
        for where, found in ways.items()
        for name, series in found.items()
        if series["grew"]
    ]


def record_of(soak: Soak, *, command: str, seconds: float) -> dict[str, Any]:
    """Return the record of a run."""
    memory = growth(soak.unprepared, soak.prepared, first_round=len(soak.ways))
    found = soak.comparison.first
    medians = {
        name: statistics.median(clock.seconds) if clock.seconds else None
        for name, clock in soak.clocks.items()
    }
    return {
        "kind": "soak",
        "verdict": verdict_of(soak, grown(memory)),
        "family": soak.subject.family.name,
        "shape": soak.subject.shape,
        "layers": {"trained": soak.subject.depth, "of": soak.subject.whole},
        "precision": "nf4",
        "rank": soak.subject.rank,
        "dropout": soak.dropout,
        "batch": soak.subject.batch,
        "seed": soak.options.seed,
        "optimizer": "AdamW",
        "learning_rate": LEARNING_RATE,
        "clip": CLIP,
        "steps": soak.options.steps,
        "steps_compared": soak.comparison.steps,
        "phase_steps": soak.options.phase,
        "exception_every": soak.options.exception_every,
        "divergence": None if found is None else attrs.asdict(found),
        "grew": grown(memory),
        "error": soak.error,
        "planted_fault": None if soak.fault is None else attrs.asdict(soak.fault),
        "last_loss": soak.loss,
        "step_seconds": medians,
        "seconds": round(seconds, 1),
        "exceptions": soak.exceptions,
        "phases": soak.phases,
        "memory": memory,
        "memory_how": MEMORY_METHOD,
        "command": command,
        "stack": stack_of(soak.resident.device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def verdict_of(soak: Soak, grew: Sequence[str]) -> str:
    """Return ``"exact"``, or what is wrong."""
    if soak.error is not None:
        return "failed"
    if soak.comparison.divergences:
        return "diverged"
    if not soak.finished:
        return "unfinished"
    if grew:
        return "grew"
    if soak.fault is not None or not all(p["streamed"]["bytes_streamed"] for p in soak.phases):
        return "void"  # a fault did not show, or a phase streamed nothing
    return "exact"


def row(phase: Mapping[str, Any]) -> str:
    """Return one phase as a line of text."""
    counts = phase["streamed"]
    blocks = counts["graph_replays"] + counts["eager_blocks"]
    budget = phase["vram_budget"]
    size = "" if budget is None else f" {budget / 1e9:.3f} GB"
    first, last = phase["steps"]
    memory = phase["memory"]["unprepared"]
    device = memory.get("device_allocated_bytes", memory.get("live_tensor_bytes", 0))
    cells = (
        f"{first}-{last}".ljust(9),
        str(phase["number"]).rjust(3),
        f"{phase['budget']}{size}".ljust(15),
        f"block {phase['block_size']}",
        f"state on {phase['optimizer_state']}".ljust(15),
        ("activations on host" if phase["offload_activations"] else "").ljust(19),
        ("ahead" if phase["copy_ahead"] else "").ljust(5),
        f"resident {counts['resident_units']}".ljust(11),
        f"streamed {counts['bytes_streamed'] / 1e9:.3f} GB",
        f"graphs {counts['graph_replays'] / max(1, blocks):.0%}".rjust(11),
        f"left {device / 1e9:.4f} GB",
        f"{phase['seconds']:.1f} s",
    )
    return "  ".join(cells)


def summary(record: Mapping[str, Any]) -> str:
    """Return what a run found as text."""
    lines = [
        f"before step {found['step']}: {found['type']}, {found['place']}, micro-batch "
        f"{found['micro_batch']} of {found['micro_batches']}"
        for found in record["exceptions"]
    ]
    for name, series in record["memory"]["unprepared"].items():
        values = (series[key] / 1e6 for key in ("first", "highest", "last", "limit"))
        lines.append(
            "unprepared {}: first {:.2f}, highest {:.2f}, last {:.2f}, limit {:.2f} MB".format(
                name.removesuffix("_bytes"), *values
            )
        )
    lines += record["grew"]
    if record["divergence"] is not None:
        lines.append(f"first divergence: {record['divergence']}")
    if record["error"] is not None:
        lines.append(record["error"].splitlines()[-1])
    lines.append(
        f"{record['verdict']}: {record['steps_compared']} of {record['steps']} steps compared, "
        f"{len(record['exceptions'])} exceptions, {record['seconds']:.0f} s"
    )
    return "\n".join(lines)
