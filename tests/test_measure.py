"""The list of measurements, and what makes them one after the other."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_benchmarks import BENCHMARKS

COST = {
    "training_cost.py": {},
    "step_profile.py": {},
    "real_loop.py": {"data": True},
    "emulated_cards.py": {"cards": True},
}
"""Scripts that share a command line, and what each has beside it."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("measure", "cost_options", "load_cost", "soak")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def row(bench: Any, name: str, *, minutes: float = 1.0, command: str = "x.py") -> Any:
    return bench.measure.Row(name=name, group="g", minutes=minutes, command=command)


def test_every_command_is_one_that_its_script_takes(bench: Any, tmp_path: Path) -> None:
    listed = bench.measure.rows()
    assert len({each.name for each in listed}) == len(listed)
    data = tmp_path / "records.safetensors"
    data.touch()
    places = {"records": tmp_path, "scratch": tmp_path, "data": data}
    for each in listed:
        script, *line = each.line(places)
        assert (BENCHMARKS / script).is_file()
        if script in COST:
            options = bench.cost_options.arguments(line, about=None, **COST[script])
            assert bench.cost_options.works(options), each.name
        elif script == "load_cost.py":
            assert bench.load_cost.works(bench.load_cost.arguments(line)), each.name
        else:
            assert script == "soak.py"
            assert bench.soak.arguments(line).steps == 500
        assert {"--json-dir", "--json"} & set(line), "it keeps what it measures"


def test_rows_are_chosen_by_name_and_group(bench: Any) -> None:
    listed = bench.measure.rows()
    names = [each.name for each in bench.measure.chosen(listed, names=None, groups="table")]
    assert names[:3] == ["table-32b", "table-7b", "table-72b"]
    chosen = bench.measure.chosen(listed, names="soak-0.5b,table-7b", groups=None)
    assert [each.name for each in chosen] == ["table-7b", "soak-0.5b"]
    with pytest.raises(ValueError, match=r"no group cats\. There are: bf16, cards"):
        bench.measure.chosen(listed, names=None, groups="cats,table")
    with pytest.raises(ValueError, match="no name table"):
        bench.measure.chosen(listed, names="table", groups=None)


def starter(*statuses: int | None) -> tuple[Callable[[list[str], float], int | None], list[str]]:
    left, started = list(statuses), list[str]()

    def start(line: list[str], seconds: float) -> int | None:
        started.append(line[-1])
        return left.pop(0)

    return start, started


def test_what_is_done_is_not_done_again_at_the_same_commit(bench: Any, tmp_path: Path) -> None:
    asked = [row(bench, name, command=f"x.py {name}") for name in ("a", "b", "c")]
    measure = bench.measure

    def became(commit: str | None, *statuses: int | None) -> tuple[list[str], list[str]]:
        start, started = starter(*statuses)
        found = measure.measure(
            asked, places={}, notes=measure.Notes(tmp_path, commit), minutes=60, start=start
        )
        return [text.split(" in ")[0] for text in found.values()], started

    assert became("1", 0, 1, None) == (["done", "failed (1)", "stopped"], ["a", "b", "c"])
    assert became("1", 0, 0) == (["done before", "done", "done"], ["b", "c"])
    assert became("1") == (["done before"] * 3, [])
    assert became("2", 0, 0, 0)[1] == ["a", "b", "c"]
    assert became(None, 0, 0, 0)[1] == ["a", "b", "c"]
    assert became(None, 0, 0, 0)[1] == ["a", "b", "c"], "nobody knows what was measured"


def test_what_does_not_fit_or_has_no_place_is_left(bench: Any, tmp_path: Path) -> None:
    asked = [
        row(bench, "long", minutes=5),
        row(bench, "placeless", command="x.py --data {data}"),
        row(bench, "short", command="x.py short"),
    ]
    start, started = starter(0)
    found = bench.measure.measure(
        asked,
        places={"data": None},
        notes=bench.measure.Notes(tmp_path, "1"),
        minutes=2,
        start=start,
    )
    assert found["long"] == "left: needs 5 minutes"
    assert found["placeless"].startswith("left: a place")
    assert found["short"].startswith("done")
    assert started == ["short"]


def test_scripts_run_as_commands_and_are_stopped(bench: Any) -> None:
    assert bench.measure.run(["measure.py", "--list", "--rows", "soak-0.5b"], 60) == 0
    assert bench.measure.run(["measure.py", "--rows", "none"], 60) == 2
    assert bench.measure.run(["measure.py", "--list"], 0.01) is None


def test_what_a_script_started_is_stopped_with_it(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    (tmp_path / "x.py").write_text(
        "import subprocess, sys\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(started.pid))\n"
        "started.wait()\n"
    )
    monkeypatch.setattr(bench.measure, "HERE", tmp_path)
    assert bench.measure.run(["x.py"], 3) is None
    state = Path(f"/proc/{child.read_text()}/stat")
    for _ in range(50):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("it goes on")
