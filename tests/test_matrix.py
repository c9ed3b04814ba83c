"""The matrix: its rows, what runs when, and that a gate goes on where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file

from poros.cli import gate as gate_command
from poros.cli import gate_matrix
from poros_core.errors import GateError
from poros_core.gate import GateOptions, files
from poros_core.gate.arms import Arm
from poros_core.gate.compare import SURFACES
from poros_core.gate.flags import flags_of, options_of, settings_of
from poros_core.gate.matrix import Row, read_matrix
from poros_core.gate.matrix_run import Outcome, exit_status, run_matrix
from poros_core.gate.options import PLANTS, subject_of
from poros_core.gate.progress import Progress, pack, unpack
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.run import GateFiles, run_gate
from poros_core.plugins import plugins

Record = dict[str, Any]


# the rows


def test_ci_has_every_tiny_shape() -> None:
    named = {(row.settings["family"], row.settings["shape"]) for row in read_matrix("ci")}
    families = [entry.value for entry in plugins().families]
    assert named == {(f.name, s) for f in families for s in f.shapes if s.startswith("tiny")}


def test_the_first_group_is_complete_and_in_order() -> None:
    rows = read_matrix("first")
    asked = [
        *("qwen2-7b-200", "qwen2-32b-200", "qwen2-0.5b-1000", "qwen2-7b-accumulate-2"),
        *("qwen2-7b-accumulate-4", "qwen2-7b-alpaca-200", "qwen2-72b-20", "qwen2-0.5b-resumed"),
    ]
    modes = [row for row in rows if row.name.startswith("mode-")]
    assert [row.name for row in rows if row not in modes] == asked
    swept = [options_of(row.settings) for row in modes]
    assert {o.modes.attention for o in swept} == {"auto", "math", "flash", "efficient", "cudnn"}
    assert {o.settings.graphs for o in swept} == {"auto", "on", "off"}
    for name in ("deterministic", "tf32", "compile"):
        assert {getattr(o.modes, name) for o in swept} == {True, False}
    assert {o.modes.autocast for o in swept} == {"off", "bf16"}


def test_every_fault_has_its_row() -> None:
    rows = read_matrix("controls")
    assert {row.settings["plant"] for row in rows} == set(PLANTS)
    for device in ("any", "cuda"):
        assert {row.settings["plant"] for row in rows if row.device == device} == set(PLANTS)


def rows_that_name_every_setting() -> list[Row]:
    seen: set[str] = set()
    rows = []
    for row in read_matrix("all"):
        if row.settings.keys() - seen:
            rows.append(row)
            seen |= row.settings.keys()
    return rows


@pytest.mark.parametrize("row", rows_that_name_every_setting(), ids=lambda row: row.name)
def test_a_row_is_its_command_line(
    row: Row, gate_cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GateOptions] = []

    def capture(options: GateOptions, **files: object) -> None:
        asked.append(options)
        raise GateError("enough")

    monkeypatch.setattr(gate_command, "_run", capture)
    gate_cli(*flags_of(row.options()))
    assert asked == [row.options()]


def test_settings_survive_json() -> None:
    options = options_of({"family": "qwen2", "shape": "tiny", "data": "a/b.safetensors"})
    settings = json.loads(json.dumps(settings_of(options)))
    assert settings["data"] == "b.safetensors"
    assert options_of({**settings, "data": "a/b.safetensors"}) == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no row"),
        ("[[row]", "is not TOML"),
        ("[[row]]\nname = 'a'\norder = 1", "row 'a' lacks 'group'"),
        ("[[row]]\nname = 'a'\norder = 1\ngroup = 'g'\nwhy = 1", "does not know 'why'"),
        (
            "[[row]]\nname = 'a'\norder = 1\ngroup = 'g'\nsettings = { stpes = 2 }",
            "row 'a': A gate has no setting 'stpes'",
        ),
        ("[[row]]\nname = 'a'\norder = 1\ngroup = 'g'\ndevice = 'tpu'", "device is 'any' or"),
        (2 * "[[row]]\nname = 'a'\norder = 1\ngroup = 'g'\n", "two rows 'a'"),
        ("row = 3", "has no row"),
        ("row = [3]", "has no row"),
        ("[row]\nname = 'a'", "has no row"),
        ("[[row]]\nname = 'a'\norder = 'x'\ngroup = 'g'", "row 'a': order cannot be 'x'"),
        ("[[row]]\nname = 'a'\norder = true\ngroup = 'g'", "row 'a': order cannot be True"),
        ("[[row]]\nname = 3\norder = 1\ngroup = 'g'", "row '3': name cannot be 3"),
        ("[[row]]\nname = 'a'\norder = 1\ngroup = 'g'\nsettings = 3", "settings cannot be 3"),
        (
            "[[row]]\nname = 'a'\norder = 1\ngroup = 'g'\nneeds_minutes = '3'",
            "needs_minutes cannot be '3'",
        ),
        *(
            (f"[[row]]\nname = '{name}'\norder = 1\ngroup = 'g'", "Give it a name without '/'")
            for name in ("../a", "a/b", "a\\b", "..", "")
        ),
        *(
            (
                "[[row]]\nname = 'a'\norder = 1\ngroup = 'g'\n"
                f"settings = {{ family = 'qwen2', shape = 'tiny', {setting} }}",
                message,
            )
            for setting, message in (
                ("steps = 2.5", "'steps' is 2.5, of the type float; it takes int"),
                ("steps = '3'", "'steps' is '3', of the type str; it takes int"),
                ("steps = true", "'steps' is True, of the type bool; it takes int"),
                ("dropout = 'x'", "'dropout' is 'x', of the type str; it takes float"),
                ("tf32 = 1", "'tf32' is 1, of the type int; it takes bool"),
                ("precision = 4", "'precision' is 4, of the type int; it takes text"),
                ("data = 4", "'data' is 4, of the type int; it takes "),
                ("vram_budget = 1.5", "'vram_budget' is 1.5, of the type float; it takes int or"),
            )
        ),
    ],
)
def test_a_malformed_matrix_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(GateError, match=message):
        read_matrix(str(path))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(GateError, match="no group of that name. Groups: ci, controls, first"):
        read_matrix("third")
    with pytest.raises(GateError, match="There is no row 'x'. There are: ci-gemma3"):
        read_matrix("ci", rows=["x"])
    assert [row.name for row in read_matrix("ci", rows=["ci-qwen3"])] == ["ci-qwen3"]


# running rows


class Watch:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.outcomes: list[Outcome] = []

    def begins(self, row: Row) -> None:
        self.begun.append(row.name)

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def row(name: str, **changes: Any) -> Row:
    settings = {"family": "qwen2", "shape": "tiny", **changes.pop("settings", {})}
    return Row(name=name, group="g", order=1, settings=settings, **changes)


def record_of(options: GateOptions, verdict: str = "exact") -> Record:
    divergence = {"step": 2, "surface": "loss", "tensor": "micro-batch 0"}
    found = divergence if verdict == "diverged" else None
    return {
        "kind": "training-parity",
        "verdict": verdict,
        "asked": settings_of(options),
        "steps": options.steps,
        "steps_compared": options.steps if verdict == "exact" else 1,
        "void_reasons": ["nothing moved"],
        "surfaces": {
            name: {"exact": found is None, "first_divergence": found} for name in SURFACES
        },
        "control": {"first_divergence": divergence},
        "planted_fault": {"name": options.plant},
        "stack": {},
        "date": "",
        "arms": {},
    }


class Runner:
    """Runs nothing: returns a verdict per seed."""

    def __init__(self, verdicts: Mapping[int, str] | None = None) -> None:
        self.verdicts = verdicts or {}
        self.calls: list[tuple[GateOptions, Path | None, float | None]] = []

    def __call__(
        self, options: GateOptions, *, state: Path | None, minutes: float | None
    ) -> Record:
        self.calls.append((options, state, minutes))
        verdict = self.verdicts.get(options.seed, "exact")
        if verdict == "refused":
            raise GateError("no such kernel")
        if verdict == "caught":
            verdict = "exact" if options.plant is None else "diverged"
        return record_of(options, verdict)


def run(rows: list[Row], runner: Runner, **more: Any) -> list[Outcome]:
    watch = Watch()
    found = run_matrix(rows, run=runner, observer=watch, **{"cuda": False, **more})
    assert watch.outcomes == found
    return found


def test_a_row_with_its_record_is_done(tmp_path: Path) -> None:
    runner = Runner({1: "not-deterministic"})
    rows = [row("a"), row("b", settings={"seed": 1})]
    first = run(rows, runner, folder=tmp_path)
    again = run(rows, runner, folder=tmp_path)
    assert [o.status for o in first] == [o.status for o in again] == ["exact", "not-deterministic"]
    assert [o.kept for o in first + again] == [False, False, True, True]
    assert [(state, minutes) for _, state, minutes in runner.calls] == [
        (tmp_path / "a.state", None),
        (tmp_path / "b.state", None),
    ]
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["row"]["name"] == "a"
    assert written["command"] == "poros gate --family qwen2 --shape tiny"


def test_a_row_runs_again_when_its_record_is_not_its_own_or_not_final(tmp_path: Path) -> None:
    run([row("a")], Runner(), folder=tmp_path)
    changed = row("a", settings={"steps": 7})
    runner = Runner({0: "diverged"})
    assert [o.status for o in run([changed], runner, folder=tmp_path)] == ["diverged"]
    assert [o.status for o in run([changed], runner, folder=tmp_path)] == ["diverged"]
    assert len(runner.calls) == 2
    # a record from before a setting was added is the row's own: it had its default
    record = record_of(changed.options())
    del record["asked"]["tf32"]
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert [o.kept for o in run([changed], Runner(), folder=tmp_path)] == [True]
    (tmp_path / "a.json").write_text("{")
    assert [o.kept for o in run([changed], Runner(), folder=tmp_path)] == [False]


def test_a_row_of_as_many_layers_as_fit_is_done(tmp_path: Path) -> None:
    class Fitting(Runner):
        """Settles how many layers fit, as a gate does."""

        def __call__(self, options: GateOptions, **more: Any) -> Record:
            return super().__call__(attrs.evolve(options, layers=2), **more)

    fit = row("a", settings={"layers": "fit"})
    assert [o.kept for o in run([fit], Fitting(), folder=tmp_path)] == [False]
    assert [o.kept for o in run([fit], Fitting(), folder=tmp_path)] == [True]
    # the record of a number of layers is none of as many as fit
    run([row("a", settings={"layers": 1})], Runner(), folder=tmp_path)
    assert [o.kept for o in run([fit], Fitting(), folder=tmp_path)] == [False]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.pop("kind"),
        lambda record: record.update(kind="negative-control"),
        lambda record: record.update(kind="trainer-loop-parity"),
        lambda record: record.pop("surfaces"),
        lambda record: record["surfaces"].pop("loss"),
        lambda record: record["surfaces"]["loss"].update(exact=False),
        lambda record: record.update(steps_compared=1),
        lambda record: record.update(verdict="caught"),
        lambda record: record.update(asked=3),
    ],
)
def test_what_is_no_whole_record_of_a_row_is_run_again(
    change: Callable[[Record], object], tmp_path: Path
) -> None:
    run([row("a")], Runner(), folder=tmp_path)
    path = tmp_path / "a.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    assert [o.kept for o in run([row("a")], Runner(), folder=tmp_path)] == [False]
    path.write_text("[]")
    assert [o.kept for o in run([row("a")], Runner(), folder=tmp_path)] == [False]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(verdict="exact"),
        lambda record: record.update(record["clean"]),
        lambda record: record["faulty"].update(verdict="exact"),
        lambda record: record["clean"].update(verdict="diverged"),
        lambda record: record.pop("clean"),
    ],
)
def test_what_is_no_whole_record_of_a_control_is_run_again(
    change: Callable[[Record], object], tmp_path: Path
) -> None:
    planted = row("c", settings={"plant": "early-read"})
    run([planted], Runner({0: "caught"}), folder=tmp_path)
    path = tmp_path / "c.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps({**record, "asked": settings_of(planted.options())}))
    assert [o.kept for o in run([planted], Runner({0: "caught"}), folder=tmp_path)] == [False]


def test_a_record_that_cannot_be_written_ends_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.os.replace

    def replace(part: Path, target: Path) -> None:
        if target.name == "a.json":
            raise OSError(28, "No space left on device")
        real(part, target)

    monkeypatch.setattr(files.os, "replace", replace)
    first, second = run([row("a"), row("b")], Runner(), folder=tmp_path)
    assert (first.status, second.status) == ("refused", "exact")
    assert "a.json' cannot be written: No space left on device" in first.detail
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_rows_that_cannot_run_now_are_pending(tmp_path: Path) -> None:
    rows = [
        row("gpu", device="cuda"),
        row("long", needs_minutes=9),
        row("data", settings={"data": "d.safetensors"}),
        row("short"),
    ]
    runner = Runner()
    found = run(rows, runner, minutes=5.0, folder=tmp_path)
    assert [o.status for o in found] == ["pending", "pending", "pending", "exact"]
    assert found[0].detail == "needs a CUDA device"
    assert found[1].detail.startswith("needs more than 9 minutes, 5.0 are left")
    assert found[2].detail == "needs d.safetensors; say where it is with --data-dir"
    assert exit_status(found) == 0
    assert exit_status(found[:3]) == 4, "nothing has run"
    assert exit_status([]) == 0
    ((options, state, minutes),) = runner.calls
    assert (options.seed, state) == (0, tmp_path / "short.state")
    assert minutes is not None
    assert 4.9 < minutes <= 5.0


def test_data_is_found_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "d.safetensors").write_text("")
    runner = Runner()
    run([row("data", settings={"data": "d.safetensors"})], runner, data=tmp_path)
    assert runner.calls[0][0].data == tmp_path / "d.safetensors"


def test_a_row_cut_short_is_pending_and_leaves_no_record(tmp_path: Path) -> None:
    (found,) = run([row("a")], Runner({0: "unfinished"}), folder=tmp_path, minutes=1.0)
    assert (found.status, found.detail) == ("pending", "1 of 20 steps were equal so far")
    assert list(tmp_path.iterdir()) == []


def test_a_control_runs_with_its_fault_and_without(tmp_path: Path) -> None:
    planted = row("c", settings={"plant": "early-read"})
    runner = Runner({0: "caught"})
    (found,) = run([planted], runner, folder=tmp_path)
    assert [options.plant for options, _, _ in runner.calls] == ["early-read", None]
    assert (found.status, found.detail) == ("caught", "step 2, loss, micro-batch 0")
    written = json.loads((tmp_path / "c.json").read_text())
    assert (written["kind"], written["verdict"]) == ("negative-control", "caught")
    assert written["faulty"]["command"].endswith("--plant early-read")
    assert "--plant" not in written["clean"]["command"]
    assert [o.kept for o in run([planted], runner, folder=tmp_path)] == [True]


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ({}, 0),
        ({1: "not-deterministic"}, 3),
        ({1: "not-deterministic", 2: "void"}, 2),
        ({1: "refused"}, 2),
        ({0: "diverged", 1: "void"}, 1),
    ],
)
def test_the_exit_status_is_that_of_the_worst(verdicts: dict[int, str], status: int) -> None:
    rows = [row(f"row {seed}", settings={"seed": seed}) for seed in range(3)]
    assert exit_status(run(rows, Runner(verdicts))) == status


class Together(Runner):
    """Comes back once so many rows run at the same time."""

    def __init__(self, count: int) -> None:
        super().__init__({0: "caught"})
        self.barrier = threading.Barrier(count)

    def __call__(
        self, options: GateOptions, *, state: Path | None, minutes: float | None
    ) -> Record:
        record = super().__call__(options, state=state, minutes=minutes)
        if options.plant is None:
            self.barrier.wait(timeout=20)
        return {**record, "arms": {"streamed": {"step_seconds": 0.5, "peak_allocated_bytes": 7}}}


def test_rows_beside_each_other_have_no_times(tmp_path: Path) -> None:
    rows = [
        *(row(f"row {seed}", settings={"seed": seed}) for seed in (1, 2)),
        row("control", settings={"plant": "early-read"}),
    ]
    watch = Watch()
    found = run_matrix(rows, run=Together(3), observer=watch, cuda=False, folder=tmp_path, jobs=3)
    assert [outcome.row for outcome in found] == rows, "whichever ended first"
    assert [outcome.status for outcome in found] == ["exact", "exact", "caught"]
    assert sorted(watch.begun) == sorted(row.name for row in rows)
    records = [json.loads((tmp_path / f"{row.name}.json").read_text()) for row in rows]
    assert [record["beside"] for record in records] == [2, 2, 2]
    for part in (*records[:2], records[2]["faulty"], records[2]["clean"]):
        assert part["arms"]["streamed"] == {"step_seconds": None, "peak_allocated_bytes": 7}


def test_a_row_that_ran_alone_keeps_its_times(tmp_path: Path) -> None:
    run_matrix([row("a")], run=Together(1), observer=Watch(), cuda=False, folder=tmp_path, jobs=3)
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["arms"]["streamed"]["step_seconds"] == 0.5
    assert "beside" not in record


def test_a_row_that_time_cut_short_beside_others_has_no_times_later(tmp_path: Path) -> None:
    class CutShort(Together):
        def __call__(self, *args: Any, **more: Any) -> Record:
            return {**super().__call__(*args, **more), "verdict": "unfinished"}

    rows = [row(name, settings={"seed": seed}) for seed, name in enumerate("ab", start=1)]
    first, again = (
        run_matrix(rows, run=runner, observer=Watch(), cuda=False, folder=tmp_path, jobs=jobs)
        for runner, jobs in ((CutShort(2), 2), (Together(1), 1))
    )
    assert [o.status for o in (*first, *again)] == ["pending", "pending", "exact", "exact"]
    for name in "ab":
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert (record["beside"], record["arms"]["streamed"]["step_seconds"]) == (1, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_row_that_breaks_off_lets_no_other_begin() -> None:
    class Breaks(Runner):
        def __call__(self, options: GateOptions, **more: Any) -> Record:
            super().__call__(options, **more)
            raise KeyboardInterrupt

    runner = Breaks()
    rows = [row(f"row {seed}", settings={"seed": seed}) for seed in range(40)]
    with pytest.raises(KeyboardInterrupt):
        run_matrix(rows, run=runner, observer=Watch(), cuda=False, jobs=2)
    assert len(runner.calls) < len(rows)


@pytest.mark.slow
def test_rows_run_beside_each_other_in_processes(
    gate_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    rows = ("ci-qwen2", "ci-qwen3")
    named = [word for name in rows for word in ("--row", name)]
    code, _, _ = gate_cli("--matrix", "ci", *named, "--jobs", "2", "--json-dir", str(tmp_path))
    assert code == 0
    for name in rows:
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert (record["verdict"], record["beside"]) == ("exact", 1)


@pytest.mark.parametrize("verdict", ["exact", "diverged"])
def test_a_fault_that_makes_no_difference_is_missed(verdict: str) -> None:
    (found,) = run([row("c", settings={"plant": "early-read"})], Runner({0: verdict}))
    assert (found.status, exit_status([found])) == ("missed", 1)
    assert found.detail == f"with the fault {verdict}, without it {verdict}"


# the command


def test_a_real_row_through_the_command_line(
    gate_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    arguments = ("--matrix", "ci", "--row", "ci-qwen3", "--json-dir", str(folder))
    code, out, _ = gate_cli(*arguments)
    assert (code, "ci-qwen3: exact (3 steps)" in out) == (0, True)
    record = json.loads((folder / "ci-qwen3.json").read_text())
    assert (record["verdict"], record["precision"]) == ("exact", "bf16")
    assert record["arms"]["streamed"]["resident_units"] == 2
    assert "2 of the 4 layers stayed on the device, as the budget allowed" in record["proof"]
    code, out, _ = gate_cli(*arguments, "--json", str(tmp_path / "summary.json"))
    assert (code, "ci-qwen3: exact (recorded already)" in out) == (0, True)
    (line,) = json.loads((tmp_path / "summary.json").read_text())
    assert (line["row"], line["status"], line["kept"]) == ("ci-qwen3", "exact", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--matrix", "ci", "--steps", "5"], "--steps has no effect here: --matrix and --controls"),
        (["--controls", "--html", "r.html"], "--html has no effect here"),
        (["--family", "qwen2", "--shape", "tiny", "--row", "a"], "--row has no effect here"),
        (["--family", "qwen2", "--shape", "tiny", "--jobs", "2"], "--jobs has no effect here"),
        (["--matrix", "ci", "--jobs", "0"], "--jobs must be 1 or more; got 0"),
        (["--matrix", "ci", "--json", "no/where.json"], "name a file in a folder that exists"),
    ],
)
def test_flags_without_effect_are_refused(
    arguments: list[str], message: str, gate_cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = gate_cli(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_minutes_need_a_folder(gate_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = gate_cli("--matrix", "ci", "--minutes", "3")
    assert (code, "needs --json-dir DIR" in err) == (2, True)


def test_a_folder_takes_one_matrix_at_a_time(
    gate_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    arguments = ("--matrix", "ci", "--row", "ci-qwen3", "--json-dir", str(tmp_path))
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, err = gate_cli(*arguments)
        assert (code, "Another matrix runs in" in err) == (2, True)
    assert list(tmp_path.glob("*.json")) == []
    (tmp_path / "file").write_text("")
    code, _, err = gate_cli(*arguments[:-1], str(tmp_path / "file" / "in"))
    assert (code, "Nothing can be written to" in err) == (2, True)


def test_a_matrix_without_time_for_any_row_says_so(
    gate_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "m.toml"
    file.write_text(
        "[[row]]\nname = 'a'\ngroup = 'g'\norder = 1\nneeds_minutes = 60\n"
        "settings = { family = 'qwen2', shape = 'tiny' }"
    )
    code, out, _ = gate_cli("--matrix", str(file), "--json-dir", str(tmp_path), "--minutes", "5")
    assert (code, "a: pending (needs more than 60 minutes" in out) == (4, True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_matrix_that_is_ended_ends_its_children(jobs: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = (
        f"import os, time, pathlib; note = pathlib.Path({str(note)!r}); "
        "part = note.with_suffix('.part'); part.write_text(str(os.getpid())); "
        "part.replace(note); time.sleep(120)"
    )
    (tmp_path / "run.py").write_text(f"""
import sys
import torch
from pathlib import Path
from poros.cli import gate_matrix
torch.cuda.is_available = lambda: True
gate_matrix._CHILD = {child!r}
gate_matrix.gate_matrix(
    "ci", rows=["ci-qwen3"], folder=Path({str(tmp_path)!r}), data=None, minutes=None,
    json_file=None, jobs={jobs},
)
""")
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "run.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while not note.exists() and time.monotonic() < until:
            time.sleep(0.05)
        number = int(note.read_text())
        parent.terminate()
        assert parent.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        parent.kill()
        parent.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_a_child_s_half_record_ends_its_row_alone() -> None:
    class Half(gate_matrix.Children):
        def completed(self, command: Sequence[str]) -> tuple[int, str]:
            Path(command[command.index("--json") + 1]).write_text('{"kind": "training-')
            return 70, "OSError: no space\n"

    child = partial(gate_matrix.in_a_child, children=Half(shown=False))
    rows = [row("a"), row("b")]
    found = run_matrix(rows, run=child, observer=Watch(), cuda=False)
    assert [o.status for o in found] == ["refused", "refused"]
    assert found[0].detail == "the gate's process ended with status 70: OSError: no space"


def test_a_child_gets_the_row_s_flags(tmp_path: Path) -> None:
    options = row("a", settings={"steps": 9}).options()
    commands: list[list[str]] = []

    class Noting(gate_matrix.Children):
        def completed(self, command: Sequence[str]) -> tuple[int, str]:
            commands.append(list(command))
            target = Path(command[command.index("--json") + 1])
            target.write_text(json.dumps({"verdict": "exact"}))
            return 0, ""

    children = Noting(shown=True)
    record = gate_matrix.in_a_child(options, state=tmp_path / "s", minutes=2.5, children=children)
    assert record == {"verdict": "exact"}
    (command,) = commands
    assert command[3:10] == ["gate", "--family", "qwen2", "--shape", "tiny", "--steps", "9"]
    assert command[-4:] == ["--state", str(tmp_path / "s"), "--minutes", "2.5"]


@pytest.mark.parametrize(
    ("status", "stderr", "message"),
    [
        (2, "Error: no such kernel\n", "^no such kernel$"),
        (-9, "", "ended with status -9: it said nothing"),
        (70, "Traceback ...\nBoom: x\n", "ended with status 70: Boom: x"),
    ],
)
def test_a_child_that_fails_is_named(status: int, stderr: str, message: str) -> None:
    class Failing(gate_matrix.Children):
        def completed(self, command: Sequence[str]) -> tuple[int, str]:
            return status, stderr

    options = row("a").options()
    with pytest.raises(GateError, match=message):
        gate_matrix.in_a_child(options, state=None, minutes=None, children=Failing(shown=False))


def test_children_are_ended_when_one_row_breaks_off() -> None:
    """An interrupt that only this process gets."""
    children = gate_matrix.Children(shown=False)
    began = time.monotonic()

    def run_one(options: GateOptions, **_: object) -> Record:
        if options.seed == 0:
            while not children._running:
                time.sleep(0.01)
            raise KeyboardInterrupt
        children.completed([sys.executable, "-c", "import time; time.sleep(60)"])
        raise GateError("it was ended")

    rows = [row(f"row {seed}", settings={"seed": seed}) for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        run_matrix(rows, run=run_one, observer=Watch(), cuda=False, jobs=2, stop=children.stop)
    assert time.monotonic() - began < 30
    with pytest.raises(GateError, match="broken off"):
        children.completed([sys.executable, "-c", ""])
    children = gate_matrix.Children(shown=False)
    said = children.completed([sys.executable, "-c", "import sys; sys.exit('no')"])
    assert said == (1, "no\n")


# a gate that goes on where it stopped


class Keep:
    """An observer that keeps the arms."""

    def __init__(self) -> None:
        self.arms: Mapping[str, Arm] = {}
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def arms_ready(self, arms: Mapping[str, Arm]) -> None:
        self.arms = arms

    def step(self, done: int, total: int, loss: float) -> None: ...


LONG = GateOptions(family="qwen2", shape="tiny", steps=3, dropout=0.1, layers=1)


def test_a_resumed_gate_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut, rest = Keep(), Keep(), Keep()
    file = tmp_path / "state"
    expected = run_gate(LONG, observer=whole)
    first = run_gate(LONG, observer=cut, files=GateFiles(state=file, minutes=1e-9))
    assert (first.verdict, first.exit_status, first.record["steps_compared"]) == (
        *("unfinished", 4),
        1,
    )
    assert file.exists()
    found = run_gate(LONG, observer=rest, files=GateFiles(state=file))
    assert "going on after step 1" in rest.phases
    assert (found.verdict, expected.verdict) == ("exact", "exact")
    assert file.exists(), "whoever keeps the record removes it"
    assert found.record["losses"] == expected.record["losses"]
    assert [(s["first"], s["last"]) for s in found.record["segments"]] == [(1, 1), (2, 3)]
    for name in ("resident", "control", "streamed"):
        ours, theirs = rest.arms[name].state(), whole.arms[name].state()
        assert all(torch.equal(theirs["params"][n], p) for n, p in ours["params"].items())
        assert all(torch.equal(a, b) for a, b in zip(ours["rng"], theirs["rng"], strict=True))
        for index, entry in ours["optimizer"]["state"].items():
            other = theirs["optimizer"]["state"][index]
            assert all(torch.equal(value, other[key]) for key, value in entry.items())
    assert found.record["evidence"] == expected.record["evidence"]
    # the state of another gate is refused, and so is a file that is none
    (tmp_path / "other").write_text("no state")
    with pytest.raises(GateError, match="is no saved state of a gate"):
        run_gate(LONG, files=GateFiles(state=tmp_path / "other"))


def test_the_state_of_another_gate_or_stack_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state"
    one = attrs.evolve(LONG, steps=4)
    run_gate(one, files=GateFiles(state=file, minutes=1e-9))
    with pytest.raises(GateError, match="saved state of a gate with other settings"):
        run_gate(attrs.evolve(one, seed=1), files=GateFiles(state=file))
    state = unpack(file.read_bytes())
    del state["identity"]["asked"]["control"]  # from before there was such a setting
    file.write_bytes(b"".join(pack(state)))
    keep = Keep()
    run_gate(one, observer=keep, files=GateFiles(state=file, minutes=1e-9))
    assert any("going on after step" in phase for phase in keep.phases)
    run_gate(one, files=GateFiles(state=file, minutes=1e-9))
    monkeypatch.setenv("POROS_COMMIT", "another")
    keep = Keep()
    run_gate(one, observer=keep, files=GateFiles(state=file))
    assert any("another stack or commit" in phase for phase in keep.phases)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A saved state of ``LONG`` after its first step."""
    file = tmp_path_factory.mktemp("kept") / "state"
    run_gate(LONG, files=GateFiles(state=file, minutes=1e-9))
    assert list(file.parent.iterdir()) == [file], "nothing half-written is left"
    return file.read_bytes()


def flipped(content: bytes) -> bytes:
    """Return a state with bits of an adapter turned over, which torch would load."""
    params = unpack(content)["arm"]["params"]
    raw = next(params[n] for n in params if "lora_A" in n).numpy().tobytes()
    at = content.index(raw)
    return content[:at] + bytes(byte ^ 7 for byte in raw) + content[at + len(raw) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"garbage\n",
        lambda content: b"\x80\x02hello",
        lambda content: content[: len(content) // 2],
        flipped,
    ],
    ids=["empty", "text", "pickle", "half", "flipped"],
)
def test_a_damaged_state_is_refused(
    damage: Callable[[bytes], bytes], kept: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "state"
    file.write_bytes(damage(kept))
    with pytest.raises(GateError, match=r"no saved state of a gate .* Remove it to begin anew"):
        run_gate(LONG, files=GateFiles(state=file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("arm"), "has no 'arm'"),
        (lambda state: state.pop("identity"), "has no 'identity'"),
        (lambda state: state["identity"].pop("inputs"), "has no 'inputs'"),
        (lambda state: state["arm"].pop("rng"), "has no 'rng'"),
        (lambda state: state.update(identity=3), "has no 'identity'"),
        (lambda state: state.update(step=2), "at step 2 and has not as many losses"),
        (lambda state: state.update(step=4), "step 4 is none of the gate's"),
        (lambda state: state["losses"].pop("streamed"), "has not as many losses"),
        (lambda state: state["segments"][0].update(first=2), "segments are not the steps from 1"),
        (lambda state: state["segments"][0].pop("first"), "an entry is not what it can be"),
        (lambda state: state["meters"].pop("control"), "no measurements of the arm 'control'"),
        (lambda state: state["arm"]["params"].popitem(), "are not those of the gate"),
    ],
)
def test_a_state_at_odds_with_itself_is_refused(
    change: Callable[[Any], object], message: str, kept: bytes, tmp_path: Path
) -> None:
    file, state = tmp_path / "state", unpack(kept)
    change(state)
    file.write_bytes(b"".join(pack(state)))
    with pytest.raises(GateError, match=message):
        run_gate(LONG, files=GateFiles(state=file))


def test_two_gates_may_write_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Progress(path=tmp_path / "s", identity={}) for _ in range(2))
    arms: Any = {"resident": Empty()}
    real = files.os.replace

    def replace(part: Path, target: Path) -> None:
        monkeypatch.setattr(files.os, "replace", real)
        other.save_if_due(arms, now=True)  # while the first one's is ready
        real(part, target)

    monkeypatch.setattr(files.os, "replace", replace)
    one.save_if_due(arms, now=True)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


class Empty:
    """An arm without anything, and its meter."""

    @property
    def meter(self) -> Empty:
        return self

    def state(self) -> Record:
        return {}


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    config = subject_of(attrs.evolve(LONG, layers=2)).config
    write_random_checkpoint(
        config, folder, seed=seed, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    return folder


def records(file: Path, seed: int) -> Path:
    file.parent.mkdir(exist_ok=True)
    ids = torch.randint(0, 90, (240,), generator=torch.Generator().manual_seed(seed))
    offsets, prompts = torch.arange(0, 241, 20), torch.full((12,), 2)
    save_file({"ids": ids.int(), "offsets": offsets, "prompt_len": prompts}, file)
    return file


def test_the_state_of_other_weights_or_data_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state"
    model = checkpoint(tmp_path / "model", 0)
    asked = GateOptions(
        model=str(model), steps=3, seq_len=32, batch=2, rank=4, data=records(tmp_path / "a/t", 0)
    )
    run_gate(asked, files=GateFiles(state=file, minutes=1e-9))
    state = file.read_bytes()
    other = attrs.evolve(asked, data=records(tmp_path / "b/t", 1))
    with pytest.raises(GateError, match="on other files: data differs"):
        run_gate(other, files=GateFiles(state=file))
    config = model / "config.json"
    text = config.read_text()
    config.write_text(json.dumps({**json.loads(text), "rms_norm_eps": 1e-3}))
    with pytest.raises(GateError, match=r"on other files: config\.json differs"):
        run_gate(asked, files=GateFiles(state=file))
    config.write_text(text)
    assert run_gate(asked, files=GateFiles(state=file)).verdict == "exact"
    file.write_bytes(state)
    (weights,) = model.glob("*.safetensors")
    when = weights.stat().st_mtime_ns
    checkpoint(model, 1)
    os.utime(weights, ns=(when, when))
    with pytest.raises(GateError, match=r"on other files: model\.safetensors differs"):
        run_gate(asked, files=GateFiles(state=file))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"minutes": 3.0}, "needs --state"),
        ({"minutes": 0.0, "state": Path("x")}, "more than 0"),
        ({"against": Path("x"), "state": Path("y")}, "--against goes with neither"),
        ({"write_fingerprints": Path("x"), "state": Path("y")}, "goes without --state"),
    ],
)
def test_files_that_do_not_go_together(files: dict[str, Any], message: str) -> None:
    with pytest.raises(GateError, match=message):
        GateFiles(**files)


def test_what_a_child_said_is_kept_until_it_ends_well(tmp_path: Path) -> None:
    class Second(gate_matrix.Children):
        """Breaks down, and when it is run again does not."""

        broken = True

        def completed(self, command: Sequence[str]) -> tuple[int, str]:
            if self.broken:
                return 70, "Traceback ...\nBoom: x\n"
            Path(command[command.index("--json") + 1]).write_text("{}")
            return 0, ""

    def run() -> None:
        state = tmp_path / "a.state"
        gate_matrix.in_a_child(row("a").options(), state=state, minutes=None, children=children)

    children, log = Second(shown=False), tmp_path / "a.log"
    with pytest.raises(GateError, match=r"status 70: Boom: x \(more in '.*a\.log'\)"):
        run()
    assert log.read_text() == "Traceback ...\nBoom: x\n"
    children.broken = False
    run()
    assert not log.exists()
