"""Measure what training costs, with Poros and with what else one can use, on the same work.

Each method trains in a process of its own; all of them make one run. A record goes to a file each.
With --shared, works with the same base are measured in one process, and the base is built once.

    python benchmarks/training_cost.py --shape 7b --methods poros,peft,peft-checkpointing
    python benchmarks/training_cost.py --shape 32b --methods poros,poros:optimizer-state=host \
        --steps 20 --json-dir benchmarks/records
    python benchmarks/training_cost.py --shape 32b --cap-bytes 6e9 --optimizer-state host

A method may carry settings of its own after colons, as --methods poros:block-size=4:graphs=off.
--sweep seq-len=512,2048 measures every method at every value; several sweeps multiply.
Exit status: 0 all measured or refused, 1 something failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_options import arguments, works
from cost_process import Workers, be_a_worker
from cost_table import name_of, table
from cost_texts import LINK_METHOD, LOOP, MEMORY_METHOD, PROCESS, TIME_METHOD, TRAINER_LOOP
from cost_work import Work, described, groups

import poros

FAILED = ("failed", "killed", "too slow")

Runner = Callable[[Sequence[Work], Path | None], Iterable[dict[str, Any]]]


def checkpoint_for(work: Work, folder: Path, *, workers: Workers) -> Path | None:
    """Return the checkpoint that the work loads, written if it is not there; None if it needs none.

    Raises:
        RuntimeError: it could not be written.
    """
    if work.draws_directly():
        return None
    path = folder / f"{work.shape}-{work.layers}-{work.seed}-{work.weights}"
    if not path.exists():
        workers.write_checkpoint(work, path)
    return path


def record_of(
    work: Work,
    found: Mapping[str, Any],
    *,
    run_id: str,
    link: float | None,
    command: str,
    date: str,
) -> dict[str, Any]:
    """Return the record of one measurement.

    Args:
        work: what was measured.
        found: what its process said.
        run_id: of all measurements of this run.
        link: the pinned copy rate of this run, in bytes per second; None without CUDA.
        command: that started the run.
        date: when it was measured.
    """
    rest = dict(found)
    stack = rest.pop("stack", None)
    rates = rest.pop("link", None)
    streamed = rest.get("bytes_streamed_per_step")
    floor = streamed / link if streamed and link else None
    median = (rest.get("step_seconds") or {}).get("median")
    kinds = ("peak_device_bytes", "peak_device_bound_bytes", "build_peak_device_bytes")
    devices = [rest.get(kind) for kind in kinds]
    device = max((nbytes for nbytes in devices if nbytes), default=None)
    figures: dict[str, Any] = dict.fromkeys(
        (
            *("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "step_seconds"),
            *("bytes_streamed_per_step", "resident_units", "graph_replays", "eager_blocks"),
        )
    )
    return {
        "outcome": rest.pop("outcome"),
        "error": rest.pop("error"),
        **described(work),
        **figures,
        **rest,
        "link_bytes_per_second": link,
        "link_rates_by_size": rates,
        "link_floor_seconds": floor,
        "step_over_floor": median / floor if floor and median else None,
        "within_cap": None if not (work.cap_bytes and device) else device <= work.cap_bytes,
        "loop": LOOP if work.data is None else TRAINER_LOOP,
        "measured_how": f"{TIME_METHOD} {MEMORY_METHOD} {LINK_METHOD} {PROCESS}",
        "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "run_id": run_id,
        "command": command,
        "stack": stack,
        "date": date,
    }


def run(
    todo: Sequence[Work],
    *,
    runner: Runner,
    checkpoint: Callable[[Work], Path | None],
    json_dir: Path | None,
    command: str,
    shared: bool = False,
) -> list[dict[str, Any]]:
    """Measure every work in turn; a record is written as soon as it is known.

    The link's rate is the highest that any process of the run measured, so a record is written
    again when a later process measured a higher one.
    """
    started = datetime.datetime.now(datetime.UTC)
    run_id = f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    done: list[tuple[Work, dict[str, Any], str]] = []
    records: list[dict[str, Any]] = []
    for group in groups(todo, shared=shared):
        for work, found in zip(group, runner(group, checkpoint(group[0])), strict=True):
            now = datetime.datetime.now(datetime.UTC)
            done.append((work, found, f"{now:%Y-%m-%dT%H:%M:%S+00:00}"))
            rates = [rate for _, found, _ in done for rate in (found.get("link") or {}).values()]
            link = max(rates, default=None)
            records = [
                record_of(each, found, run_id=run_id, link=link, command=command, date=date)
                for each, found, date in done
            ]
            if json_dir is not None:
                write(records, json_dir)
            print(f"{_said(records[-1])}", file=sys.stderr, flush=True)
    print(table(records))
    return records


def _said(record: Mapping[str, Any]) -> str:
    step = record["step_seconds"]
    return f"{name_of(record)}: {record['outcome']}" + (f", {step['median']:.4f} s" if step else "")


def write(records: Sequence[Mapping[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(records):
        name = "-".join(
            str(record[key]) for key in ("kind", "shape", "precision", "method", "run_id")
        )
        text = json.dumps(record, indent=2) + "\n"
        (folder / f"{name}-{number}.json").write_text(text, encoding="utf-8")


def main(
    options: argparse.Namespace,
    *,
    also: Callable[[Sequence[Mapping[str, Any]]], str] | None = None,
) -> int:
    """Do what was asked for; return the exit status.

    Args:
        options: the command line.
        also: makes of the records what is printed below the table.
    """
    if options.worker:
        be_a_worker()
        return 0
    try:
        todo = works(options)
        if options.json_dir is not None:
            options.json_dir.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, poros.PorosError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="poros-cost-") as folder:
        jobs = len(groups(todo, shared=options.shared))
        jobs += any(not work.draws_directly() for work in todo)
        with Workers(jobs, timeout=options.timeout, talkative=options.talkative) as workers:
            records = run(
                todo,
                runner=workers.measure,
                checkpoint=lambda work: checkpoint_for(work, Path(folder), workers=workers),
                json_dir=options.json_dir,
                command=shlex.join(["python", *sys.argv]),
                shared=options.shared,
            )
    if also is not None:
        print(also(records))
    return 1 if any(record["outcome"] in FAILED for record in records) else 0


if __name__ == "__main__":
    sys.exit(main(arguments(about=__doc__)))
