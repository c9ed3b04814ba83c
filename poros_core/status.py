"""Whether a family is validated, as the committed gate records say.

There are two words only. A family is *validated* on a stack if a record is committed of a parity
gate that ended exact on such a stack, at another shape than a tiny one; all else is
*experimental*. Two stacks are the same here if their GPUs have the same compute capability, and
torch, transformers and bitsandbytes the same minor version.

Records lie in ``docs/validation`` of a source checkout, or in the ``validation`` folder of the
installed package. Nothing here needs torch: without it the running stack is not known, and a
family's status is what the records show on theirs.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from poros_core.errors import PorosError

if TYPE_CHECKING:
    import torch

__all__ = [
    "PARITY",
    "FamilyStatus",
    "GateRecord",
    "Stack",
    "Status",
    "family_status",
    "read_records",
    "record_folders",
    "running_stack",
]

Status = Literal["validated", "experimental"]

PARITY = "training-parity"
"""The ``kind`` of a parity gate's record."""

_LIBRARIES = ("torch", "transformers", "bitsandbytes")
_CAPABILITIES = {"NVIDIA H200": "9.0"}
"""Compute capability by GPU name, for records that do not say it."""


@frozen(kw_only=True)
class Stack:
    """Hardware and software as far as a record's validity depends on them.

    Attributes:
        gpu: the GPU's name, or None where there is none.
        capability: its compute capability, for example ``"9.0"``, or None if it is not known.
        torch: minor version, for example ``"2.11"``, or None if it is not installed.
        transformers: likewise.
        bitsandbytes: likewise.
    """

    gpu: str | None
    capability: str | None
    torch: str | None
    transformers: str | None
    bitsandbytes: str | None

    @property
    def gpu_title(self) -> str:
        """What a person calls the GPU."""
        if self.gpu is None:
            return "no GPU"
        name = self.gpu.removeprefix("NVIDIA ")
        return name if self.capability is None else f"{name} sm_{self.capability.replace('.', '')}"

    def differing(self, other: Stack) -> list[str]:
        """Return in which fields another stack is not the same: ``"gpu"`` or a library's name."""
        same_gpu = self.capability is not None and self.capability == other.capability
        found = [] if same_gpu else ["gpu"]
        return found + [n for n in _LIBRARIES if getattr(self, n) != getattr(other, n)]

    def libraries(self, names: Iterable[str] = _LIBRARIES) -> str:
        """Return names and versions of some libraries as text."""
        versions = {name: getattr(self, name) for name in _LIBRARIES if name in names}
        return ", ".join(
            f"no {name}" if version is None else f"{name} {version}"
            for name, version in versions.items()
        )


@frozen(kw_only=True)
class GateRecord:
    """The key figures of a record that validates its family on its stack.

    Attributes:
        file: the record's file name.
        family: the family.
        shape: the shape that was trained.
        precision: of the base.
        steps: optimizer steps that were compared.
        seq_len: tokens per sequence at most.
        dropout: of the adapters.
        block_size: layers that share one recompute boundary.
        peak_bytes: most device memory of the arms ``resident`` and ``streamed``; None if it was
            not measured.
        step_seconds: median time of a step, likewise.
        stack: what it ran on.
    """

    file: str
    family: str
    shape: str
    precision: str | None
    steps: int | None
    seq_len: int | None
    dropout: float | None
    block_size: int | str | None
    peak_bytes: Mapping[str, int | None] = field(repr=False)
    step_seconds: Mapping[str, float | None] = field(repr=False)
    stack: Stack

    @property
    def title(self) -> str:
        """What ran, in a few words."""
        gpu = (self.stack.gpu or "").removeprefix("NVIDIA ")
        what = " ".join(filter(None, (self.family, self.shape, self.precision)))
        return f"{what}, {self.steps} steps, {gpu}"


@frozen(kw_only=True)
class FamilyStatus:
    """What the records say of one family.

    Attributes:
        word: ``"validated"`` or ``"experimental"``.
        detail: on what it rests, or what differs; without parentheses.
        record: the record that the running stack matches, the largest if several; None if there
            is none or the running stack is not known.
        records: all records that validate the family on some stack.
    """

    word: Status
    detail: str
    record: GateRecord | None
    records: tuple[GateRecord, ...]

    def __str__(self) -> str:
        return f"{self.word} ({self.detail})"


def record_folders() -> tuple[Path, ...]:
    """Return the folders that hold committed records, in this checkout and in this package."""
    package = Path(__file__).resolve().parent
    folders = [package / "validation"]
    if (package.parent / "pyproject.toml").is_file():
        folders.append(package.parent / "docs" / "validation")
    return tuple(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def read_records(folders: Iterable[Path] | None = None) -> list[GateRecord]:
    """Return every record that validates its family on its stack.

    Args:
        folders: where to look; None means the committed ones.

    Raises:
        PorosError: a file there is not JSON.
    """
    found: dict[str, GateRecord] = {}
    for folder in record_folders() if folders is None else folders:
        for path in sorted(folder.glob("*.json")):
            record = _record(path.name, _read(path))
            if record is not None:
                found.setdefault(path.name, record)
    return list(found.values())


def running_stack(device: torch.device | None = None) -> Stack | None:
    """Return the stack that runs here, or None if torch is not installed.

    Args:
        device: the compute device; None means the current CUDA device, if there is any.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    major, minor = torch.cuda.get_device_capability(device) if cuda else (0, 0)
    return Stack(
        gpu=torch.cuda.get_device_name(device) if cuda else None,
        capability=f"{major}.{minor}" if cuda else None,
        torch=_minor(torch.__version__),
        transformers=_minor(_installed("transformers")),
        bitsandbytes=_minor(_installed("bitsandbytes")),
    )


def family_status(
    name: str, *, running: Stack | None, folders: Iterable[Path] | None = None
) -> FamilyStatus:
    """Return the status of a family.

    Args:
        name: the family's name.
        running: the stack that runs here; None if it is not known.
        folders: where to look for records; None means the committed ones.

    Raises:
        PorosError: a file there is not JSON.
    """
    records = tuple(record for record in read_records(folders) if record.family == name)
    if not records:
        return FamilyStatus(
            word="experimental", detail="no gate record", record=None, records=records
        )
    if running is None:
        stacks = {f"{r.stack.gpu_title} with {r.stack.libraries()}" for r in records}
        detail = f"on {'; on '.join(sorted(stacks))}"
        return FamilyStatus(word="validated", detail=detail, record=None, records=records)
    matching = [record for record in records if not record.stack.differing(running)]
    if not matching:
        detail = _difference(records, running)
        return FamilyStatus(word="experimental", detail=detail, record=None, records=records)
    largest = max(matching, key=lambda record: record.peak_bytes.get("resident") or 0)
    return FamilyStatus(word="validated", detail=largest.title, record=largest, records=records)


def _difference(records: Iterable[GateRecord], running: Stack) -> str:
    """Say where the nearest stack of a record differs from the one that runs here."""
    nearest = min((r.stack for r in records), key=lambda stack: len(stack.differing(running)))
    differing = nearest.differing(running)
    theirs, ours = nearest.libraries(differing), running.libraries(differing)
    validated = f"{nearest.gpu_title} with {theirs}" if theirs else nearest.gpu_title
    here = ", ".join(filter(None, (ours, running.gpu_title if "gpu" in differing else "")))
    return f"validated on {validated}; this stack: {here}"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PorosError(
            f"The gate record {path} cannot be read: {error}. Restore it or remove it."
        ) from error


def _record(file: str, content: Any) -> GateRecord | None:
    """Return the figures of a record that validates something; None for any other file."""
    if not isinstance(content, Mapping):
        return None
    stack, shape, family = (content.get(key) for key in ("stack", "shape", "family"))
    if content.get("kind") != PARITY or content.get("verdict") != "exact":
        return None
    if not isinstance(stack, Mapping) or not stack.get("gpu"):
        return None
    if not isinstance(family, str) or not isinstance(shape, str) or shape.startswith("tiny"):
        return None
    return GateRecord(
        file=file,
        family=family,
        shape=shape,
        precision=content.get("precision"),
        steps=content.get("steps_compared", content.get("steps")),
        seq_len=content.get("seq_len"),
        dropout=content.get("dropout"),
        block_size=content.get("block_size"),
        peak_bytes=_by_arm(content, "peak_allocated_bytes"),
        step_seconds=_by_arm(content, "step_seconds"),
        stack=Stack(
            gpu=stack["gpu"],
            capability=stack.get("compute_capability") or _CAPABILITIES.get(stack["gpu"]),
            **{name: _minor(stack.get(name)) for name in _LIBRARIES},
        ),
    )


def _by_arm(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    arms = content.get("arms") or {}
    return {name: arms.get(name, {}).get(key) for name in ("resident", "streamed")}


def _minor(version: str | None) -> str | None:
    found = re.match(r"\d+\.\d+", version or "")
    return None if found is None else found.group()


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
