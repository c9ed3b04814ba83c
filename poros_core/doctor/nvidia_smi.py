"""Asking ``nvidia-smi``, which may not be there."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from attrs import frozen

__all__ = ["Answer", "ask"]

_PROGRAM = "nvidia-smi"
_TIMEOUT_S = 30.0
_MOST_BYTES = 1 << 20
"""Of an answer, what is looked at."""


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
    # into a file: a pipe that nobody empties would hold up a program with much to say
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        except OSError:
            return Answer(reason=f"{_PROGRAM} is not installed here")
        with process:
            deadline = time.monotonic() + _TIMEOUT_S
            while process.poll() is None:
                if time.monotonic() > deadline:
                    process.kill()
                    return Answer(reason=f"{_PROGRAM} did not answer in {_TIMEOUT_S:.0f} s")
                meanwhile()
        said.seek(0)
        output = said.read(_MOST_BYTES).decode(errors="replace")
    if process.returncode != 0:
        text = " ".join(output.split())[:200]
        return Answer(reason=f"{_PROGRAM} failed ({process.returncode}): {text}")
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
