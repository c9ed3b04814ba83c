"""Measure what loading costs: device and host memory at the peak and after, and time over a floor.

Each method loads in a process of its own. A record goes to a file each.

    python benchmarks/load_cost.py --shape 7b --folder /tmp/load --json-dir benchmarks/records \
        --methods streamed,standard,cache-write,cache-read,mmap,bf16
    python benchmarks/load_cost.py --shape 72b --folder /dev/shm/load --methods generated

The checkpoint is written to the folder if it is not there, and stays. --cold drops what a method
reads from the page cache before it loads. Exit status: 0 all loaded or refused, 1 something failed,
2 bad input.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from load_texts import CHECKED, FLOOR_METHOD, GENERATED, LOAD_METHOD
from load_work import METHODS, LoadWork, as_plain

import poros

FAILED = ("failed", "killed", "too slow")
FIGURES = (
    *("device_peak_bytes", "host_peak_bytes", "host_steady_bytes", "seconds", "floor_seconds"),
    *("disk_bytes_per_second", "packed_bytes", "unquantised_bytes"),
)
_COLUMNS = (
    *("method", "device", "host", "- base", "steady", "- base", "base", "time", "floor", "/ floor"),
    "slowest",
)

Runner = Callable[[LoadWork], dict[str, Any]]


# one process a method


def in_a_process(work: LoadWork, *, timeout: float | None = None) -> dict[str, Any]:
    """Measure in a process of its own; this one never touches the GPU."""
    with tempfile.TemporaryDirectory(prefix="poros-load-") as folder:
        out = Path(folder) / "outcome.json"
        code, error = _start(work, ["--out", str(out)], timeout=timeout)
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
    if code is None:
        return {"outcome": "too slow", "error": f"stopped after {timeout:.0f} s"}
    if code < 0:
        return {"outcome": "killed", "error": f"by signal {-code}"}
    return {"outcome": "failed", "error": error}


def _start(work: LoadWork, own: Sequence[str], *, timeout: float | None) -> tuple[int | None, str]:
    """Start this script on one work; return its exit status, None if it took too long, and the
    last line that it said."""
    command = [sys.executable, __file__, "--worker", json.dumps(as_plain(work)), *own]
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ}
    try:
        done = subprocess.run(
            command,
            env=environment,
            check=False,
            timeout=timeout,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        print("\n".join(lines[-15:]), file=sys.stderr)
    return done.returncode, lines[-1] if lines else f"exit status {done.returncode}"


def work_here(options: argparse.Namespace) -> None:
    """Be the process of one method, or the one that writes the checkpoint."""
    from load_measure import outcome, write_checkpoint

    work = LoadWork(**json.loads(options.worker))
    if options.write:
        write_checkpoint(work)
        return
    options.out.write_text(json.dumps(outcome(work)), encoding="utf-8")


def ensure_checkpoint(work: LoadWork, *, timeout: float | None) -> None:
    """Write the checkpoint in a process of its own if it is not there; its config comes last.

    Raises:
        RuntimeError: it could not be written.
    """
    if (Path(work.checkpoint) / "config.json").is_file():
        return
    code, error = _start(work, ["--write"], timeout=timeout)
    if code != 0:
        raise RuntimeError(f"the random checkpoint could not be written: {error}")


# the run


def record_of(
    work: LoadWork, found: Mapping[str, Any], *, run_id: str, command: str, date: str
) -> dict[str, Any]:
    """Return the record of one measurement.

    Args:
        work: what was measured.
        found: what its process said.
        run_id: of all measurements of this run.
        command: that started the run.
        date: when it was measured.
    """
    rest = dict(found)
    stack = rest.pop("stack", None)
    figures = {name: rest.pop(name, None) for name in FIGURES}
    seconds, floor = figures["seconds"], figures["floor_seconds"]
    generated = work.way.generated
    return {
        "outcome": rest.pop("outcome"),
        "error": rest.pop("error"),
        **work.described(),
        **figures,
        "seconds_over_floor": seconds / floor if seconds and floor else None,
        **rest,
        "weights": GENERATED if generated else "seeded random, from a bf16 checkpoint",
        "measured_how": f"{LOAD_METHOD} {FLOOR_METHOD}",
        "run_id": run_id,
        "command": command,
        "stack": stack,
        "date": date,
    }


def run(
    todo: Sequence[LoadWork],
    *,
    runner: Runner,
    ensure: Callable[[LoadWork], None],
    json_dir: Path | None,
    command: str,
) -> list[dict[str, Any]]:
    """Measure every work in turn; a record is written as soon as it is known."""
    now = datetime.datetime.now(datetime.UTC)
    run_id = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    records: list[dict[str, Any]] = []
    for work in todo:
        ensure(work)
        found = runner(work)
        checked = found.pop("bytes", None)
        date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S+00:00}"
        records.append(record_of(work, found, run_id=run_id, command=command, date=date))
        made = [records[-1]]
        if checked is not None:
            made.append(bytes_record(records[-1], checked))
            print(f"{work.method}: {checked['mismatched']} of {checked['tensors']} tensors differ")
        for record in made if json_dir is not None else ():
            write(record, json_dir, number=len(records) - 1)
        print(f"{work.method}: {records[-1]['outcome']}", file=sys.stderr, flush=True)
    print(table(records))
    return records


def bytes_record(record: Mapping[str, Any], checked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a comparison of bytes, as the load gate writes it.

    Args:
        record: of the load.
        checked: what ``load_verify.verify`` found.
    """
    double = record["settings"]["double_quantisation"]
    same = ("family", "shape", "precision", "layers", "seed", "command", "stack", "date", "run_id")
    one = {
        "piece": 0,
        "way": record["method"],
        "quantisation": {"double": double, "storage": "uint8"},
        **checked,
        "seconds": record["seconds"],
        "as_asked": True,
        "load": record["report"],
    }
    return {
        "kind": "load-bytes",
        "verdict": "diverged" if checked["mismatched"] else "exact",
        **{key: record[key] for key in same},
        "pieces": 1,
        "tensors": checked["tensors"],
        "mismatched": checked["mismatched"],
        "void_reasons": [],
        "planted_fault": False,
        "runs": [one],
        "weights": record["weights"],
        "method": f"{record['method']}: {CHECKED}",
    }


def write(record: Mapping[str, Any], folder: Path, *, number: int) -> None:
    """Write a record to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    method = record["runs"][0]["way"] if "runs" in record else record["method"]
    named = ("kind", "shape", "precision")
    name = "-".join([*(str(record[key]) for key in named), method, str(record["run_id"])])
    text = json.dumps(record, indent=2) + "\n"
    (folder / f"{name}-{number}.json").write_text(text, encoding="utf-8")


# the table


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records of one run as text: sizes in GB (1e9 bytes), times in seconds.

    ``- base`` is what the figure before it is above packed and unquantised bytes together.
    """
    rows = [_COLUMNS, *(_row(record) for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for record, row in zip([None, *records], rows, strict=True):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
        if record is not None and record["outcome"] != "loaded":
            lines.append(f"  {record['outcome']}: {' '.join(str(record['error']).split())[:160]}")
    return "\n".join(lines)


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    stages = record.get("stage_seconds") or {}
    base = None
    if record["packed_bytes"] is not None:
        base = record["packed_bytes"] + record["unquantised_bytes"]
    peak, steady = record["host_peak_bytes"], record["host_steady_bytes"]
    return (
        record["method"],
        _gb(record["device_peak_bytes"]),
        _gb(peak),
        _gb(None if base is None or peak is None else peak - base),
        _gb(steady),
        _gb(None if base is None or steady is None else steady - base),
        _gb(base),
        _number(record["seconds"]),
        _number(record["floor_seconds"]),
        _number(record["seconds_over_floor"]),
        max(stages, key=lambda name: stages[name], default="-"),
    )


def _gb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e9:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# the command line


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; None means this process's own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--shape", help="a shape of the family, such as 7b")
    parser.add_argument("--layers", type=int, help="decoder layers, instead of the shape's own")
    parser.add_argument("--methods", default="streamed,standard", help=", ".join(METHODS))
    parser.add_argument("--double", action="store_true", help="quantise scales too")
    parser.add_argument(
        "--verify", action="store_true", help="compare all bytes with a standard load's afterwards"
    )
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, and stays")
    parser.add_argument("--cache", type=Path, help="the packed cache; in --folder by default")
    parser.add_argument("--json-dir", type=Path, help="write a record for each method there")
    parser.add_argument("--timeout", type=float, help="seconds that one method may take")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(argv)
    missing = [name for name in ("shape", "folder") if getattr(found, name) is None]
    if missing and not found.worker:
        parser.error(f"--{missing[0]} is needed")
    return found


def works(options: argparse.Namespace) -> list[LoadWork]:
    """Return the work of every method that was asked for.

    Raises:
        ValueError: one of them is none.
    """
    found = []
    for method in options.methods.split(","):
        if method not in METHODS:
            raise ValueError(f"there is no method '{method}'; there are {', '.join(METHODS)}")
        what = "generated" if METHODS[method].generated else "checkpoint"
        name = f"{what}-{options.family}-{options.shape}-{options.layers}-{options.seed}"
        cache = options.cache or options.folder / "cache"
        work = LoadWork(
            method=method,
            family=options.family,
            shape=options.shape,
            layers=options.layers,
            seed=options.seed,
            double=options.double,
            verify=options.verify and METHODS[method].precision == "nf4",
            cold=options.cold,
            checkpoint=str(options.folder / name),
            cache=str(cache / METHODS[method].precision),
        )
        work.subject()
        found.append(work)
    return found


def main(options: argparse.Namespace) -> int:
    """Do what was asked for; return the exit status."""
    if options.worker:
        work_here(options)
        return 0
    try:
        todo = works(options)
    except (ValueError, poros.PorosError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    records = run(
        todo,
        runner=lambda work: in_a_process(work, timeout=options.timeout),
        ensure=lambda work: ensure_checkpoint(work, timeout=options.timeout),
        json_dir=options.json_dir,
        command=shlex.join(["python", *sys.argv]),
    )
    return 1 if any(record["outcome"] in FAILED for record in records) else 0


if __name__ == "__main__":
    sys.exit(main(arguments()))
