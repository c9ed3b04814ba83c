"""Write the tables of results.md from the records in records/.

    make tables                                   rewrite them
    python benchmarks/result_tables.py --check    exit 1 if they are not current

Of one measurement made twice the later run counts, with all that it compared: figures of different
runs never stand in one ratio.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import validation_tables

from poros_core.planner.settings import RunSettings
from poros_core.planner.step_time import CARDS, StepTime, step_time
from poros_core.planner.weights import sort_weights
from poros_core.plugins import plugins
from poros_core.schedule import spread

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.md"
_INTRO = """# Results

Written by `make tables` from the [records](records). [README.md](README.md) says how they were
measured, and each record with what command, on what hardware and with which versions. Qwen2.5
shapes with seeded random weights, rank 16, batch 1, dropout 0.05, fused AdamW, one NVIDIA H200 on
PCIe 5 x16. Sizes in GB (1e9 bytes), times in seconds, medians of ten steps or more."""
_PLOTS = """## Plots

![peak and step against budget](plots/budget.png)
![step over the floor, and over a resident step, against tokens](plots/tokens.png)
![peak and step against block size](plots/block-size.png)

Drawn by `python benchmarks/plots.py`."""

Record = Mapping[str, Any]

section = partial(validation_tables.section, level=2)


def read(folder: Path) -> list[Record]:
    """Return every record of a folder, oldest first; each has its file's name as ``file``."""
    found = []
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "kind" in content:
            found.append({**content, "file": path.name})
    return sorted(found, key=lambda record: (str(record["date"]), record["file"]))


def latest(records: Iterable[Record], wanted: Callable[[Record], bool]) -> list[Record]:
    """Return the records that are wanted, of the latest run that has one."""
    found = [record for record in records if wanted(record)]
    return [record for record in found if record["run_id"] == found[-1]["run_id"]]


def page(records: Sequence[Record]) -> str:
    """Return the whole page."""
    costs = [record for record in records if record["kind"] == "training-cost"]
    sections = [
        _INTRO,
        _budgets(costs),
        _blocks(costs),
        *(_lengths(costs, shape) for shape in ("7b", "32b")),
        _peers(costs),
        _others(costs),
        _profiles([record for record in records if record["kind"] == "step-profile"]),
        _loads([record for record in records if record["kind"] == "load-cost"]),
        _PLOTS,
    ]
    return "\n\n".join(part for part in sections if part) + "\n"


def _budgets(costs: Sequence[Record]) -> str:
    rows = latest(costs, lambda r: r["shape"] == "32b" and budget_of(r) is not None)
    return section(
        "32B by budget",
        "*Pace* is what the planner gives for the sum over forward, head and backward of what "
        "takes longer, link or compute. A forward finds on the device what the budget holds, "
        "whichever layers these are, and must wait for all others, while two thirds of the "
        "compute are in the backward; so no order of copies gets a step to the longer of the "
        "two sums. *GPU* is the driver's figure.",
        ("budget", "resident", "allocated", "GPU", "step", "link floor", "pace", "step / pace", ""),
        [
            [
                _budget(r),
                f"{r['resident_units']} of {r['layers']}",
                *(_gb(r, name) for name in ("peak_allocated_bytes", "peak_device_bytes")),
                _step(r),
                f"{r['link_floor_seconds']:.3f}",
                f"{predicted(r).pace:.3f}",
                f"{step_seconds(r) / predicted(r).pace:.2f}",
                _link(r),
            ]
            for r in sorted(rows, key=lambda r: budget_of(r) or 0.0)
        ],
    )


def _blocks(costs: Sequence[Record]) -> str:
    usual = [r for r in costs if r["method"] == "poros" and _plain(r)]
    sizes = {r["run_id"] for r in usual if r["settings"]["block_size"] != 1}
    rows = latest(usual, lambda r: r["shape"] == "32b" and r["run_id"] in sizes)
    return section(
        "32B by block size",
        "How many layers share one boundary. Bits are equal for every value.",
        (
            "layers in a block",
            "allocated",
            "reserved",
            "GPU",
            "step",
            "link floor",
            "step / floor",
            "",
        ),
        [
            [str(r["settings"]["block_size"]), *_memory(r), *_times(r), _link(r)]
            for r in sorted(rows, key=lambda r: int(r["settings"]["block_size"]))
        ],
    )


def _lengths(costs: Sequence[Record], shape: str) -> str:
    long = {r["run_id"] for r in costs if r["shape"] == shape and r["seq_len"] == 1024}
    rows = latest(costs, lambda r: r["shape"] == shape and r["run_id"] in long)
    ours = {r["seq_len"]: r for r in rows if r["method"] == "poros"}
    theirs = {r["seq_len"]: r for r in rows if r["method"] == "peft-checkpointing"}
    return section(
        f"{shape.upper()} by tokens",
        "*Resident* is PEFT with gradient checkpointing in the same run, kernel by kernel.",
        (
            *("tokens", "allocated", "reserved", "GPU", "step", "link floor", "step / floor"),
            *("resident allocated", "resident step", "step / resident", ""),
        ),
        [
            [
                *(str(length), *_memory(ours[length]), *_times(ours[length])),
                _gb(theirs[length], "peak_allocated_bytes"),
                _step(theirs[length]),
                _ratio(ours[length], theirs[length]),
                f"{_link(ours[length])}, {_link(theirs[length], 'resident')}",
            ]
            for length in sorted(ours.keys() & theirs.keys())
        ],
    )


def _peers(costs: Sequence[Record]) -> str:
    runs = {r["run_id"] for r in costs if r["method"] == "accelerate-offload"}
    rows = latest(costs, lambda r: r["run_id"] in runs)
    ours = next((r for r in rows if r["method"] == "poros"), None)
    return section(
        "7B beside other methods",
        "In separate processes of one run. Accelerate's offload keeps frozen weights in "
        "pageable host memory; a method that refuses says why.",
        ("method", "precision", "allocated", "reserved", "GPU", "step", "step / Poros", ""),
        [
            [
                r["method"],
                r["precision"].upper(),
                *(_memory(r) if r["outcome"] == "trained" else (_why(r), "", "")),
                _step(r),
                f"{step_seconds(r) / step_seconds(ours):.2f}"
                if ours and r["step_seconds"]
                else "-",
                _link(r),
            ]
            for r in rows
        ],
    )


def _others(costs: Sequence[Record]) -> str:
    fits = latest(costs, lambda r: r["settings"].get("vram_budget") == "auto")
    run = fits[-1]["run_id"] if fits else None
    rows = [*(r for r in costs if r["run_id"] == run)]
    rows += latest(costs, lambda r: r["shape"] == "32b" and r["precision"] == "bf16")
    return section(
        "A base that fits, and a base in BF16",
        'With `vram_budget="auto"` all of 7B stays on the card, and the resident path is the right '
        "choice. The base of 32B in BF16 was made in the host store, since checkpoint and store "
        "together exceed the machine.",
        (
            "model",
            "method",
            "allocated",
            "reserved",
            "GPU",
            "step",
            "link floor",
            "step / floor",
            "",
        ),
        [
            [
                f"{r['shape'].upper()} {r['precision'].upper()}",
                _method(r),
                *_memory(r),
                *(_times(r) if r["method"] == "poros" else (_step(r), "-", "-")),
                _link(r),
            ]
            for r in rows
        ],
    )


def _profiles(profiles: Sequence[Record]) -> str:
    rows = latest(profiles, lambda r: True)
    return section(
        "Where a step's time goes",
        "Shares of three traced steps: the link copies to the device, the GPU computes, kernels "
        "wait for copies, nothing happens. *Host* is what it takes the loop to launch a step.",
        (
            "model",
            "method",
            "link",
            "GPU",
            "waiting",
            "idle",
            "host",
            "launches a step",
            "step",
            "",
        ),
        [
            [
                r["shape"].upper(),
                _method(r),
                *(f"{100 * trace[k]:.0f} %" for k in ("link_busy", "gpu_busy", "stalled", "idle")),
                f"{r['profile']['host_seconds']:.3f}",
                str(trace["launches"] // r["profile"]["profiled_steps"]),
                _step(r),
                _link(r),
            ]
            for r in rows
            for trace in [r["profile"]["trace"]]
        ],
    )


def _loads(loads: Sequence[Record]) -> str:
    rows: list[Record] = []
    for shape in ("0.5b", "7b", "32b", "72b"):
        rows += latest([r for r in loads if r["shape"] == shape], lambda r: True)
    sizes = ("device_peak_bytes", "host_peak_bytes", "host_steady_bytes", "host_store_bytes")
    return section(
        "Loads",
        "Peaks over what was there before. The floor is the slowest stage by itself: reading, "
        "quantising, copying or page-locking. 0.5B and 7B come from a disk whose cache was "
        "dropped, 32B from a memory disk, 72B from bf16 tensors made one at a time. Every byte "
        "was compared with a standard load's, and none differs.",
        (
            *("model", "load", "device peak", "host peak", "host after", "base"),
            *("time", "floor", "time / floor", ""),
        ),
        [
            [
                r["shape"].upper(),
                r["method"],
                *(_gb(r, name) for name in sizes),
                *(f"{r[name]:.2f}" for name in ("seconds", "floor_seconds", "seconds_over_floor")),
                _link(r),
            ]
            for r in rows
            if r["outcome"] == "loaded"
        ],
    )


# what the planner says


def predicted(record: Record) -> StepTime:
    """Return what the planner says of a streamed run, at the link rate that was measured."""
    settings = record["settings"]
    family = next(e.value for e in plugins().families if e.value.name == record["family"])
    weights = sort_weights(family.weights(family.shapes[record["shape"]]))
    run = RunSettings(
        precision=record["precision"],
        seq_len=record["seq_len"],
        batch=record["batch"],
        rank=record["rank"],
        block_size=settings["block_size"],
        graphs=settings["graphs"] != "off",
        optimizer_state=settings["optimizer_state"],
        fused=True,
    )
    rates = attrs.evolve(CARDS["h200"], link=record["link_bytes_per_second"])
    resident = spread(record["resident_units"], layers=len(weights.layers))
    return step_time(weights, run, rates, resident=resident)


# cells


def step_seconds(record: Record) -> float:
    """Return the median step."""
    return float(record["step_seconds"]["median"])


def budget_of(record: Record) -> float | None:
    """Return a budget that is a size, in GB; None for none, and for ``"auto"``."""
    budget = record["settings"].get("vram_budget")
    if record["card"] is not None or not isinstance(budget, str) or not budget.endswith("GB"):
        return None
    return float(budget.removesuffix("GB"))


def _plain(record: Record) -> bool:
    settings = record["settings"]
    return (
        record["outcome"] == "trained"
        and record["card"] is None
        and settings["vram_budget"] is None
        and settings["optimizer_state"] == "device"
        and not settings.get("offload_activations")
    )


def _budget(record: Record) -> str:
    host = record["settings"]["optimizer_state"] == "host"
    return f"{budget_of(record):g} GB{', optimizer state on the host' if host else ''}"


def _method(record: Record) -> str:
    budget = record["settings"].get("vram_budget")
    return record["method"] + (f", budget {budget}" if budget else "")


def _gb(record: Record, name: str) -> str:
    return f"{record[name] / 1e9:.2f}"


def _memory(record: Record) -> list[str]:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
    return [_gb(record, name) for name in names]


def _step(record: Record) -> str:
    return "-" if record["step_seconds"] is None else f"{step_seconds(record):.3f}"


def _ratio(record: Record, other: Record | None) -> str:
    if other is None or record["step_seconds"] is None:
        return "-"
    return f"{step_seconds(record) / step_seconds(other):.2f}"


def _times(record: Record) -> list[str]:
    return [
        _step(record),
        f"{record['link_floor_seconds']:.3f}",
        f"{record['step_over_floor']:.2f}",
    ]


def _why(record: Record) -> str:
    return f"{record['outcome']}: {str(record['error']).split('. ')[0]}"


def _link(record: Record, text: str = "record") -> str:
    return f"[{text}](records/{record['file']})"


def main(arguments: Iterable[str]) -> int:
    """Rewrite the page, or check it."""
    return validation_tables.settle(RESULTS, page(read(HERE / "records")), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
