"""Fingerprints of a resident run, for a machine on which no resident arm fits.

A file of fingerprints holds, for every step and surface, a SHA-256 over all bits, one per tensor,
and some values: all of the loss and the gradient norms, and a few elements of every adapter and
optimizer tensor. On an equal stack the hashes decide, bit for bit. On another one bits say nothing,
and the largest difference among the values is what can be told. A last entry seals the file, a
SHA-256 over all others: what was changed since it was written is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from poros_core.errors import GateError
from poros_core.gate.compare import SURFACES, Comparison, Divergence, StepView
from poros_core.gate.files import write_whole
from poros_core.gate.flags import settings_of
from poros_core.gate.options import GateOptions

__all__ = ["Against", "FingerprintWriter", "sealed"]

_KIND = "resident-fingerprints"
_VERSION = 2
_ENTRIES: Mapping[str, type] = {
    **{"asked": dict, "checkpoint": dict, "stack": dict, "command": str, "steps": list},
}
_SURFACE = {"sha256": str, "tensors": dict, "values": dict}
_SAMPLES = 8
_TENSOR_DIGITS = 16
_STACK = (
    *("gpu", "compute_capability", "driver", "cuda", "cpu", "cpu_model", "cpu_kernels"),
    *("cpu_threads", "torch", "transformers", "peft", "bitsandbytes"),
)
"""What must be equal for bits to be: all that ``stack_of`` says but Python's and Poros' versions,
which no resident kernel depends on."""
_WHERE_ONLY = (
    *(
        "load_strategy",
        "host",
        "optimizer_state",
        "checkpointing",
        "control",
        "resume_at",
        "plant_fault",
        "plant",
    ),
    *("block_size", "vram_budget", "graphs", "offload_activations", "copy_ahead", "model"),
)
"""Settings that say where things are and not what is computed. Inputs have a check of their own."""


class FingerprintWriter:
    """Takes down what a resident arm shows, step by step."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []

    def add(self, step: int, view: StepView) -> None:
        """Take down one step."""
        self._steps.append({"step": step, "surfaces": _surfaces(view)})

    def write(
        self,
        path: Path,
        *,
        asked: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        stack: Mapping[str, Any],
        command: str,
    ) -> None:
        """Write the file."""
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "asked": asked,
            "checkpoint": checkpoint,
            "stack": stack,
            "command": command,
            "steps": self._steps,
        }
        write_whole(path, f"{json.dumps(sealed(content))}\n".encode())


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file holds, with the seal that fits it."""
    rest = {name: value for name, value in content.items() if name != "seal"}
    seal = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return {**rest, "seal": seal}


@define(eq=False)
class Against:
    """Fingerprints that a streamed arm is compared with.

    Attributes:
        content: what the file holds.
        file: its name, without its folder.
        sha256: its SHA-256.
        differing_stack: names of what differs between its stack and this one.
        comparison: what comparing has found.
        largest: per surface, the largest difference among the known values so far.
    """

    content: Mapping[str, Any] = field(repr=False)
    file: str
    sha256: str
    differing_stack: Sequence[str]
    comparison: Comparison = field(factory=Comparison)
    largest: dict[str, float] = field(factory=lambda: dict.fromkeys(SURFACES, 0.0))

    @classmethod
    def read(
        cls,
        path: Path,
        *,
        asked: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        stack: Mapping[str, Any],
    ) -> Against:
        """Read a file, and check that it is of the same training.

        Raises:
            GateError: it cannot be read or was changed, or settings or checkpoint differ.
        """
        content, sha256 = _content(path)
        theirs = {**settings_of(GateOptions()), **content["asked"]}
        differing = [
            name
            for name in asked
            if name not in _WHERE_ONLY and name != "steps" and theirs.get(name) != asked[name]
        ]
        if differing:
            name = differing[0]
            raise GateError(
                f"'{path}' was written with {name} {theirs.get(name)}, not {asked[name]}"
                f"{_others(differing[1:])}. Give the settings it was written with: "
                f"{content['command']}"
            )
        if len(content["steps"]) < asked["steps"]:
            raise GateError(
                f"'{path}' has {len(content['steps'])} steps, fewer than --steps {asked['steps']}. "
                "Ask for as many, or write it again."
            )
        unequal = [
            name
            for name in _STACK
            if name not in content["stack"] or content["stack"][name] != stack.get(name)
        ]
        if content["checkpoint"] != checkpoint:
            names = [*checkpoint, *content["checkpoint"]]
            name = next(n for n in names if content["checkpoint"].get(n) != checkpoint.get(n))
            raise GateError(
                f"'{path}' was written with other inputs: {name} is another one there, or is there "
                "on one side alone. Use the same files; random weights of a shape have the same "
                f"bits on an equal stack only (different here: {', '.join(unequal) or 'nothing'})."
            )
        return cls(content, path.name, sha256, unequal)

    @property
    def same_stack(self) -> bool:
        """Whether bits can be compared."""
        return not self.differing_stack

    def compare(self, view: StepView, *, step: int) -> bool:
        """Compare one step; say whether to go on: always on another stack, which has no bits.

        Raises:
            GateError: hashes of the file are equal to this step's, and its values are not.
        """
        theirs, ours = self.content["steps"][step - 1]["surfaces"], _surfaces(view)
        self.comparison.steps = step
        for surface in SURFACES:
            difference = _largest(theirs[surface]["values"], ours[surface]["values"])
            self.largest[surface] = max(self.largest[surface], difference)
            if theirs[surface]["sha256"] != ours[surface]["sha256"]:
                found = _divergence(step, surface, theirs[surface], ours[surface])
                self.comparison.divergences.setdefault(surface, found)
            elif difference:
                raise GateError(
                    f"'{self.file}' contradicts itself: at step {step} its hash of {surface} is "
                    "this run's, and its values are others. Write it again."
                )
        return not (self.same_stack and self.comparison.divergences)


class KnownDivergence(Divergence):
    """A divergence of which only some values are known."""

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.surface}, {self.tensor}: other bits; {self.differing} of "
            f"{self.elements} known values differ, by {self.max_abs_difference:.2e} at most"
        )


def _content(path: Path) -> tuple[dict[str, Any], str]:
    """Return what a file holds, checked, and its SHA-256."""
    try:
        text = path.read_bytes()
        content: Any = json.loads(text)
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            raise ValueError("it is of another kind")
        wrong = _contradiction(content)
        if wrong is not None:
            raise ValueError(wrong)
    except (OSError, ValueError) as error:
        raise GateError(
            f"'{path}' holds no fingerprints ({error}). Write them with poros gate "
            "--write-fingerprints, on a machine where the resident arm fits."
        ) from error
    return content, hashlib.sha256(text).hexdigest()


def _contradiction(content: Mapping[str, Any]) -> str | None:
    """Say what a file lacks, or that it is not what was written; None if it is sound."""
    if content.get("version") != _VERSION:
        return "another version of Poros wrote it"
    for name, kind in _ENTRIES.items():
        if not isinstance(content.get(name), kind):
            return f"it has no '{name}', or not one that can be"
    for number, step in enumerate(content["steps"], start=1):
        if not isinstance(step, dict) or step.get("step") != number:
            return f"it has no step {number} where that belongs"
        for surface in SURFACES:
            if not _is_surface(step.get("surfaces"), surface):
                return f"step {number} has no '{surface}', or not one that can be"
    if sealed(content)["seal"] != content.get("seal"):
        return "it was changed since it was written"
    return None


def _is_surface(surfaces: Any, name: str) -> bool:
    found = surfaces.get(name) if isinstance(surfaces, dict) else None
    return isinstance(found, dict) and all(
        isinstance(found.get(key), kind) for key, kind in _SURFACE.items()
    )


def _others(names: Sequence[str]) -> str:
    return f" (and {', '.join(names)} differ too)" if names else ""


def _surfaces(view: StepView) -> dict[str, Any]:
    return {name: _surface(view.surfaces[name], whole=_scalars(name)) for name in SURFACES}


def _scalars(surface: str) -> bool:
    return surface in ("loss", "grad_norms")


def _surface(tensors: Mapping[str, torch.Tensor], *, whole: bool) -> dict[str, Any]:
    every = hashlib.sha256()
    hashes: dict[str, str] = {}
    values: dict[str, list[float]] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
        every.update(name.encode() + digest.digest())
        hashes[name] = digest.hexdigest()[:_TENSOR_DIGITS]
        if tensor.is_floating_point():
            count = flat.numel() if whole else min(_SAMPLES, flat.numel())
            at = torch.arange(count) * flat.numel() // max(1, count)
            values[name] = flat[at].double().tolist()
    return {"sha256": every.hexdigest(), "tensors": hashes, "values": values}


def _largest(theirs: Mapping[str, list[float]], ours: Mapping[str, list[float]]) -> float:
    return max((_differences(theirs.get(n, []), found) for n, found in ours.items()), default=0.0)


def _differences(theirs: Sequence[float], ours: Sequence[float]) -> float:
    if len(theirs) != len(ours):
        return math.inf
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=True) if a != b]
    if any(math.isnan(a) != math.isnan(b) for a, b in pairs):
        return math.inf
    return max((abs(a - b) for a, b in pairs if not math.isnan(a)), default=0.0)


def _divergence(
    step: int, surface: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> Divergence:
    names = [n for n in [*theirs["tensors"], *ours["tensors"]] if _hash(theirs, ours, n)]
    # the hash over all covers names and order too, so there may be no such tensor
    name = names[0] if names else "names of tensors"
    mine, other = ours["values"].get(name, []), theirs["values"].get(name, [])
    return KnownDivergence(
        step=step,
        surface=surface,
        tensor=name,
        differing=sum(a != b for a, b in zip(other, mine, strict=False)),
        elements=len(mine),
        max_abs_difference=_differences(other, mine),
    )


def _hash(theirs: Mapping[str, Any], ours: Mapping[str, Any], name: str) -> bool:
    return bool(theirs["tensors"].get(name) != ours["tensors"].get(name))
