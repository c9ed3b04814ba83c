"""The record of a gate: what ran, what was compared, and what can be said of it."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from attrs import field, frozen

from poros_core.gate.arms import CLIP, LEARNING_RATE, Arm
from poros_core.gate.compare import SURFACES, Comparison, Divergence
from poros_core.gate.fault import PlantedFault
from poros_core.gate.meter import METHOD
from poros_core.gate.options import GateOptions, Subject
from poros_core.gate.stack import stack_of
from poros_core.status import PARITY

__all__ = ["EXIT_STATUS", "Evidence", "GateResult", "make_record"]

EXIT_STATUS = {"exact": 0, "diverged": 1, "void": 2, "not-deterministic": 3}
"""What ``poros gate`` exits with, by verdict."""


@frozen(kw_only=True)
class Evidence:
    """What proves that the streamed arm streamed and trained.

    Attributes:
        counters: per step, how much the runtime's totals rose.
        resident_units: units that stayed on the device.
        least_bytes: bytes that a step streams at least, as the plan implies.
        untrained: adapter tensors without a usable gradient, or that ended as they started.
    """

    counters: Sequence[Mapping[str, int]]
    resident_units: int
    least_bytes: int
    untrained: Sequence[str]

    def problems(self) -> list[str]:
        """Return why a verdict would be void; empty if it stands."""
        found = []
        streamed = min((step["bytes_streamed"] for step in self.counters), default=0)
        if streamed < self.least_bytes or streamed == 0:
            found.append(
                f"a step streamed {streamed} bytes, and streaming every layer takes at least "
                f"{self.least_bytes}"
            )
        if self.resident_units:
            found.append(f"{self.resident_units} units stayed on the device without a budget")
        if self.untrained:
            found.append(
                f"{len(self.untrained)} adapter tensors had no finite non-zero gradient in any "
                f"step, or ended as they started (first: {self.untrained[0]})"
            )
        return found


@frozen(kw_only=True)
class GateResult:
    """How a gate ended.

    Attributes:
        verdict: ``"exact"``, ``"diverged"``, ``"void"`` or ``"not-deterministic"``.
        divergence: the first divergence, of the streamed arm or of the control.
        void_reasons: why the verdict is void.
        fault: what was planted.
        record: the whole record.
    """

    verdict: str
    divergence: Divergence | None
    void_reasons: Sequence[str]
    fault: PlantedFault | None
    record: Mapping[str, Any] = field(repr=False)

    @property
    def exit_status(self) -> int:
        """What the command line exits with."""
        return EXIT_STATUS[self.verdict]


def make_record(
    *,
    options: GateOptions,
    subject: Subject,
    arms: Mapping[str, Arm],
    control: Comparison,
    streamed: Comparison,
    evidence: Evidence,
    fault: PlantedFault | None,
    command: str,
) -> GateResult:
    """Judge a run, and make its record."""
    void_reasons = evidence.problems()
    if fault is not None and not streamed.divergences:
        void_reasons.append(
            f"a fault was planted in {fault.tensor} and nothing diverged, so the gate cannot fail"
        )
    host_bytes = arms["streamed"].host_state_bytes
    if options.optimizer_state == "host" and host_bytes == 0:
        void_reasons.append("no optimizer state stood on the host, which was asked for")
    if control.divergences:
        verdict, divergence = "not-deterministic", control.first
    elif streamed.divergences:
        verdict, divergence = "diverged", streamed.first
    else:
        verdict, divergence = ("void" if void_reasons else "exact"), None
    void_reasons = void_reasons if verdict == "void" else []
    record: dict[str, Any] = {
        "kind": PARITY,
        "verdict": verdict,
        "family": subject.family.name,
        "shape": subject.shape,
        "precision": options.precision,
        "loader": options.load_strategy,
        "steps": options.steps,
        "steps_compared": streamed.steps,
        "seq_len": subject.seq_len,
        "batch": subject.batch,
        "accumulate": options.accumulate,
        "rank": subject.rank,
        "dropout": options.dropout,
        "block_size": options.settings.block_size,
        "seed": options.seed,
        "data": None if options.data is None else options.data.name,
        "settings": _settings(options, arms["streamed"]),
        "surfaces": {name: _surface(streamed, name) for name in SURFACES},
        "control_exact": control.exact,
        "control": {
            "steps_compared": control.steps,
            "first_divergence": _divergence(control.first),
        },
        "void_reasons": void_reasons,
        "planted_fault": None if fault is None else attrs.asdict(fault),
        "evidence": {
            "adapter_tensors": len(arms["streamed"].params),
            "adapter_tensors_trained": len(arms["streamed"].params) - len(evidence.untrained),
            "least_bytes_streamed_per_step": evidence.least_bytes,
        },
        "arms": {name: _arm(arm) for name, arm in arms.items()},
        "method": METHOD,
        "command": command,
        "stack": stack_of(arms["streamed"].device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    record["arms"]["streamed"] |= _streaming(evidence)
    record["arms"]["streamed"]["optimizer_state_host_bytes"] = host_bytes
    return GateResult(
        verdict=verdict,
        divergence=divergence,
        void_reasons=void_reasons,
        fault=fault,
        record=record,
    )


def _settings(options: GateOptions, arm: Arm) -> dict[str, Any]:
    base: Any = arm.prepared.plan.model if arm.prepared is not None else arm.model
    return {
        **attrs.asdict(options.settings),
        "optimizer_state": options.optimizer_state,
        "dtype": str(base.dtype).removeprefix("torch."),
        "attention": base.config._attn_implementation,
        "optimizer": "AdamW",
        "learning_rate": LEARNING_RATE,
        "clip": CLIP,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _surface(comparison: Comparison, name: str) -> dict[str, Any]:
    found = comparison.divergences.get(name)
    return {
        "exact": comparison.steps > 0 and found is None,
        "max_abs_difference": 0.0 if found is None else found.max_abs_difference,
        "first_divergence": _divergence(found),
    }


def _divergence(found: Divergence | None) -> dict[str, Any] | None:
    return None if found is None else attrs.asdict(found)


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "peak_allocated_bytes": arm.meter.peak_allocated,
        "peak_reserved_bytes": arm.meter.peak_reserved,
        "step_seconds": arm.meter.step_seconds,
    }


def _streaming(evidence: Evidence) -> dict[str, Any]:
    def per_step(name: str) -> int:
        return int(statistics.median_low([step[name] for step in evidence.counters] or [0]))

    return {
        "bytes_streamed_per_step": per_step("bytes_streamed"),
        "copies_per_step": per_step("copies"),
        "resident_units": evidence.resident_units,
        "graph_replays": per_step("graph_replays"),
        "eager_blocks": per_step("eager_blocks"),
    }
