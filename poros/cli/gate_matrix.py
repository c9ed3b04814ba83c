"""``poros gate --matrix``: many gates, one after the other or several at once."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poros.cli.gate_display import quiet_libraries
from poros.cli.output import console
from poros_core.errors import GateError
from poros_core.gate.files import json_text, write_whole
from poros_core.gate.flags import flags_of
from poros_core.gate.matrix import Row, read_matrix
from poros_core.gate.matrix_run import Outcome, exit_status, run_matrix
from poros_core.gate.options import GateOptions

__all__ = ["Children", "gate_matrix", "in_a_child", "in_this_process"]

_COLOURS = {
    "exact": "green",
    "caught": "green",
    "pending": "yellow",
    "not-deterministic": "yellow",
    "refused": "red",
    "diverged": "red",
    "missed": "red",
    "void": "red",
}
_CHILD = "from poros.cli import main; main()"
_BAD_INPUT = 2
_LOCK = ".lock"


def gate_matrix(
    matrix: str,
    *,
    rows: Sequence[str] | None,
    folder: Path | None,
    data: Path | None,
    minutes: float | None,
    json_file: Path | None,
    jobs: int = 1,
) -> int:
    """Run a matrix and show how it goes; return the exit status."""
    chosen = read_matrix(matrix, rows=rows or ())
    if jobs < 1:
        raise GateError(f"--jobs must be 1 or more; got {jobs}.")
    if minutes is not None and (folder is None or minutes <= 0):
        raise GateError(
            "--minutes must be more than 0, and needs --json-dir DIR with --matrix, where rows "
            "that are cut short are kept."
        )
    out = console()
    with quiet_libraries(), _alone_in(folder), _ended_by_signals():
        import torch

        cuda = torch.cuda.is_available()
        # a row may ask for other kernels, or exhaust the device: on CUDA each has its own process
        children = Children(shown=jobs == 1)
        child = partial(in_a_child, children=children)
        outcomes = run_matrix(
            chosen,
            run=child if cuda or jobs > 1 else in_this_process,
            observer=_Display(out),
            cuda=cuda,
            folder=folder,
            data=data,
            minutes=minutes,
            jobs=jobs,
            stop=children.stop,
        )
    if json_file is not None:
        write_whole(json_file, json_text(_summary(outcomes)))
    out.print(_table(outcomes))
    return exit_status(outcomes)


def in_this_process(
    options: GateOptions, *, state: Path | None, minutes: float | None
) -> Mapping[str, Any]:
    """Run a gate here; see ``RowRunner``."""
    from poros_core.gate.run import GateFiles, run_gate

    return run_gate(options, files=GateFiles(state=state, minutes=minutes)).record


class Children:
    """Processes that run, and can be ended from another thread."""

    def __init__(self, *, shown: bool) -> None:
        """Start none yet.

        Args:
            shown: let them say how far they are.
        """
        self._shown = shown
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def completed(self, command: Sequence[str]) -> tuple[int, str]:
        """Run a command; return its exit status and what it said as errors."""
        with self._lock:
            if self._stopped:
                raise GateError("the matrix was broken off")
            process = subprocess.Popen(
                command,
                stdout=sys.stderr if self._shown else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running.add(process)
        try:
            _, errors = process.communicate()
            return process.returncode, errors
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)

    def stop(self) -> None:
        """End all, and start no other."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def in_a_child(
    options: GateOptions, *, state: Path | None, minutes: float | None, children: Children
) -> Mapping[str, Any]:
    """Run a gate in a process of its own; see ``RowRunner``."""
    with tempfile.TemporaryDirectory(prefix="poros-gate-") as scratch:
        record = Path(scratch) / "record.json"
        flags = ["gate", *flags_of(options), "--json", str(record)]
        if state is not None:
            flags += ["--state", str(state)]
        if minutes is not None:
            flags += ["--minutes", str(minutes)]
        status, errors = children.completed([sys.executable, "-c", _CHILD, *flags])
        log = None if state is None else state.with_suffix(".log")
        found = _read(record)
        if found is not None:
            if log is not None:
                log.unlink(missing_ok=True)
            return found
        last = errors.strip().splitlines()[-1:] or ["it said nothing"]
        said = last[0].removeprefix("Error: ")
        if status == _BAD_INPUT:
            raise GateError(said)
        message = f"the gate's process ended with status {status}: {said}"
        if log is not None:
            log.write_text(errors, encoding="utf-8")
            message += f" (more in '{log}')"
        raise GateError(message)


def _read(path: Path) -> Mapping[str, Any] | None:
    """Return a child's record, or None if it left none, or not a whole one."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def _alone_in(folder: Path | None) -> Iterator[None]:
    """Let no other matrix run in a folder.

    Raises:
        GateError: one does, or the folder cannot be locked.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("a")
    except OSError as error:
        raise GateError(
            f"Nothing can be written to '{folder}' ({error.strerror}). Give another --json-dir."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GateError(
                f"Another matrix runs in '{folder}'. Wait until it has ended, or give another "
                "--json-dir."
            ) from error
        except OSError as error:
            raise GateError(
                f"'{folder}' cannot be locked ({error.strerror}), so that two matrices could write "
                "one record. Give a --json-dir on a local disk."
            ) from error
        yield


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave by an exception when this process is to end, so that its children end too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


class _Display:
    """Shows one line per row."""

    def __init__(self, out: Console) -> None:
        self._out = out

    def begins(self, row: Row) -> None:
        """Say which row runs."""
        self._out.print(f"[dim]{row.name} ...[/dim]", soft_wrap=True)

    def ended(self, outcome: Outcome) -> None:
        """Say how it came out."""
        text = Text(f"{outcome.row.name}: ")
        text.append(outcome.status, style=_COLOURS[outcome.status])
        detail = "recorded already" if outcome.kept else outcome.detail
        self._out.print(text + Text(f" ({detail})" if detail else ""), soft_wrap=True)


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("row")
    table.add_column("outcome")
    table.add_column("streamed step", justify="right")
    for outcome in outcomes:
        record = outcome.record or {}
        seconds = record.get("arms", {}).get("streamed", {}).get("step_seconds")
        table.add_row(
            outcome.row.name,
            Text(outcome.status, style=_COLOURS[outcome.status]),
            "-" if seconds is None else f"{seconds:.3f} s",
        )
    return table


def _summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [
        {"row": o.row.name, "status": o.status, "detail": o.detail, "kept": o.kept}
        for o in outcomes
    ]
