"""Write the tables of docs/validation/README.md from the records beside it.

    make tables                                       rewrite them
    python benchmarks/validation_tables.py --check    exit 1 if they are not current

Everything between the two markers is written; the rest of the page is prose. A row of the gate
matrix without a record is listed as not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poros_core.gate.matrix import CONTROL, read_matrix
from poros_core.status import PARITY

VALIDATION = Path(__file__).resolve().parent.parent / "docs" / "validation"
BEGIN = "<!-- tables: begin (benchmarks/validation_tables.py) -->"
END = "<!-- tables: end -->"
LOOP = "training-loop-parity"
IN_CI = "ci"
SURFACES = {
    "loss": "loss",
    "grad_norms": "gradient norms",
    "optimizer_state": "optimizer state",
    "adapter_weights": "adapter weights",
}
MODES: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "deterministic": (True, lambda value: "deterministic kernels off"),
    "attention_kernels": ("auto", lambda value: f"attention: {value} only"),
    "tf32": (False, lambda value: "TF32"),
    "autocast": ("off", lambda value: f"{value} autocast"),
    "compile": (False, lambda value: "compiled layers"),
    "graphs": ("auto", lambda value: f"graphs {value}"),
}
"""Settings that make a mode: the usual value, and how another one is told."""
HOSTS = {"pageable": "pageable memory", "mmap": "files (mmap)"}
WEIGHTS = {"rolled": "layers' weights rolled copies"}
UNTOLD = {"host": None, "weights": None}
"""What else says nothing: a base that ``poros.load`` did not place, a checkpoint of the user's."""
RANK = 16
RUNS: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "block_size": (1, lambda value: f"block size {value}"),
    "vram_budget": (None, lambda value: f"budget {_amount(value)}"),
    "optimizer_state": ("device", lambda value: f"optimizer state on the {value}"),
    "offload_activations": (False, lambda value: "activations on the host"),
    "copy_ahead": (False, lambda value: "copies ahead"),
    "host": ("pinned", lambda value: f"base in {HOSTS.get(value, value)}"),
    "runtime": ("streamed", lambda value: f"runtime {value}"),
    "poison": (False, lambda value: "vacated memory poisoned"),
    "backward": ("each", lambda value: f"backward: {value}"),
    "padding": ("right", lambda value: f"padded on the {value}"),
    "resumed_at": (None, lambda value: f"resumed after step {value}"),
    "resident_checkpointing": (False, lambda value: "resident with checkpointing"),
    "weights": ("drawn", lambda value: WEIGHTS.get(value, f"weights {value}")),
    "dtype": ("bfloat16", str),
    "attention": ("sdpa", lambda value: f"attention {value}"),
    "optimizer": ("AdamW", str),
    "learning_rate": (2e-4, lambda value: f"learning rate {value}"),
    "clip": (1.0, lambda value: f"clipped at {value}" if value else "not clipped"),
}
"""The other settings of a gate, in the same way."""

Record = Mapping[str, Any]


def read_records(folder: Path) -> dict[str, Record]:
    """Return every record of a folder by its file's name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "kind" in content:
            found[path.name] = content
    return found


def page(records: Mapping[str, Record]) -> str:
    """Return what stands between the markers."""
    sections = [
        _summary(records),
        section(
            "Training, streamed against resident",
            "Four surfaces (loss, gradient norms, optimizer state, adapter weights) compared bit "
            "for bit at every step. Peaks are the allocator's, times are medians.",
            ("model", "run", "verdict", "peak: resident → streamed", "step", "record"),
            [_parity(n, r) for n, r in records.items() if r["kind"] == PARITY and not _mode(r)],
        ),
        section(
            "Modes",
            "The same with other kernels. *Not deterministic* means that two resident runs, which "
            "Poros does not touch, differ from each other: then nothing is claimed.",
            ("mode", "model", "run", "verdict", "where resident runs differ", "record"),
            [_mode_row(n, r) for n, r in records.items() if r["kind"] == PARITY and _mode(r)],
        ),
        section(
            "Other people's loops",
            "One script with and without `poros.prepare`, each in a process of its own, the "
            "adapter files compared byte for byte.",
            ("model", "loop", "verdict", "peak: plain → Poros", "whole script", "record"),
            [_loop(n, r) for n, r in records.items() if r["kind"] == LOOP],
        ),
        section(
            "Negative controls",
            "A fault planted in the streamed arm, which the gate must find, and the same run "
            "without it, which must be exact.",
            ("fault", "model", "verdict", "first seen", "record"),
            [_control(n, r) for n, r in records.items() if r["kind"] == CONTROL],
        ),
        _others(records),
        _pending(records),
    ]
    return "\n\n".join(section for section in sections if section)


def _summary(records: Mapping[str, Record]) -> str:
    verdicts: dict[str, int] = {}
    for record in records.values():
        verdicts[record["verdict"]] = verdicts.get(record["verdict"], 0) + 1
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    stacks = sorted({_stack(record["stack"]) for record in records.values()})
    return f"{len(records)} records: {counts}. Made on {'; on '.join(stacks)}."


def _stack(stack: Mapping[str, Any]) -> str:
    where = (stack["gpu"] or f"a CPU ({stack['cpu']})").removeprefix("NVIDIA ")
    driver = f", driver {stack['driver']}" if stack["driver"] else ""
    names = ("torch", "transformers", "peft", "bitsandbytes")
    return f"{where}{driver}, {', '.join(f'{name} {stack[name]}' for name in names)}"


def section(
    title: str,
    text: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    level: int = 3,
) -> str:
    """Return a title, a text and a table; nothing where there are no rows."""
    if not rows:
        return ""
    lines = [headings, ["---"] * len(headings), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{'#' * level} {title}\n\n{text}\n\n{table}"


def _parity(name: str, record: Record) -> list[str]:
    resident, streamed = (record["arms"].get(arm, {}) for arm in ("resident", "streamed"))
    return [
        _model(record),
        _run(record),
        _verdict(record),
        f"{_gb(resident)} → {_gb(streamed)}",
        f"{_seconds(resident)} → {_seconds(streamed)}",
        _link(name),
    ]


def _mode_row(name: str, record: Record) -> list[str]:
    found = None if record["control"] is None else record["control"]["first_divergence"]
    where = "-" if found is None else f"{SURFACES[found['surface']]}, step {found['step']}"
    return [
        ", ".join(_mode(record)),
        _model(record),
        _run(record),
        _verdict(record),
        where,
        _link(name),
    ]


def _loop(name: str, record: Record) -> list[str]:
    plain, poros = record["arms"]["plain"], record["arms"]["poros"]
    titles = {"trainer": "HF `Trainer`", "sft": "TRL `SFTTrainer`"}
    return [
        _model(record),
        f"{titles[record['loop']]}, {record['autocast']} autocast, {_run(record)}",
        _verdict(record),
        f"{_gb(plain)} → {_gb(poros)}",
        f"{plain['seconds']:.1f} s → {poros['seconds']:.1f} s",
        _link(name),
    ]


def _control(name: str, record: Record) -> list[str]:
    found = record["found"]
    where = "-"
    if found is not None:
        where = f"step {found['step']}, {SURFACES[found['surface']]}, `{found['tensor']}`"
    model = _model(record["faulty"])
    return [record["plant"].replace("-", " "), model, _verdict(record), where, _link(name)]


def _others(records: Mapping[str, Record]) -> str:
    known = (PARITY, LOOP, CONTROL)
    rows = [
        [record["kind"].replace("-", " "), _model(record), _verdict(record), _link(name)]
        for name, record in records.items()
        if record["kind"] not in known
    ]
    text = "What each proves stands in it, under `proof`."
    return section("Other records", text, ("what", "model", "verdict", "record"), rows)


def _pending(records: Mapping[str, Record]) -> str:
    rows = [row for row in read_matrix("all") if row.group != IN_CI]
    missing = [row for row in rows if f"{row.name}.json" not in records]
    if not missing:
        return ""
    lines = [
        f"- {group}: {', '.join(f'`{row.name}`' for row in missing if row.group == group)}"
        for group in dict.fromkeys(row.group for row in missing)
    ]
    return (
        "### Not run\n\nRows of the gate matrix without a record here, of which nothing is "
        "claimed. The group `ci` runs with the tests, on a CPU, and leaves no record.\n\n"
        + "\n".join(lines)
    )


def _mode(record: Record) -> list[str]:
    return _unusual(record["settings"], MODES)


def _unusual(
    settings: Mapping[str, Any], known: Mapping[str, tuple[Any, Callable[[Any], str]]]
) -> list[str]:
    return [
        told(settings[name])
        for name, (usual, told) in known.items()
        if settings.get(name, usual) not in (usual, UNTOLD.get(name, usual))
    ]


def _amount(value: Any) -> str:
    return f"{value / 1e9:.3g} GB" if isinstance(value, int) else str(value)


def _model(record: Record) -> str:
    layers = record.get("layers")
    part = ""
    if layers is not None and layers["trained"] < layers["of"]:
        part = f", first {layers['trained']} of {layers['of']} layers"
    return f"{record['family']} {record['shape']} {record['precision'].upper()}{part}"


def _run(record: Record) -> str:
    parts = [f"{record.get('steps_compared', record['steps'])} steps"]
    size = f"{record['batch']} x {record['seq_len']} tokens"
    parts.append(f"{record['accumulate']} x {size}" if record["accumulate"] > 1 else size)
    if record["rank"] != RANK:
        parts.append(f"rank {record['rank']}")
    if record["dropout"]:
        parts.append(f"dropout {record['dropout']}")
    if record.get("loader") == "standard":
        parts.append("loaded the standard way")
    parts += _unusual({**record.get("settings", {}), "block_size": record["block_size"]}, RUNS)
    if record.get("control", ...) is None and record.get("against") is None:
        parts.append("no control")
    if record.get("data") is not None:
        parts.append(f"data {record['data']}")
    return ", ".join(parts)


def _verdict(record: Record) -> str:
    verdict = str(record["verdict"])
    return f"**{verdict}**" if verdict in ("exact", "caught") else verdict


def _gb(arm: Mapping[str, Any]) -> str:
    peak = arm.get("peak_allocated_bytes")
    return "-" if peak is None else f"{peak / 1e9:.2f} GB"


def _seconds(arm: Mapping[str, Any]) -> str:
    seconds = arm.get("step_seconds")
    return "-" if seconds is None else f"{seconds:.3f} s"


def _link(name: str) -> str:
    return f"[{name.removesuffix('.json')}]({name})"


def with_tables(text: str, tables: str) -> str:
    """Return a page with other tables between its markers."""
    before, found, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise SystemExit(f"The page has no '{BEGIN}' ... '{END}'.")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main(arguments: Iterable[str]) -> int:
    """Rewrite the page, or check it."""
    path = VALIDATION / "README.md"
    now = path.read_text(encoding="utf-8")
    return settle(path, with_tables(now, page(read_records(VALIDATION))), arguments)


def settle(path: Path, wanted: str, arguments: Iterable[str]) -> int:
    """Write a page, or with ``--check`` say whether it is current; return the exit status."""
    if path.exists() and path.read_text(encoding="utf-8") == wanted:
        return 0
    if "--check" in arguments:
        print(f"The tables of {path.name} in {path.parent} are not current. Run `make tables`.")
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
