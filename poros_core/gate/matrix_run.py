"""Running a matrix: what has run, what can run now, and what each row came to.

[Note: Rows beside each other]
A gate of a small model leaves most of a GPU idle: its resident arms wait for the host that launches
their kernels. Rows in processes of their own can run several at once, and bits do not depend on it.
Times do, so a record of a row that had others beside it has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
from attrs import field, frozen

from poros_core.errors import PorosError
from poros_core.gate.files import json_text, write_whole
from poros_core.gate.flags import command_of
from poros_core.gate.matrix import CONTROL, Row
from poros_core.gate.matrix_done import SURFACES, record_that_is_done
from poros_core.gate.options import GateOptions

__all__ = ["MatrixObserver", "Outcome", "RowRunner", "exit_status", "run_matrix"]

_TIME_IS_UP = 4

Status = Literal[
    "exact", "diverged", "void", "not-deterministic", "caught", "missed", "refused", "pending"
]
_PARTS = ("", "-faulty", "-clean")
"""What is added to a row's name for the states of its gates: a control has two."""


@frozen(kw_only=True)
class Outcome:
    """How a row came out.

    Attributes:
        row: the row.
        status: ``caught`` and ``missed`` are a control's; ``refused``: the gate could not be run,
            ``pending``: it was not run, or not to its end.
        detail: why, or where it first diverged.
        kept: whether its record was there already.
        record: its record, if there is one.
    """

    row: Row
    status: Status
    detail: str = ""
    kept: bool = False
    record: Mapping[str, Any] | None = field(default=None, repr=False)


class RowRunner(Protocol):
    """Runs one gate for a matrix: in this process, or in one of its own."""

    def __call__(
        self, options: GateOptions, *, state: Path | None, minutes: float | None
    ) -> Mapping[str, Any]:
        """Run a gate and return its record.

        Args:
            options: what it is asked to do.
            state: where it is kept if the time is up, and goes on from.
            minutes: how long it may take.

        Raises:
            PorosError: it cannot be run.
        """
        ...


class MatrixObserver(Protocol):
    """Is told how far a matrix is."""

    def begins(self, row: Row) -> None:
        """Called before a row runs."""
        ...

    def ended(self, outcome: Outcome) -> None:
        """Called for every row, those that are not run too."""
        ...


def run_matrix(
    rows: Iterable[Row],
    *,
    run: RowRunner,
    observer: MatrixObserver,
    cuda: bool,
    folder: Path | None = None,
    data: Path | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    stop: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Run what has not run yet, as far as the time goes.

    A row that does not fit into what is left is passed over, and later ones may.

    Args:
        rows: in their order.
        run: runs one gate.
        observer: is told how far it is.
        cuda: whether there is a CUDA device.
        folder: where records and states are; None keeps none.
        data: the folder of rows' data files.
        minutes: how long all of it may take; None means no limit.
        jobs: rows that run at once; more than one takes a ``run`` that several threads may call.
            See [Note: Rows beside each other].
        stop: ends what ``run`` is doing in other threads, when one of them broke off.

    Returns:
        What each row came to, in their order.
    """
    until = None if minutes is None else time.monotonic() + 60 * minutes
    crowd, one_at_a_time = _Crowd(), threading.Lock()

    def outcome_of(row: Row) -> Outcome:
        left = None if until is None else (until - time.monotonic()) / 60
        outcome = _done(row, folder) or _not_now(row, cuda=cuda, data=data, left=left)
        if outcome is None:
            with one_at_a_time:
                observer.begins(row)
            with crowd.joined() as beside:
                outcome = _RowRun(
                    row, run=run, folder=folder, data=data, minutes=left, beside=beside
                ).outcome()
        with one_at_a_time:
            observer.ended(outcome)
        return outcome

    if jobs == 1:
        return [outcome_of(row) for row in rows]
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="poros-row")
    try:
        return list(pool.map(outcome_of, rows))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C no other row begins
        stop()
        raise
    finally:
        pool.shutdown()


class _Crowd:
    """Who runs at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._most: dict[object, int] = {}

    @contextmanager
    def joined(self) -> Iterator[Callable[[], int]]:
        """Be one more; the value says how many others there were at once so far."""
        me = object()
        with self._lock:
            self._most[me] = 0
            self._most = {who: max(most, len(self._most)) for who, most in self._most.items()}
        try:
            yield lambda: self._most[me] - 1
        finally:
            with self._lock:
                del self._most[me]


def exit_status(outcomes: Iterable[Outcome]) -> int:
    """Return what the command line exits with: the worst of all. What is pending is no failure, as
    long as not every row is."""
    found = {outcome.status for outcome in outcomes}
    if found == {"pending"}:
        return _TIME_IS_UP
    if found & {"diverged", "missed"}:
        return 1
    if found & {"void", "refused"}:
        return 2
    return 3 if "not-deterministic" in found else 0


def _done(row: Row, folder: Path | None) -> Outcome | None:
    """Return the outcome of a row whose record is there already."""
    record = None if folder is None else record_that_is_done(row, folder)
    if record is None:
        return None
    return Outcome(row=row, status=record["verdict"], kept=True, record=record)


def _not_now(row: Row, *, cuda: bool, data: Path | None, left: float | None) -> Outcome | None:
    """Return the outcome of a row that cannot be run now, and why."""
    file = row.settings.get("data")
    if row.device == "cuda" and not cuda:
        return Outcome(row=row, status="pending", detail="needs a CUDA device")
    if file is not None and (data is None or not (data / file).is_file()):
        detail = f"needs {file}; say where it is with --data-dir"
        return Outcome(row=row, status="pending", detail=detail)
    if left is not None and left <= row.needs_minutes:
        detail = f"needs more than {row.needs_minutes:g} minutes, {max(0.0, left):.1f} are left"
        return Outcome(row=row, status="pending", detail=detail)
    return None


class _RowRun:
    """One row, as it runs."""

    def __init__(
        self,
        row: Row,
        *,
        run: RowRunner,
        folder: Path | None,
        data: Path | None,
        minutes: float | None,
        beside: Callable[[], int],
    ) -> None:
        self._row = row
        self._beside = beside
        self._run = run
        self._folder = folder
        self._data = data
        self._until = None if minutes is None else time.monotonic() + 60 * minutes

    def outcome(self) -> Outcome:
        """Run it, and write its record."""
        try:
            record = (
                self._control() if self._row.planted else self._gate(self._row.options(self._data))
            )
            return self._ended(record)
        except PorosError as error:
            return Outcome(row=self._row, status="refused", detail=str(error))

    def _ended(self, record: Mapping[str, Any]) -> Outcome:
        """Return what a record came to, and write it.

        Raises:
            GateError: it cannot be written.
        """
        verdict = record["verdict"]
        beside = self._most_beside(ended=verdict != "unfinished")
        if verdict == "unfinished":
            compared, steps = record["steps_compared"], record["steps"]
            detail = f"{compared} of {steps} steps were equal so far"
            return Outcome(row=self._row, status="pending", detail=detail)
        if beside:
            record = {**_without_times(record), "beside": beside}
        record = {**record, "row": attrs.asdict(self._row)}
        if self._folder is not None:
            write_whole(self._folder / f"{self._row.name}.json", json_text(record))
            for part in _PARTS:  # the record is kept: nothing is to go on from there
                self._state(part).unlink(missing_ok=True)
        return Outcome(row=self._row, status=verdict, detail=_detail(record), record=record)

    def _most_beside(self, *, ended: bool) -> int:
        """Return how many rows there were beside this one, also in runs of it that time cut short.

        Args:
            ended: whether it need not be remembered.
        """
        found = self._beside()
        if self._folder is None:
            return found
        kept = self._folder / f"{self._row.name}.beside"
        if kept.exists():
            found = max(found, _number(kept))
        if ended:
            kept.unlink(missing_ok=True)
        elif found:
            write_whole(kept, str(found))
        return found

    def _gate(self, options: GateOptions, *, part: str = "") -> Mapping[str, Any]:
        state, minutes = None, None
        if self._folder is not None:
            state = self._state(part)
            if self._until is not None:
                minutes = max((self._until - time.monotonic()) / 60, 1e-3)
        record = dict(self._run(options, state=state, minutes=minutes))
        record["command"] = command_of(options)
        return record

    def _state(self, part: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._row.name}{part}.state"

    def _control(self) -> Mapping[str, Any]:
        """Run a negative control: with its fault, then without."""
        options = self._row.options(self._data)
        faulty = self._gate(options, part=_PARTS[1])
        if faulty["verdict"] == "unfinished":
            return faulty
        clean = self._gate(self._row.options(self._data, clean=True), part=_PARTS[2])
        if clean["verdict"] == "unfinished":
            return clean
        caught = faulty["verdict"] == "diverged" and clean["verdict"] == "exact"
        return {
            "kind": CONTROL,
            "verdict": "caught" if caught else "missed",
            "plant": self._row.settings["plant"],
            "what": faulty["planted_fault"],
            "found": _first(faulty),
            "asked": faulty["asked"],
            "faulty": faulty,
            "clean": clean,
            "command": faulty["command"],
            "stack": faulty["stack"],
            "date": faulty["date"],
        }


def _number(path: Path) -> int:
    """Return the number in a file: some, if it cannot be told how many."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except ValueError:
        return 1


def _without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record, and those of a control within it, without what arms' steps took."""
    found = dict(record)
    for part in ("faulty", "clean"):
        if part in found:
            found[part] = _without_times(found[part])
    if "arms" in found:
        found["arms"] = {name: {**arm, "step_seconds": None} for name, arm in found["arms"].items()}
    return found


def _first(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first divergence of the streamed arm."""
    found = [d for s in SURFACES if (d := record["surfaces"][s]["first_divergence"]) is not None]
    return min(found, key=lambda divergence: divergence["step"], default=None)


def _detail(record: Mapping[str, Any]) -> str:
    verdict = record["verdict"]
    if verdict == "void":
        return "; ".join(record["void_reasons"])
    if verdict == "missed":
        faulty, clean = record["faulty"]["verdict"], record["clean"]["verdict"]
        return f"with the fault {faulty}, without it {clean}"
    if verdict == "not-deterministic":
        return _where(record["control"]["first_divergence"])
    if verdict == "caught":
        return _where(record["found"])
    return _where(_first(record)) if verdict == "diverged" else f"{record['steps']} steps"


def _where(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"step {found['step']}, {found['surface'].replace('_', ' ')}, {found['tensor']}"
