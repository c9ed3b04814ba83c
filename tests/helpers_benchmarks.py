"""The benchmark scripts' modules, found as the scripts find each other, and their command line."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
_MODULES = (
    *("cost_process", "training_cost", "cost_work", "cost_measure", "cost_models", "cost_options"),
    *("cost_table", "direct_weights", "real_loop", "step_profile", "trace_reading", "plots"),
    *("emulated_cards", "device_figures"),
)


@contextmanager
def scripts() -> Iterator[SimpleNamespace]:
    """Give the modules, by name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in _MODULES})
    finally:
        sys.path.remove(str(BENCHMARKS))


def cost(bench: Any, *argv: str) -> list[Any]:
    line = ["--shape", "tiny", "--direct", "yes", "--steps", "10", "--warmup", "1", *argv]
    found: list[Any] = bench.cost_options.works(bench.cost_options.arguments(line, about=None))
    return found


def here(bench: Any) -> Any:
    """Return what measures in this process, so that a test imports torch once."""

    def runner(works: Any, path: Any) -> Any:
        for found in bench.cost_measure.outcomes(works, path):
            yield json.loads(json.dumps(found))

    return runner


def found_of(bench: Any, work: Any) -> dict[str, Any]:
    """Measure one work in this process."""
    [found] = here(bench)([work], None)
    return dict(found)
