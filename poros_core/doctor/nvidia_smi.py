"""Asking ``nvidia-smi``, which may not be there."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from attrs import frozen

__all__ = ["Answer", "ask"]

_PROGRAM = "nvidia-smi"
_TIMEOUT_S = 30.0


@frozen
class Answer:
    """What ``nvidia-smi`` said.

    Attributes:
        rows: one per GPU: its values in the order of the fields asked for, None where it said
            that the value is not available.
        reason: why there are no rows, or None.
    """

    rows: tuple[tuple[str | None, ...], ...] = ()
    reason: str | None = None


def ask(
    fields: Sequence[str],
    *,
    gpu: str | None = None,
    meanwhile: Callable[[], None] = lambda: time.sleep(0.02),
) -> Answer:
    """Query fields of ``nvidia-smi --query-gpu``.

    Args:
        fields: their names.
        gpu: the UUID of the one GPU to ask about; None means all.
        meanwhile: called over and over until the answer is there, to keep a GPU busy.
    """
    command = [_PROGRAM, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [] if gpu is None else ["-i", gpu]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError:
        return Answer(reason=f"{_PROGRAM} is not installed here")
    with process:
        deadline = time.monotonic() + _TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                return Answer(reason=f"{_PROGRAM} did not answer in {_TIMEOUT_S:.0f} s")
            meanwhile()
        output = process.stdout.read() if process.stdout is not None else ""
    if process.returncode != 0:
        said = " ".join(output.split())
        return Answer(reason=f"{_PROGRAM} failed ({process.returncode}): {said[:200]}")
    rows = tuple(
        tuple(_value(cell.strip()) for cell in line.split(","))
        for line in output.splitlines()
        if line.strip()
    )
    if not rows or any(len(row) != len(fields) for row in rows):
        return Answer(reason=f"{_PROGRAM} gave no such values: {' '.join(output.split())[:200]}")
    return Answer(rows=rows)


def _value(cell: str) -> str | None:
    return None if cell.startswith("[") or cell in ("N/A", "") else cell
