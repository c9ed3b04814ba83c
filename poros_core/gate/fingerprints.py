"""Fingerprints of a resident run, for a machine on which no resident arm fits.

A file of fingerprints holds, for every step and surface, a SHA-256 over all bits, one per tensor,
and some values: all of the loss and the gradient norms, and a few elements of every adapter and
optimizer tensor. On an equal stack the hashes decide, bit for bit. On another one bits say nothing,
and the largest difference among the values is what can be told.
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
from poros_core.gate.flags import settings_of
from poros_core.gate.options import GateOptions

__all__ = ["Against", "FingerprintWriter", "checkpoint_identity"]

_KIND = "resident-fingerprints"
_SAMPLES = 8
_TENSOR_DIGITS = 16
_STACK = ("gpu", "compute_capability", "driver", "cuda", "cpu", "torch", "transformers", "peft")
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
            "asked": asked,
            "checkpoint": checkpoint,
            "stack": stack,
            "command": command,
            "steps": self._steps,
        }
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def checkpoint_identity(folder: Path, *, data: Path | None) -> dict[str, Any]:
    """Return what tells two inputs apart: every weight file's size and header, and the data."""
    found: dict[str, Any] = {}
    if data is not None:
        found["data"] = {"sha256": hashlib.sha256(data.read_bytes()).hexdigest()}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = hashlib.sha256(file.read(length)).hexdigest()
        found[path.name] = {"bytes": path.stat().st_size, "header_sha256": header}
    return found


@define(eq=False)
class Against:
    """Fingerprints that a streamed arm is compared with.

    Attributes:
        content: what the file holds.
        differing_stack: names of what differs between its stack and this one.
        comparison: what comparing has found.
        largest: per surface, the largest difference among the known values so far.
    """

    content: Mapping[str, Any] = field(repr=False)
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
            GateError: it cannot be read, or settings or checkpoint differ.
        """
        content = _content(path)
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
        if content["checkpoint"] != checkpoint:
            raise GateError(
                f"'{path}' was written with other inputs: weight files differ in name, size or "
                "header, or the data file in its content. Use the same files."
            )
        names = [*_STACK, "bitsandbytes"]
        unequal = [name for name in names if content["stack"].get(name) != stack.get(name)]
        return cls(content, unequal)

    @property
    def same_stack(self) -> bool:
        """Whether bits can be compared."""
        return not self.differing_stack

    def compare(self, view: StepView, *, step: int) -> bool:
        """Compare one step; say whether to go on: always on another stack, which has no bits."""
        theirs, ours = self.content["steps"][step - 1]["surfaces"], _surfaces(view)
        self.comparison.steps = step
        for surface in SURFACES:
            difference = _largest(theirs[surface]["values"], ours[surface]["values"])
            self.largest[surface] = max(self.largest[surface], difference)
            if theirs[surface]["sha256"] != ours[surface]["sha256"]:
                found = _divergence(step, surface, theirs[surface], ours[surface])
                self.comparison.divergences.setdefault(surface, found)
        return not (self.same_stack and self.comparison.divergences)


class KnownDivergence(Divergence):
    """A divergence of which only some values are known."""

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.surface}, {self.tensor}: other bits; {self.differing} of "
            f"{self.elements} known values differ, by {self.max_abs_difference:.2e} at most"
        )


def _content(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != _KIND:
            raise ValueError(f"its kind is {content['kind']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GateError(
            f"'{path}' holds no fingerprints ({error}). Write them with poros gate "
            "--write-fingerprints, on a machine where the resident arm fits."
        ) from error
    fingerprints: dict[str, Any] = content
    return fingerprints


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
