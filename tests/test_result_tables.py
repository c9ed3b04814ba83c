"""The tables of benchmarks/results.md: current, and what they are said to show."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def tables() -> Iterator[Any]:
    """Give the script as a module, found as it finds itself."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("result_tables")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def records(tables: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tables.read(BENCHMARKS / "records")
    return found


def test_the_page_is_current(tables: Any, records: Any) -> None:
    page = (BENCHMARKS / "results.md").read_text(encoding="utf-8")
    assert page == tables.page(records), "run `make tables`"


def test_every_plot_of_the_page_is_there() -> None:
    page = (BENCHMARKS / "results.md").read_text(encoding="utf-8")
    plots = sorted(path.name for path in (BENCHMARKS / "plots").glob("*.png"))
    assert [name for name in plots if f"(plots/{name})" in page] == plots
    assert len(plots) == page.count("](plots/")


def test_of_two_runs_the_later_counts_whole(tables: Any) -> None:
    records = [{"run_id": run, "n": n} for run, n in [("a", 1), ("b", 2), ("b", 3), ("a", 4)]]
    assert [r["n"] for r in tables.latest(records, lambda r: r["n"] < 4)] == [2, 3]
    assert tables.latest(records, lambda r: r["n"] > 9) == []


def test_more_memory_never_makes_a_step_longer(tables: Any, records: Any) -> None:
    """And a step takes at most a twentieth more than is predicted for the slower of link and
    compute, and the prediction is near."""
    costs = [r for r in records if r["kind"] == "training-cost"]
    rows = tables.latest(costs, lambda r: r["shape"] == "32b" and tables.budget_of(r) is not None)
    rows.sort(key=tables.budget_of)
    assert [tables.budget_of(r) for r in rows] == [6, 8, 12, 16, 24, 32]
    steps = [tables.step_seconds(r) for r in rows]
    assert all(later <= 1.02 * step for step, later in itertools.pairwise(steps))
    for record, step in zip(rows, steps, strict=True):
        assert 0.9 < step / tables.predicted(record).pace <= 1.05
        assert record["peak_device_bytes"] <= tables.budget_of(record) * 1e9


def test_where_all_fits_a_step_is_no_longer_than_a_resident_one(tables: Any, records: Any) -> None:
    costs = [r for r in records if r["kind"] == "training-cost"]
    fits = tables.latest(costs, lambda r: r["settings"].get("vram_budget") == "auto")
    ours = fits[-1]
    [other] = [
        r for r in costs if r["run_id"] == ours["run_id"] and r["method"] == "peft-checkpointing"
    ]
    assert ours["resident_units"] == ours["layers"]
    assert tables.step_seconds(ours) <= 1.02 * tables.step_seconds(other)
