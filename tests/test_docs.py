"""The documentation: commands that exist, links that lead somewhere, figures that are recorded."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from poros.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(?:bash|console|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(poros [a-z-]+[^`]*)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands(page: Path) -> list[str]:
    """Return every ``poros ...`` command line of a page's blocks."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    lines = [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines]
    return [line for line in lines if line.startswith("poros ")]


COMMANDS = [
    pytest.param(command, id=f"{name}: {command[:60]}")
    for name, page in zip(IDS, PAGES, strict=True)
    for command in commands(page)
]


def parse(command: str) -> None:
    """Parse a command line as the command line does, and run nothing."""
    group: Any = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    while words and hasattr(group, "commands"):
        assert words[0] in group.commands, f"there is no command {words[0]}"
        group, words = group.commands[words[0]], words[1:]
    group.make_context("poros", words)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_exists(command: str) -> None:
    parse(command)


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="there is no command"):
        parse("poros ungate")
    with pytest.raises(Exception, match="--no-such"):
        parse("poros gate --no-such")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), link
    for command in INLINE.findall(text):
        name = command.split()[1]
        assert name in typer.main.get_command(app).commands, command  # type: ignore[attr-defined]


REPORT = ROOT / "docs" / "report.md"
ROW = re.compile(r"^\| (.+) \| \[[\w.-]+\]\((validation/[\w.-]+\.json)\) \|$", re.MULTILINE)


def test_the_reports_figures_are_those_of_records() -> None:
    rows = ROW.findall(REPORT.read_text(encoding="utf-8"))
    assert len(rows) >= 3
    for cells, path in rows:
        record = json.loads((REPORT.parent / path).read_text(encoding="utf-8"))
        assert (record["verdict"], record["stack"]["gpu"]) == ("exact", "NVIDIA H200")
        assert (record["rank"], record["batch"], record["seq_len"]) == (16, 1, 512)
        assert (record["precision"], record["settings"]["deterministic"]) == ("nf4", True)
        arms = [record["arms"][name] for name in ("resident", "streamed")]
        assert [cell.strip() for cell in cells.split("|")][1:] == [
            f"{arms[1]['bytes_streamed_per_step'] / 1e9:.2f} GB",
            *(f"{arm['peak_allocated_bytes'] / 1e9:.2f} GB" for arm in arms),
            *(f"{arm['step_seconds']:.3f} s" for arm in arms),
        ]


def test_the_reports_arithmetic_is_the_planners() -> None:
    from poros_core.planner.weights import sort_weights
    from poros_families.qwen2 import QWEN2

    assert QWEN2.weights is not None
    layers = sum(sort_weights(QWEN2.weights(QWEN2.shapes["32b"])).layer_bytes("nf4"))
    text = REPORT.read_text(encoding="utf-8")
    assert f"{layers / 1e9:.1f} GB of NF4 layers for a 32B model" in text


LOADING = ROOT / "docs" / "loading.md"
LOADED = re.compile(r"^\| (.+) \| \[record\]\((\.\./benchmarks/[\w./-]+\.json)\) \|$", re.MULTILINE)


def test_what_loads_cost_is_what_records_say() -> None:
    rows = LOADED.findall(LOADING.read_text(encoding="utf-8"))
    assert len(rows) >= 3
    sizes = ("device_peak_bytes", "host_peak_bytes", "host_steady_bytes")
    for cells, path in rows:
        record = json.loads((LOADING.parent / path).read_text(encoding="utf-8"))
        assert (record["kind"], record["outcome"]) == ("load-cost", "loaded")
        assert record["stack"]["gpu"] == "NVIDIA H200"
        assert cells.lower().startswith(record["shape"])
        assert f"{record['host_store_bytes'] / 1e9:.2f}" in LOADING.read_text(encoding="utf-8")
        assert [cell.strip() for cell in cells.split("|")][1:] == [
            *(f"{record[name] / 1e9:.2f} GB" for name in sizes),
            *(f"{record[name]:.2f} s" for name in ("seconds", "floor_seconds")),
        ]
