"""README's figures come from committed records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| \[[\w.-]+\]\((docs/validation/[\w.-]+\.json)\) \|$", README, re.M)

COSTS = re.findall(
    r"^\| (.+) \| \[record\]\((benchmarks/records/[\w.-]+\.json)\) \|$", README, re.M
)


def _record(path: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return record


def _gb(arm: dict[str, Any]) -> str:
    return f"{arm['peak_allocated_bytes'] / 1e9:.2f} GB"


def test_there_are_rows() -> None:
    assert len(ROWS) >= 5
    assert len(COSTS) >= 3


@pytest.mark.parametrize(("cells", "path"), COSTS, ids=[path for _, path in COSTS])
def test_a_cost_is_its_record(cells: str, path: str) -> None:
    record = _record(path)
    assert record["outcome"] == "trained"
    loop = record["kind"] == "real-loop"
    assert loop or record["kind"] == "training-cost"
    settings = record["settings"]
    how = ", optimizer state on the host" if settings["optimizer_state"] == "host" else ""
    how += ", `copy_ahead=True`" if settings.get("copy_ahead") else ""
    filters = settings.get("logging_nan_inf_filter", True)
    how += "" if filters else ", `logging_nan_inf_filter=False`"
    sizes = [
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        *([] if loop else ["peak_device_bytes"]),
    ]
    times = (record["step_seconds"]["median"], record["link_floor_seconds"])
    assert [cell.strip() for cell in cells.split("|")] == [
        f"Qwen2.5 {record['shape'].upper()}{how}",
        *(f"{record[name] / 1e9:.2f} GB" for name in sizes[: 2 if loop else 3]),
        *(f"{seconds:.3f} s" for seconds in times),
        *([f"{100 * record['graph_share']:.1f} %"] if loop else []),
    ]
    assert settings.get("pad_to_multiple_of") == (64 if loop else None)
    said = (record["rank"], record["batch"], record["seq_len"], record["dropout"])
    assert said == (16, 1, 512, 0.05)
    assert record["settings"]["vram_budget"] is None
    assert record["stack"]["driver"] in README


@pytest.mark.parametrize(("cells", "path"), ROWS, ids=[path for _, path in ROWS])
def test_a_row_is_its_record(cells: str, path: str) -> None:
    record = _record(path)
    assert record["verdict"] == "exact"
    arms = record["arms"]
    if record["kind"] == "training-parity":
        first, second = arms["resident"], arms["streamed"]
        times = [f"{arm['step_seconds']:.3f} s" for arm in (first, second)]
    else:
        first, second = arms["plain"], arms["poros"]
        times = []
    assert [cell.strip() for cell in cells.split("|")][1:] == [_gb(first), _gb(second), *times]


def test_the_gate_output_is_its_record() -> None:
    arms = _record("docs/validation/qwen2-7b.json")["arms"]
    for name, arm in arms.items():
        row = re.search(rf"^{name} +(\d.+)$", README, re.M)
        assert row is not None
        streamed = arm.get("bytes_streamed_per_step")
        assert re.split(r"\s{2,}", row[1].strip()) == [
            _gb(arm),
            f"{arm['peak_reserved_bytes'] / 1e9:.2f} GB",
            f"{arm['step_seconds']:.3f} s",
            "nothing" if streamed is None else f"{streamed / 1e9:.2f} GB",
        ]


def test_the_settings_said_are_the_records() -> None:
    for _, path in ROWS:
        record = _record(path)
        assert record["stack"]["gpu"] == "NVIDIA H200"
        assert record["stack"]["driver"] in README
        assert record["stack"]["torch"].startswith("2.11")
        assert (record["rank"], record["batch"], record["seq_len"]) == (16, 1, 512)
