"""What a gate's record proves, and what it does not, in plain sentences."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poros_core.gate.flags import command_of, options_of

__all__ = ["proof", "stack_text", "subject_text", "to_repeat"]


def proof(record: Mapping[str, Any]) -> str:
    """Return what a record proves.

    Args:
        record: a record; it needs no ``proof`` of its own.
    """
    verdict = record["verdict"]
    if verdict == "exact":
        return " ".join([_exact(record), *_limits(record)])
    if verdict == "diverged":
        apart = (
            "Training with this base streamed is not what training with it resident is, here: "
            "the two differ where the record says."
        )
        alone = record["against"] is None and record["control"] is None
        if alone and record["planted_fault"] is None:
            apart += (
                " Without a control it is not known whether two resident runs would be equal: run "
                "it again without --no-control."
            )
        return apart
    if verdict == "not-deterministic":
        found = record["control"]["first_divergence"]
        return (
            "Nothing about streaming: two resident runs, which Poros does not touch, differ from "
            f"each other in this mode (step {found['step']}, {found['surface']}, "
            f"{found['tensor']})."
        )
    if verdict == "other-stack":
        return _other_stack(record)
    if verdict == "unfinished":
        return (
            f"Nothing yet: {record['steps_compared']} of {record['steps']} steps were equal when "
            "the time was up."
        )
    return "Nothing: the run does not show that what it compares streamed and trained."


def subject_text(record: Mapping[str, Any]) -> str:
    """Return what a record is about, in a few words. A local model goes by its folder's name."""
    return f"{record['family']} {_name(record['shape'])}, {record['precision'].upper()}"


def to_repeat(record: Mapping[str, Any]) -> str:
    """Return the command that runs a record's gate again, without anybody's folders in it."""
    asked = dict(record["asked"])
    if asked["model"] is not None:
        asked["model"] = _name(asked["model"])
    command = command_of(options_of(asked))
    if record["against"] is None:
        return command
    # records from before the name was kept have none
    return f"{command} --against {shlex.quote(record['against'].get('file', 'FILE'))}"


def _name(model: str) -> str:
    """Return a shape or a hub id as it is, and a folder by its name alone."""
    local = model.startswith((".", "/", "~")) or model.count("/") > 1
    return Path(model).expanduser().absolute().name if local else model


def stack_text(stack: Mapping[str, Any]) -> str:
    """Return a stack in a few words."""
    where = stack.get("gpu", "an unnamed device") or f"a CPU ({stack.get('cpu', 'unnamed')})"
    driver = f", driver {stack['driver']}" if stack.get("driver") else ""
    libraries = ", ".join(
        f"{name} {stack[name]}"
        for name in ("torch", "transformers", "peft", "bitsandbytes")
        if stack.get(name)
    )
    return f"{where}{driver}, {libraries}"


def _exact(record: Mapping[str, Any]) -> str:
    steps = record["steps_compared"]
    if record["against"] is None:
        return (
            f"On {stack_text(record['stack'])}, {steps} training steps with the base streamed "
            "gave bit for bit what they gave with it resident: every loss, gradient norm, "
            "optimizer tensor and adapter weight."
        )
    return (
        f"On {stack_text(record['stack'])}, {steps} training steps with the base streamed gave "
        "bit for bit what a resident run gave elsewhere on an equal stack, by SHA-256 of every "
        "loss, gradient norm, optimizer tensor and adapter weight."
    )


def _limits(record: Mapping[str, Any]) -> list[str]:
    limits = []
    trained, whole = record["layers"]["trained"], record["layers"]["of"]
    if trained < whole:
        limits.append(
            f"It holds for the first {trained} of {whole} layers and is no claim about the rest."
        )
    resident = record["arms"]["streamed"]["resident_units"]
    if resident:
        limits.append(
            f"{resident} of the {trained} layers stayed on the device, as the budget allowed; the "
            "others streamed."
        )
    if not record["settings"]["deterministic"]:
        limits.append("Kernels were free to be not deterministic, and were equal all the same.")
    limits.append("On another stack it shows nothing.")
    return limits


def _other_stack(record: Mapping[str, Any]) -> str:
    against = record["against"]
    largest = ", ".join(
        f"{name.replace('_', ' ')} {_number(surface['max_abs_difference'])}"
        for name, surface in record["surfaces"].items()
    )
    return (
        f"How close this run is to a resident one on another stack "
        f"({stack_text(against['stack'])}; different: {', '.join(against['differing'])}), and "
        f"nothing about bits: largest difference among the known values in "
        f"{record['steps_compared']} steps: {largest}. Loss and gradient norms are known whole, "
        "optimizer state and adapter weights by a few elements of every tensor."
    )


def _number(value: float | None) -> str:
    return "without bound" if value is None else f"{value:.2e}"
