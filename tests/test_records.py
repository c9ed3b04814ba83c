"""Every committed record, held to itself: what it says twice must agree."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers_cost_records import cost_problems
from helpers_records import problems

ROOT = Path(__file__).resolve().parent.parent
VALIDATION = ROOT / "docs" / "validation"
BENCHMARKS = ROOT / "benchmarks" / "records"
PATHS = [*sorted(VALIDATION.glob("*.json")), *sorted(BENCHMARKS.glob("*.json"))]
H200_PAGES = ("README.md", "docs/report.md", "docs/loading.md", "benchmarks/results.md")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def ours(name: str) -> dict[str, Any]:
    [path] = [path for path in PATHS if path.name.startswith(name)]
    return read(path)


def wrong_in(record: dict[str, Any]) -> list[str]:
    gates = record["kind"] == "negative-control" or record["kind"].endswith("-parity")
    return problems(record) if gates else cost_problems(record)


def test_there_are_records() -> None:
    assert len(list(VALIDATION.glob("*.json"))) > 40
    assert len(list(BENCHMARKS.glob("*.json"))) > 80


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_a_record_agrees_with_itself(path: Path) -> None:
    record = read(path)
    assert wrong_in(record) == []
    if path.parent == BENCHMARKS:
        said = [record[name] for name in ("kind", "shape", "precision", "method")]
        said[3] = said[3].split(":")[0]
        assert re.fullmatch(
            "-".join(map(re.escape, [*said, record["run_id"]])) + r"-\d+", path.stem
        )
    elif "row" in record:
        assert record["row"]["name"] == path.stem


def test_a_load_whose_bytes_were_compared_is_the_load_that_was_measured() -> None:
    compared = sorted(BENCHMARKS.glob("load-bytes-*.json"))
    assert len(compared) == len(list(BENCHMARKS.glob("load-cost-*.json")))
    for path in compared:
        cost = read(path.with_name(path.name.replace("load-bytes", "load-cost")))
        [run] = read(path)["runs"]
        assert run["load"] == cost["report"]


def test_one_run_has_one_rate_of_the_link() -> None:
    rates: dict[str, set[float]] = {}
    for path in BENCHMARKS.glob("*.json"):
        record = read(path)
        if "link_bytes_per_second" in record:
            rates.setdefault(record["run_id"], set()).add(record["link_bytes_per_second"])
    assert {run: found for run, found in rates.items() if len(found) > 1} == {}


@pytest.mark.parametrize("page", H200_PAGES)
def test_the_gpu_that_a_page_names_is_its_records(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "H200" in text
    links = re.findall(r"\]\(([^)#\s]+\.json)\)", text)
    assert links
    for link in links:
        stack = read((ROOT / page).parent / link)["stack"]
        assert (stack["gpu"], stack["compute_capability"]) == ("NVIDIA H200", "9.0"), link


GATE, DIVERSE = "qwen2-7b-200.json", "mode-attention-flash-not-deterministic.json"
CONTROL, LOOP, BUDGET = "control-early-read.json", "qwen2-7b-trainer.json", "qwen2-32b-budget.json"
COST = "training-cost-7b-nf4-poros-20261203T054639Z"
CARD, REAL = (
    "training-cost-72b-nf4-poros-20261201T171917Z",
    "real-loop-7b-nf4-poros-20261203T083815Z",
)
REFUSED = "training-cost-7b-nf4-unsloth"
LOAD, BYTES = "load-cost-7b-nf4-streamed", "load-bytes-7b-nf4-streamed"
FOUND = {"step": 2, "surface": "loss", "tensor": "x", "max_abs_difference": 1.0}

# the record, what is changed in it, and how the complaint begins
MUTANTS: list[tuple[str, dict[str, Any], str]] = [
    (GATE, {"surfaces.loss.first_divergence": FOUND}, "verdict"),
    (GATE, {"surfaces.loss.exact": False}, "verdict"),
    (GATE, {"surfaces.loss.max_abs_difference": 1.0}, "surfaces"),
    (GATE, {"steps_compared": 3}, "verdict"),
    (GATE, {"steps": 20000}, "asked"),
    (GATE, {"proof": "Everything."}, "proof"),
    (GATE, {"command": "poros gate --family gemma3 --shape tiny"}, "command"),
    (GATE, {"command": "poros gate --family qwen2 --shape 7b --steps 200"}, "command"),
    (GATE, {"evidence.adapter_tensors_trained": 0}, "evidence"),
    (GATE, {"losses.streamed": [1.0, 2.0, 3.0]}, "losses"),
    (GATE, {"losses.streamed.7": 12.0}, "losses"),
    (GATE, {"arms.streamed.bytes_streamed_per_step": 0}, "evidence"),
    (GATE, {"arms.streamed.peak_allocated_bytes": 9_000_000_000}, "peaks"),
    (GATE, {"stack.poros_commit": "deadbeef"}, "stack"),
    (GATE, {"stack.gpu": "NVIDIA T4"}, "proof"),
    (GATE, {"layers.of": 30}, "asked"),
    (GATE, {"dropout": 0.0}, "asked"),
    (GATE, {"settings.deterministic": False}, "asked"),
    (GATE, {"asked.attention": "flash"}, "asked"),
    (GATE, {"row.settings.steps": 20}, "row"),
    (GATE, {"segments.0.last": 199}, "segments"),
    (GATE, {"control": None, "control_exact": None}, "control"),
    (GATE, {"control.steps_compared": 20}, "control"),
    (GATE, {"planted_fault": {"tensor": "x"}}, "verdict"),
    (GATE, {"void_reasons": ["it did not stream"]}, "verdict"),
    (GATE, {"control.first_divergence": FOUND}, "verdict"),
    (DIVERSE, {"verdict": "exact"}, "verdict"),
    (DIVERSE, {"control_exact": True}, "control"),
    (BUDGET, {"against.same_stack": False}, "verdict"),
    (BUDGET, {"arms.streamed.resident_units": 99}, "evidence"),
    (BUDGET, {"settings.vram_budget": 80_000_000_000}, "asked"),
    (CONTROL, {"faulty.verdict": "exact"}, "verdict"),
    (CONTROL, {"clean.verdict": "diverged"}, "verdict"),
    (CONTROL, {"verdict": "missed"}, "verdict"),
    (CONTROL, {"found": None}, "found"),
    (CONTROL, {"plant": "flipped-bit"}, "plant"),
    (CONTROL, {"clean.asked.steps": 2}, "asked"),
    (LOOP, {"arms.poros.adapter_sha256": "0"}, "verdict"),
    (LOOP, {"arms.poros.losses.3": 1.0}, "verdict"),
    (LOOP, {"steps": 2000}, "losses"),
    (LOOP, {"loop": "sft"}, "command"),
    (LOOP, {"arms.poros.counters": None}, "arms"),
    (COST, {"step_over_floor": 0.5}, "link"),
    (COST, {"link_floor_seconds": 0.1}, "link"),
    (COST, {"peak_allocated_bytes": 9_000_000_000}, "peaks"),
    (COST, {"step_seconds.median": 0.1}, "steps"),
    (COST, {"losses": [1.0]}, "losses"),
    (COST, {"batch": 8}, "introduced"),
    (COST, {"rank": 4}, "introduced"),
    (COST, {"dropout": 0.0}, "introduced"),
    (COST, {"stack.gpu": "NVIDIA T4"}, "introduced"),
    (COST, {"shape": "32b"}, "command"),
    (COST, {"settings.optimizer_state": "host"}, "command"),
    (COST, {"seq_len": 4096}, "command"),
    (REFUSED, {"peak_allocated_bytes": 1}, "outcome"),
    (REFUSED, {"outcome": "trained"}, "outcome"),
    (CARD, {"within_cap": False}, "peaks"),
    (CARD, {"settings.cap_bytes": 6_000_000_000}, "peaks"),
    (REAL, {"graph_share": 1.0}, "graphs"),
    (REAL, {"widths": [64]}, "losses"),
    (REAL, {"settings.pad_to_multiple_of": 512}, "command"),
    (LOAD, {"seconds": 1.0}, "floor"),
    (LOAD, {"floor_seconds": 1.0}, "floor"),
    (LOAD, {"rates.read": 1e9}, "floor"),
    (LOAD, {"host_store_bytes": 1_000_000_000}, "sizes"),
    (LOAD, {"host_peak_bytes": 1}, "peaks"),
    (LOAD, {"report.host": "mmap"}, "report"),
    (LOAD, {"settings.cold": False}, "command"),
    (BYTES, {"mismatched": 1}, "bytes"),
    (BYTES, {"void_reasons": ["nothing was read"]}, "verdict"),
    (BYTES, {"runs.0.tensors": 1}, "bytes"),
]


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    MUTANTS,
    ids=[f"{name.removesuffix('.json')}: {', '.join(changes)}" for name, changes, _ in MUTANTS],
)
def test_a_record_that_was_edited_is_found(
    name: str, changes: dict[str, Any], complaint: str
) -> None:
    record = copy.deepcopy(ours(name))
    for where, value in changes.items():
        *outer, last = [int(step) if step.isdigit() else step for step in where.split(".")]
        held: Any = record
        for step in outer:
            held = held[step]
        assert held[last] != value
        held[last] = value
    found = wrong_in(record)
    assert [problem for problem in found if problem.startswith(f"{complaint}:")], found
