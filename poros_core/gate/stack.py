"""What a record was made with: hardware, driver and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

__all__ = ["COMMIT_VARIABLE", "stack_of"]

COMMIT_VARIABLE = "POROS_COMMIT"
"""Environment variable that names the commit, for a copy of the source without its history."""


def stack_of(device: torch.device) -> dict[str, str | int | None]:
    """Return what runs here, as a record names it. On a CPU, GPU and driver are None; on a GPU,
    the CPU's model, kernels and threads, which no bit depends on there."""
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "compute_capability": _capability(device) if cuda else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else None,
        "cuda": torch.version.cuda if cuda else None,
        "cpu": platform.machine(),
        "cpu_model": None if cuda else _cpu_model(),
        "cpu_kernels": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": None if cuda else torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("transformers", "peft", "bitsandbytes")},
        "poros": _version("poros-train"),
        "poros_commit": _commit(),
    }


def _cpu_model() -> str:
    """Return the CPU's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _capability(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with uncommitted changes" if commit and changed else commit


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None
