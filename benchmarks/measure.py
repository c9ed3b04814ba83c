"""Make the measurements that are listed in measurements.toml, as many as time allows.

    python benchmarks/measure.py --list
    python benchmarks/measure.py --minutes 60 --records runs --scratch /scratch --data records.st
    python benchmarks/measure.py --groups table,sweeps --records benchmarks/records

Rows run in the order of the list, each as a command of its own; one that needs more minutes than
are left is passed over, and one that is still running at the end is stopped. What is done at the
commit that is checked out is noted in measured.json beside the records, and not done again.
Exit status: 0 all asked for are done, 1 one of them failed, 2 bad input, 3 some are left.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter

import torch
from attrs import frozen

from poros_core.gate.stack import stack_of

HERE = Path(__file__).resolve().parent
LIST = HERE / "measurements.toml"
NOTES = "measured.json"


@frozen
class Row:
    """One measurement.

    Attributes:
        name: its name.
        group: what it belongs to.
        minutes: that it takes at most, about.
        command: a script of this folder and its arguments, with places in braces.
    """

    name: str
    group: str
    minutes: float
    command: str

    def line(self, places: Mapping[str, Path | None]) -> list[str] | None:
        """Return its command line; None if it names a place that is not there."""
        wanted = {name for _, name, _, _ in Formatter().parse(self.command) if name}
        if any(places[name] is None for name in wanted):
            return None
        return shlex.split(self.command.format(**places))


def rows(path: Path = LIST) -> list[Row]:
    """Return what is listed, in order."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["row"]
    return [Row(**row) for row in listed]


def chosen(listed: Sequence[Row], *, names: str | None, groups: str | None) -> list[Row]:
    """Return the rows that are asked for.

    Args:
        listed: all of them.
        names: names, separated by commas; None for all.
        groups: groups, separated by commas; None for all.

    Raises:
        ValueError: there is no such row or group.
    """
    found = list(listed)
    for what, asked in (("name", names), ("group", groups)):
        if asked is None:
            continue
        wanted, known = asked.split(","), {getattr(row, what) for row in listed}
        if unknown := sorted(set(wanted) - known):
            raise ValueError(
                f"There is no {what} {', '.join(unknown)}. There are: {', '.join(sorted(known))}."
            )
        found = [row for row in found if getattr(row, what) in wanted]
    return found


class Notes:
    """Which rows are done at which commit."""

    def __init__(self, folder: Path, commit: str | None) -> None:
        """Read them.

        Args:
            folder: of the records.
            commit: that is checked out; None if there are changes that no commit has, or it is not
                known, and then nothing counts as done.
        """
        self._path, self._commit = folder / NOTES, commit
        there = self._path.exists()
        self._notes = json.loads(self._path.read_text(encoding="utf-8")) if there else {}

    def done(self, row: Row) -> bool:
        """Whether the row is done at this commit, and did not fail."""
        note = self._notes.get(row.name, {})
        here = self._commit is not None and note.get("commit") == self._commit
        return here and note.get("exit_status") == 0

    def add(self, row: Row, *, status: int | None, seconds: float) -> None:
        """Note that the row has run; with None it was stopped."""
        self._notes[row.name] = {
            "commit": self._commit,
            "exit_status": status,
            "seconds": round(seconds, 1),
        }
        self._path.write_text(json.dumps(self._notes, indent=2) + "\n", encoding="utf-8")


def measure(
    asked: Sequence[Row],
    *,
    places: Mapping[str, Path | None],
    notes: Notes,
    minutes: float,
    start: Callable[[list[str], float], int | None],
) -> dict[str, str]:
    """Make measurements until time is up; return what became of each row.

    Args:
        asked: the rows.
        places: what braces in their commands stand for.
        notes: what is done.
        minutes: how long it may take.
        start: runs a command line for at most so many seconds and returns its exit status, or None
            if it was stopped.
    """
    end = time.monotonic() + 60 * minutes
    became: dict[str, str] = {}
    for row in asked:
        line = row.line(places)
        left = end - time.monotonic()
        if notes.done(row):
            became[row.name] = "done before"
        elif line is None:
            became[row.name] = "left: a place in its command was not given"
        elif left < 60 * row.minutes:
            became[row.name] = f"left: needs {row.minutes:g} minutes"
        else:
            print(f"-- {row.name}", file=sys.stderr, flush=True)
            began = time.monotonic()
            status = start(line, left)
            seconds = time.monotonic() - began
            notes.add(row, status=status, seconds=seconds)
            ended = "stopped" if status is None else "done" if status == 0 else f"failed ({status})"
            became[row.name] = f"{ended} in {seconds:.0f} s"
    return became


def run(line: list[str], seconds: float) -> int | None:
    """Run a script of this folder; its record will have the path as it is seen from here."""
    command = [sys.executable, os.path.relpath(HERE / line[0]), *line[1:]]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except BaseException as error:  # an interrupt must not leave it running either
        os.killpg(process.pid, signal.SIGKILL)  # and what it started, which may hold the GPU
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("--rows", help="their names, separated by commas")
    parser.add_argument("--groups", help="their groups, separated by commas")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="how long it may take")
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--scratch", type=Path, help="a folder with room for a bf16 checkpoint")
    parser.add_argument("--data", type=Path, help="tokenised records; see real_loop.py")
    return parser.parse_args(argv)


def main(options: argparse.Namespace) -> int:
    """Do what was asked for; return the exit status."""
    try:
        asked = chosen(rows(), names=options.rows, groups=options.groups)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if options.list:
        for row in asked:
            print(f"{row.name:<16} {row.group:<8} {row.minutes:>4g} min  {row.command}")
        return 0
    options.records.mkdir(parents=True, exist_ok=True)
    commit = stack_of(torch.device("cpu"))["poros_commit"]
    became = measure(
        asked,
        places={"records": options.records, "scratch": options.scratch, "data": options.data},
        notes=Notes(options.records, commit if commit and " " not in commit else None),
        minutes=options.minutes,
        start=run,
    )
    for name, what in became.items():
        print(f"{name:<16} {what}")
    if any(what.startswith(("failed", "stopped")) for what in became.values()):
        return 1
    return 3 if any(what.startswith("left") for what in became.values()) else 0


if __name__ == "__main__":
    sys.exit(main(arguments()))
