"""The record of a gate: what ran, what was compared, and what can be said of it."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from attrs import field, frozen

from poros_core.gate.arms import CLIP, LEARNING_RATE, Arm
from poros_core.gate.compare import SURFACES, Comparison, Divergence
from poros_core.gate.evidence import Evidence
from poros_core.gate.fault import PlantedDefect, PlantedFault
from poros_core.gate.flags import settings_of
from poros_core.gate.meaning import proof
from poros_core.gate.meter import METHOD
from poros_core.gate.options import GateOptions, Subject
from poros_core.gate.stack import stack_of
from poros_core.status import PARITY

__all__ = ["EXIT_STATUS", "AgainstWhat", "GateResult", "Run", "make_record"]

EXIT_STATUS = {
    "exact": 0,
    "diverged": 1,
    "void": 2,
    "not-deterministic": 3,
    "other-stack": 3,
    "unfinished": 4,
}
"""What ``poros gate`` exits with, by verdict."""

LEADING = "leading-layers-parity"
"""The ``kind`` of a record of a model's first layers only. It validates no family."""
FINGERPRINTS = "fingerprint-parity"
"""The ``kind`` of a record that compares with fingerprints written elsewhere."""


@frozen(kw_only=True)
class GateResult:
    """How a gate ended.

    Attributes:
        verdict: a key of ``EXIT_STATUS``.
        divergence: the first divergence, of the streamed arm or of the control.
        void_reasons: why the verdict is void.
        fault: what was planted.
        record: the whole record.
    """

    verdict: str
    divergence: Divergence | None
    void_reasons: Sequence[str]
    fault: PlantedFault | PlantedDefect | None
    record: Mapping[str, Any] = field(repr=False)

    @property
    def exit_status(self) -> int:
        """What the command line exits with."""
        return EXIT_STATUS[self.verdict]


@frozen(kw_only=True)
class AgainstWhat:
    """What stood in for resident arms.

    Attributes:
        file: the name of the file of fingerprints.
        sha256: of that file.
        command: what it was written with.
        same_stack: whether it was written on a stack that is equal to this one.
        differing: what differs.
        stack: its own stack.
        largest: per surface, the largest difference among the known values.
    """

    file: str
    sha256: str
    command: str
    same_stack: bool
    differing: Sequence[str]
    stack: Mapping[str, Any]
    largest: Mapping[str, float]


@frozen(kw_only=True)
class Run:
    """What a gate did and found.

    Attributes:
        options: what it was asked to do.
        subject: what it ran on.
        arms: by name.
        control: what comparing the two resident arms has found; None without them.
        streamed: what comparing the streamed arm has found.
        evidence: what proves that it streamed and trained.
        fault: what was planted.
        losses: per arm and step.
        segments: the stretches of steps that ran without a break.
        finished: False if the time was up before the last step.
        against: what stood in for resident arms, if there were none.
        command: how it was asked for.
    """

    options: GateOptions
    subject: Subject
    arms: Mapping[str, Arm]
    control: Comparison | None
    streamed: Comparison
    evidence: Evidence
    fault: PlantedFault | PlantedDefect | None
    losses: Mapping[str, Sequence[float]]
    segments: Sequence[Mapping[str, Any]]
    finished: bool = True
    against: AgainstWhat | None = None
    command: str = ""

    @property
    def kind(self) -> str:
        """What kind of record it makes."""
        if self.subject.depth < self.subject.whole:
            return LEADING
        return PARITY if self.against is None else FINGERPRINTS

    def void_reasons(self) -> list[str]:
        """Return why a verdict would be void; empty if it stands."""
        reasons = self.evidence.problems()
        if self.fault is not None and not self.streamed.divergences:
            named = self.fault.tensor if isinstance(self.fault, PlantedFault) else self.fault.name
            reasons.append(
                f"a fault was planted in {named} and nothing diverged, so the gate cannot fail"
                if isinstance(self.fault, PlantedFault)
                else f"{named} was planted and nothing diverged, so the gate cannot fail"
            )
        broken = _first_not_finite(self.losses)
        if broken is not None:
            reasons.append(
                f"the loss of step {broken} is NaN or infinite, which hides every fault from there "
                "on: give data, weights or a dtype that train"
            )
        kernels, how = self.options.modes.attention, self._attention()
        if kernels != "auto" and how != "sdpa":
            reasons.append(
                f"--attention {kernels} chooses among the kernels of SDPA, and the model computes "
                f"attention by '{how}'"
            )
        host_bytes = self.arms["streamed"].host_state_bytes
        if self.options.optimizer_state == "host" and host_bytes == 0:
            reasons.append("no optimizer state stood on the host, which was asked for")
        if self.options.settings.offload_activations and not any(
            step.get("activation_bytes") for step in self.evidence.counters
        ):
            reasons.append("no activation went to the host, which was asked for")
        return reasons

    def _attention(self) -> str:
        return str(_model(self.arms["streamed"]).config._attn_implementation)

    def verdict(self) -> tuple[str, Divergence | None]:
        """Return the verdict, and the divergence that it rests on."""
        if self.control is not None and self.control.divergences:
            return "not-deterministic", self.control.first
        if self.against is not None and not self.against.same_stack:
            return ("void" if self.void_reasons() else "other-stack"), None
        if self.streamed.divergences:
            return "diverged", self.streamed.first
        if not self.finished:
            return "unfinished", None
        return ("void" if self.void_reasons() else "exact"), None


def make_record(run: Run) -> GateResult:
    """Judge a run, and make its record."""
    verdict, divergence = run.verdict()
    void_reasons = run.void_reasons() if verdict == "void" else []
    options, subject, evidence = run.options, run.subject, run.evidence
    streamed = run.arms["streamed"]
    record: dict[str, Any] = {
        "kind": run.kind,
        "verdict": verdict,
        "family": subject.family.name,
        "shape": subject.shape,
        "layers": {"trained": subject.depth, "of": subject.whole},
        "precision": options.precision,
        "loader": options.load_strategy,
        "steps": options.steps,
        "steps_compared": run.streamed.steps,
        "seq_len": subject.seq_len,
        "batch": subject.batch,
        "accumulate": options.accumulate,
        "rank": subject.rank,
        "dropout": options.dropout,
        "block_size": options.settings.block_size,
        "seed": options.seed,
        "data": None if options.data is None else options.data.name,
        "settings": _settings(options, streamed),
        "asked": settings_of(options),
        "surfaces": {name: _surface(run, name) for name in SURFACES},
        "control_exact": None if run.control is None else run.control.exact,
        "control": None
        if run.control is None
        else {
            "steps_compared": run.control.steps,
            "first_divergence": _divergence(run.control.first),
        },
        "against": None if run.against is None else _against(run.against),
        "void_reasons": void_reasons,
        "planted_fault": None if run.fault is None else attrs.asdict(run.fault),
        "evidence": {
            "adapter_tensors": len(streamed.params),
            "adapter_tensors_trained": len(streamed.params) - len(evidence.untrained),
            "least_bytes_streamed_per_step": evidence.least_bytes,
        },
        "arms": {name: _arm(arm) for name, arm in run.arms.items()},
        "losses": {name: [_finite(x) for x in losses] for name, losses in run.losses.items()},
        "segments": [dict(segment) for segment in run.segments],
        "method": METHOD,
        "command": run.command,
        "stack": stack_of(streamed.device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    record["arms"]["streamed"] |= _streaming(evidence)
    record["arms"]["streamed"]["optimizer_state_host_bytes"] = streamed.host_state_bytes
    record["proof"] = proof(record)
    return GateResult(
        verdict=verdict,
        divergence=divergence,
        void_reasons=void_reasons,
        fault=run.fault,
        record=record,
    )


def _host(arm: Arm) -> str | None:
    """Return where the arm's layers stand on the host, as its load reported."""
    report = None if arm.prepared is None else arm.prepared.store.report
    return None if report is None else report.host


def _model(arm: Arm) -> Any:
    return arm.prepared.plan.model if arm.prepared is not None else arm.model


def _first_not_finite(losses: Mapping[str, Sequence[float]]) -> int | None:
    """Return the first step of which an arm's loss is not finite."""
    steps = [
        number
        for arm in losses.values()
        for number, loss in enumerate(arm, start=1)
        if not math.isfinite(loss)
    ]
    return min(steps, default=None)


def _settings(options: GateOptions, arm: Arm) -> dict[str, Any]:
    base = _model(arm)
    return {
        **attrs.asdict(options.settings),
        "optimizer_state": options.optimizer_state,
        "host": _host(arm),
        "weights": None if options.model is not None else options.weights,
        "dtype": str(base.dtype).removeprefix("torch."),
        "attention": base.config._attn_implementation,
        "optimizer": "AdamW",
        "learning_rate": LEARNING_RATE,
        "clip": CLIP,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention_kernels": options.modes.attention,
        "tf32": options.modes.tf32,
        "autocast": options.modes.autocast,
        "compile": options.modes.compile,
        "padding": options.padding,
        "backward": options.backward,
        "resident_checkpointing": options.checkpointing,
        "resumed_at": options.resume_at,
    }


def _against(against: AgainstWhat) -> dict[str, Any]:
    largest = {name: _finite(value) for name, value in against.largest.items()}
    return {**attrs.asdict(against), "largest": largest}


def _surface(run: Run, name: str) -> dict[str, Any]:
    comparison = run.streamed
    found = comparison.divergences.get(name)
    largest = 0.0 if found is None else found.max_abs_difference
    if run.against is not None:
        largest = run.against.largest[name]
    return {
        "exact": comparison.steps > 0 and found is None,
        "max_abs_difference": _finite(largest),
        "first_divergence": _divergence(found),
    }


def _divergence(found: Divergence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**attrs.asdict(found), "max_abs_difference": _finite(found.max_abs_difference)}


def _finite(value: float) -> float | None:
    """Return a value as JSON has it: one that is no number, or without bound, is null."""
    return value if math.isfinite(value) else None


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "peak_allocated_bytes": arm.meter.peak_allocated,
        "peak_reserved_bytes": arm.meter.peak_reserved,
        "step_seconds": arm.meter.step_seconds,
    }


def _streaming(evidence: Evidence) -> dict[str, Any]:
    def per_step(name: str) -> int:
        return int(statistics.median_low([step.get(name, 0) for step in evidence.counters] or [0]))

    return {
        "bytes_streamed_per_step": per_step("bytes_streamed"),
        "copies_per_step": per_step("copies"),
        "activation_bytes_per_step": per_step("activation_bytes"),
        "resident_units": evidence.resident_units,
        "graph_replays": per_step("graph_replays"),
        "eager_blocks": per_step("eager_blocks"),
    }
