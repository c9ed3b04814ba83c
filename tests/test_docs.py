"""The documentation: commands that exist, links that lead somewhere, figures that are recorded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
from helpers_pages import (
    NUMBERS,
    Cells,
    Record,
    absent,
    gb,
    linked,
    model,
    read,
    seconds,
    unheld,
    wrong_rows,
)

from poros.cli import app
from poros_core.load_progress import _EVERY_S
from poros_core.packed_cache import _DEFAULT_LIMIT
from poros_core.packed_file import CHUNK
from poros_core.packing import READERS
from poros_core.planner.weights import sort_weights
from poros_families.qwen2 import QWEN2
from poros_loaders import cache_key, weight_reader

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


# figures of pages that have any

REPORT, LOADING = ROOT / "docs" / "report.md", ROOT / "docs" / "loading.md"
VALIDATION, RECORDS = ROOT / "docs" / "validation", ROOT / "benchmarks" / "records"
PEFT_7B = RECORDS / "training-cost-7b-nf4-peft-20261203T054639Z-c1c510-1.json"


def _report_row(record: Record, name: str) -> list[str]:
    said = (record["rank"], record["batch"], record["seq_len"], record["precision"])
    assert said == (16, 1, 512, "nf4")
    assert (record["verdict"], record["settings"]["deterministic"]) == ("exact", True)
    arms = [record["arms"][arm] for arm in ("resident", "streamed")]
    return [
        model(record),
        gb(arms[1]["bytes_streamed_per_step"]),
        *(gb(arm["peak_allocated_bytes"]) for arm in arms),
        *(seconds(arm["step_seconds"]) for arm in arms),
    ]


def _load_row(record: Record, name: str) -> list[str]:
    shape, method, disk = record["shape"].upper(), record["method"], record["page_cache"]
    ways = {
        "streamed": f"{shape} from the checkpoint",
        "cache-write": f"{shape} from the checkpoint, and kept in the cache",
        "cache-read": f"{shape} from the cache",
        "mmap": f'{shape}, layers left in the cache (`host="mmap"`)',
        "generated": f"{shape} from tensors made one at a time",
    }
    cold = disk == "dropped before the load"
    if method != "generated" and not cold:
        assert "--folder /dev/shm/" in record["command"]
        ways[method] = ways[method].replace("the checkpoint", "a checkpoint on a memory disk")
    sizes = ("device_peak_bytes", "host_peak_bytes", "host_steady_bytes")
    return [
        ways[method],
        *(gb(record[size]) for size in sizes),
        *(f"{record[time]:.2f} s" for time in ("seconds", "floor_seconds")),
    ]


REPORT_TABLE = (
    *("model", "streamed per step", "resident peak", "streamed peak"),
    *("resident step", "streamed step", "record"),
)
LOAD_TABLE = ("load", "device peak", "host peak", "host afterwards", "time", "floor", "record")
KINDS: Mapping[Path, Mapping[tuple[str, ...], Cells]] = {
    REPORT: {REPORT_TABLE: _report_row},
    LOADING: {LOAD_TABLE: _load_row},
}


def rows_of(page: Path) -> list[Record]:
    return [read(path) for path in linked(page, page.read_text(encoding="utf-8"))]


def gate(name: str) -> Record:
    record = read(VALIDATION / f"{name}.json")
    assert record["verdict"] == "exact"
    assert record["dropout"] > 0 or name.startswith("mode-")
    return record


def link(text: object, name: str) -> str:
    return f"[{text}](validation/{name}.json)"


def steps(name: str, what: str = "steps") -> str:
    return link(f"{gate(name)['steps']} {what}", name)


def report_sentences() -> list[str]:
    assert QWEN2.weights is not None
    layers = sum(sort_weights(QWEN2.weights(QWEN2.shapes["32b"])).layer_bytes("nf4"))
    rows = rows_of(REPORT)
    [step] = [row["arms"]["resident"]["step_seconds"] for row in rows if model(row) == "Qwen2.5 7B"]
    assert read(PEFT_7B)["step_seconds"]["median"] / step == pytest.approx(1 / 3, abs=0.03)
    families = NUMBERS[len({row["family"] for row in rows})]
    return [
        f"{layers / 1e9:.1f} GB of NF4 layers for a 32B model",
        f"On one NVIDIA H200, {families} families at published shapes with seeded random weights, "
        "NF4, rank 16 on all linear layers, batch 1, 512 tokens, deterministic kernels.",
        "an ordinary resident step of 7B takes a third of that",
        *further_gates(),
    ]


def further_gates() -> list[str]:
    resumed, alpaca = gate("qwen2-0.5b-resumed"), gate("qwen2-7b-alpaca-200")
    assert resumed["settings"]["resumed_at"] is not None
    assert alpaca["data"].startswith("alpaca")
    hosts = {"pageable": "pageable memory", "mmap": "files"}
    pageable, mmap = (
        link(hosts[gate(f"qwen2-7b-host-{host}")["settings"]["host"]], f"qwen2-7b-host-{host}")
        for host in hosts
    )
    two, four = (
        link(gate(f"qwen2-7b-accumulate-{count}")["accumulate"], f"qwen2-7b-accumulate-{count}")
        for count in (2, 4)
    )
    modes = [read(path) for path in VALIDATION.glob("mode-*.json")]
    [apart] = [mode for mode in modes if mode["verdict"] != "exact"]
    settings = apart["settings"]
    assert (settings["attention_kernels"], settings["deterministic"]) == ("flash", False)
    assert apart["verdict"] == "not-deterministic"
    controls = [read(path) for path in VALIDATION.glob("control-*.json")]
    plants: dict[str, set[str]] = {}
    for control in controls:
        assert (control["verdict"], control["found"]["step"]) == ("caught", 1)
        plants.setdefault(control["asked"]["shape"], set()).add(control["plant"])
    assert sorted(plants) == ["0.5b", "tiny"]
    assert plants["0.5b"] == plants["tiny"]
    return [
        f"0.5B for {steps('qwen2-0.5b-1000')} and {link('resumed', 'qwen2-0.5b-resumed')} against "
        f"uninterrupted; 7B for {steps('qwen2-7b-200')}, for "
        f"{steps('qwen2-7b-alpaca-200', 'of padded Alpaca records')} of changing lengths, with "
        f"accumulation over {two} and {four} micro-batches and clipping, and with the base in "
        f"{pageable} and in {mmap}; 32B for {steps('qwen2-32b-200')}; 72B for "
        f"{steps('qwen2-72b-20')}. {NUMBERS[len(modes) - 1].capitalize()} modes are exact; one, "
        "flash attention with deterministic kernels off, is not reproducible resident either. All "
        f"{NUMBERS[len(plants['tiny'])]} faults are caught in the first step, on a tiny shape and "
        "at 0.5B."
    ]


def loading_sentences() -> list[str]:
    rows = rows_of(LOADING)
    assert all(row["outcome"] == "loaded" for row in rows)
    bases = {row["shape"]: f"{row['host_store_bytes'] / 1e9:.2f}" for row in rows}
    small, middle, large = (bases[shape] for shape in ("7b", "32b", "72b"))
    [streamed] = [row for row in rows if (row["shape"], row["method"]) == ("7b", "streamed")]
    larger = streamed["read_bytes"] / streamed["host_store_bytes"]
    buffers = weight_reader._BUFFERS * weight_reader._PIECE >> 20
    return [
        f"(peaks over what was there before, page-locked memory counted; the bases take {small}, "
        f"{middle} and {large} GB; the floor is the slowest stage by itself: from a disk, reading)",
        f"reading a checkpoint that is {larger:.1f} times as large",
        f"`POROS_CACHE_LIMIT`, {_DEFAULT_LIMIT / 1e9:g} GB if it is not set",
        f"Threads read weights ahead into {buffers} MiB of page-locked buffers",
        f"up to {cache_key._SAMPLES} samples of {cache_key._SAMPLE >> 10} KiB",
        f"up to {NUMBERS[READERS]} threads hash stretches of {CHUNK >> 20} MiB",
        f"the peak is the highest of samples {1000 * _EVERY_S:g} ms apart",
    ]


SENTENCES: Mapping[Path, Callable[[], Sequence[str]]] = {
    REPORT: report_sentences,
    LOADING: loading_sentences,
}


def wrong_figures(page: Path, text: str) -> list[str]:
    """Return what in a page does not come from a record or a constant."""
    sentences = SENTENCES[page]() if page in SENTENCES else []
    found = wrong_rows(page, text, KINDS.get(page, {}))
    return [*found, *absent(text, sentences), *unheld(text, sentences)]


@pytest.mark.parametrize("page", PAGES[1:], ids=IDS[1:])
def test_every_figure_is_a_records(page: Path) -> None:
    assert wrong_figures(page, page.read_text(encoding="utf-8")) == []
    if page in KINDS:
        assert len(rows_of(page)) >= 3


def test_a_floor_is_reading_where_there_is_a_disk() -> None:
    for record in rows_of(LOADING):
        if record["page_cache"] == "dropped before the load":
            assert record["floor_seconds"] == record["stage_seconds"]["read"]


EDITS = [
    (REPORT, "| Qwen3 32B | 36.12", "| Qwen3 235B | 36.12"),
    (REPORT, "| Qwen3 32B | 36.12", "| Qwen3 32B | 46.12"),
    (REPORT, "| resident peak | streamed peak |", "| streamed peak | resident peak |"),
    (REPORT, "[200 steps](validation/qwen2-7b-200", "[20000 steps](validation/qwen2-7b-200"),
    (REPORT, "[1000 steps]", "[100000 steps]"),
    (REPORT, "Twelve", "Ninety"),
    (REPORT, "All six faults", "All nine faults"),
    (REPORT, "17.6 GB", "7.6 GB"),
    (REPORT, "five families", "nine families"),
    (REPORT, "batch 1, 512 tokens", "batch 1, 8192 tokens"),
    (REPORT, "[4](validation/qwen2-7b-accumulate-4", "[8](validation/qwen2-7b-accumulate-4"),
    (REPORT, "## Limits", "A step takes 0.2 s.\n\n## Limits"),
    (LOADING, "2.6 times as large", "9.6 times as large"),
    (LOADING, "200 GB if it is not set", "900 GB if it is not set"),
    (LOADING, "| 7B from the cache |", "| 7B from a floppy |"),
    (LOADING, "| device peak | host peak |", "| host peak | device peak |"),
    (LOADING, "44.48 GB;", "24.48 GB;"),
    (LOADING, "384 MiB", "38 MiB"),
    (LOADING, "64 samples of 4 KiB", "6 samples of 4 KiB"),
    (LOADING, "stretches of 16 MiB", "stretches of 1 MiB"),
    (LOADING, "20 ms apart", "2 ms apart"),
    (LOADING, "| 6.55 s |", "| 2.55 s |"),
    (LOADING, "on a memory disk | 0.36", "on a disk | 0.36"),
]


@pytest.mark.parametrize(("page", "said", "edited"), EDITS, ids=[edit[2][:50] for edit in EDITS])
def test_an_edit_is_found(page: Path, said: str, edited: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert said in text
    assert wrong_figures(page, text.replace(said, edited, 1)) != []
