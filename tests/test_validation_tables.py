"""The tables of docs/validation/README.md: current, and right for every kind of record."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poros_core.gate.matrix import read_matrix

ROOT = Path(__file__).resolve().parent.parent
VALIDATION = ROOT / "docs" / "validation"


@pytest.fixture
def tables() -> Iterator[Any]:
    """Give the script as a module, found as it finds itself."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("validation_tables")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VALIDATION / "qwen2-7b.json").read_text(encoding="utf-8"))
    figures = {"resident": (12_600_000_000, 0.41), "streamed": (2_990_000_000, 0.195)}
    for name, (peak, seconds) in figures.items():
        found["arms"][name] |= {"peak_allocated_bytes": peak, "step_seconds": seconds}
    return found


def rows(text: str, link: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if f"]({link})" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_is_current(tables: Any) -> None:
    page = (VALIDATION / "README.md").read_text(encoding="utf-8")
    wanted = tables.with_tables(page, tables.page(tables.read_records(VALIDATION)))
    assert page == wanted, "run `make tables`"


def test_every_record_has_one_row(tables: Any) -> None:
    page = (VALIDATION / "README.md").read_text(encoding="utf-8")
    records = tables.read_records(VALIDATION)
    assert len(records) >= 5
    for name in records:
        assert len(rows(page, name)) == 1, name


def test_every_row_of_the_matrix_is_recorded_or_said_not_to_be(tables: Any) -> None:
    records = tables.read_records(VALIDATION)
    page = tables.page(records)
    wanted = [row for row in read_matrix("all") if row.group != "ci"]
    assert len(wanted) > 40
    for row in wanted:
        assert (f"{row.name}.json" in records) is (f"`{row.name}`" not in page), row.name


def test_a_gate(tables: Any, record: dict[str, Any]) -> None:
    record["settings"] |= {"optimizer_state": "host", "resumed_at": 25}
    record["settings"] |= {"resident_checkpointing": True, "weights": "rolled"}
    record |= {"accumulate": 4, "block_size": 2, "data": "some.safetensors"}
    [row] = rows(tables.page({"a.json": record}), "a.json")
    assert row == [
        "qwen2 7b NF4",
        "50 steps, 4 x 1 x 512 tokens, dropout 0.1, block size 2, optimizer state on the host, "
        "resumed after step 25, resident with checkpointing, layers' weights rolled copies, "
        "data some.safetensors",
        "**exact**",
        "12.60 GB → 2.99 GB",
        "0.410 s → 0.195 s",
        "[a](a.json)",
    ]


def test_a_run_tells_every_setting_that_is_not_the_usual_one(
    tables: Any, record: dict[str, Any]
) -> None:
    usual = tables.page({"a.json": record})
    for name, found in record["settings"].items():
        other = copy.deepcopy(record)
        other["settings"][name] = 17_000_000_000 if name == "vram_budget" else not found
        if name in ("host", "weights"):
            assert (
                tables.page({"a.json": {**record, "settings": {**record["settings"], name: None}}})
                == usual
            )
            other["settings"][name] = "mmap" if name == "host" else "rolled"
        elif name == "block_size":  # it stands at the top
            other[name] = 2
        assert tables.page({"a.json": other}) != usual, name
        in_a_mode = copy.deepcopy(other)
        in_a_mode["settings"]["tf32"] = True
        mode = {**record, "settings": {**record["settings"], "tf32": True}}
        if name != "tf32":
            assert tables.page({"a.json": in_a_mode}) != tables.page({"a.json": mode}), name
    for change in ({"loader": "standard"}, {"rank": 64}):
        assert tables.page({"a.json": {**record, **change}}) != usual
    budget = {**record, "settings": {**record["settings"], "vram_budget": 17_000_000_000}}
    [row] = rows(tables.page({"a.json": budget}), "a.json")
    assert row[1] == "50 steps, 1 x 512 tokens, dropout 0.1, budget 17 GB"


def test_a_mode_that_is_not_deterministic(tables: Any, record: dict[str, Any]) -> None:
    record["settings"] |= {"attention_kernels": "flash", "deterministic": False}
    divergence = {"step": 3, "surface": "grad_norms", "tensor": "x"}
    record |= {"verdict": "not-deterministic", "control": {"first_divergence": divergence}}
    text = tables.page({"mode.json": record})
    assert "1 records: 1 not-deterministic." in text
    [row] = rows(text, "mode.json")
    assert row[:5] == [
        "deterministic kernels off, attention: flash only",
        "qwen2 7b NF4",
        "50 steps, 1 x 512 tokens, dropout 0.1",
        "not-deterministic",
        "gradient norms, step 3",
    ]


def test_a_negative_control(tables: Any, record: dict[str, Any]) -> None:
    control = {
        "kind": "negative-control",
        "verdict": "caught",
        "plant": "rng-not-restored",
        "found": {"step": 2, "surface": "loss", "tensor": "micro-batch 0"},
        "faulty": record,
        "clean": record,
        "stack": record["stack"],
    }
    [row] = rows(tables.page({"control.json": control}), "control.json")
    assert row[:4] == [
        "rng not restored",
        "qwen2 7b NF4",
        "**caught**",
        "step 2, loss, `micro-batch 0`",
    ]
    missed = {**control, "verdict": "missed", "found": None}
    [row] = rows(tables.page({"control.json": missed}), "control.json")
    assert row[2:4] == ["missed", "-"]


def test_some_layers_of_a_model_are_not_all_of_it(tables: Any, record: dict[str, Any]) -> None:
    record |= {"kind": "leading-layers-parity", "layers": {"trained": 4, "of": 28}}
    [row] = rows(tables.page({"part.json": record}), "part.json")
    assert row[:2] == ["leading layers parity", "qwen2 7b NF4, first 4 of 28 layers"]


def test_a_cpu_and_a_fault_in_the_page(tables: Any, record: dict[str, Any]) -> None:
    changed = copy.deepcopy(record)
    changed["stack"] |= {"gpu": None, "driver": None}
    changed["arms"]["streamed"] = {"peak_allocated_bytes": None, "step_seconds": None}
    text = tables.page({"cpu.json": changed})
    assert "Made on a CPU (x86_64), torch" in text
    assert rows(text, "cpu.json")[0][3:5] == ["12.60 GB → -", "0.410 s → -"]
    with pytest.raises(SystemExit, match="tables: begin"):
        tables.with_tables("no markers", text)


def test_the_command(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "VALIDATION", tmp_path)
    (tmp_path / "a.json").write_text((VALIDATION / "qwen2-7b.json").read_text())
    (tmp_path / "not-a-record.json").write_text("[]")
    page = tmp_path / "README.md"
    page.write_text(f"Before\n\n{tables.BEGIN}\nold\n{tables.END}\n\nAfter\n")
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("Before")
    assert text.endswith("After\n")
    assert "old" not in text
    assert len(rows(text, "a.json")) == 1
