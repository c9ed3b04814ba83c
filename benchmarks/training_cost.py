"""Measure what training costs, with Poros and with what else one can use, on the same work.

Each method trains in a process of its own; all of them make one run. A record goes to a file each.

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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_options import arguments, works
from cost_table import table
from cost_texts import LINK_METHOD, LOOP, MEMORY_METHOD, TIME_METHOD, TRAINER_LOOP
from cost_work import Work, as_plain, described

import poros

FAILED = ("failed", "killed", "too slow")


# one process a method


Runner = Callable[[Work, Path | None], dict[str, Any]]


def in_a_process(work: Work, path: Path | None, *, timeout: float | None = None) -> dict[str, Any]:
    """Measure in a process of its own; this one never touches the GPU."""
    with tempfile.TemporaryDirectory(prefix="poros-cost-") as folder:
        out = Path(folder) / "outcome.json"
        own = ["--out", out, *([] if path is None else ["--path", path])]
        code, error = _start(work, own, timeout=timeout)
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    if code is None:
        return {"outcome": "too slow", "error": f"stopped after {timeout:.0f} s"}
    if code < 0:
        return {"outcome": "killed", "error": f"by signal {-code}"}
    return {"outcome": "failed", "error": error}


def _start(
    work: Work, own: Sequence[str | Path], *, timeout: float | None
) -> tuple[int | None, str]:
    """Start this script on one work; return its exit status, None if it took too long, and the
    last line that it said."""
    command = [sys.executable, __file__, "--worker", json.dumps(as_plain(work)), *map(str, own)]
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
    from cost_measure import outcome
    from cost_models import write_checkpoint

    work = Work(**json.loads(options.worker))
    if options.checkpoint:
        write_checkpoint(work, options.path)
        return
    options.out.write_text(json.dumps(outcome(work, options.path)))


def checkpoint_for(work: Work, folder: Path, *, timeout: float | None) -> Path | None:
    """Return the checkpoint that the work loads, written if it is not there; None if it needs none.

    Raises:
        RuntimeError: it could not be written.
    """
    if work.draws_directly():
        return None
    path = folder / f"{work.shape}-{work.layers}-{work.seed}"
    if not path.exists():
        code, error = _start(work, ["--checkpoint", "--path", path], timeout=timeout)
        if code != 0:
            raise RuntimeError(f"the random checkpoint could not be written: {error}")
    return path


# the run


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
    devices = [rest.get("peak_device_bytes"), rest.get("build_peak_device_bytes")]
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
        "measured_how": f"{TIME_METHOD} {MEMORY_METHOD} {LINK_METHOD}",
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
) -> list[dict[str, Any]]:
    """Measure every work in turn; a record is written as soon as it is known.

    The link's rate is the highest that any process of the run measured, so a record is written
    again when a later process measured a higher one.
    """
    now = datetime.datetime.now(datetime.UTC)
    run_id = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    done: list[tuple[Work, dict[str, Any], str]] = []
    records: list[dict[str, Any]] = []
    for work in todo:
        found = runner(work, checkpoint(work))
        done.append((work, found, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S+00:00}"))
        rates = [rate for _, found, _ in done for rate in (found.get("link") or {}).values()]
        link = max(rates, default=None)
        records = [
            record_of(each, found, run_id=run_id, link=link, command=command, date=date)
            for each, found, date in done
        ]
        if json_dir is not None:
            write(records, json_dir)
        print(f"{work.method}: {records[-1]['outcome']}", file=sys.stderr, flush=True)
    print(table(records))
    return records


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
        work_here(options)
        return 0
    try:
        todo = works(options)
    except (ValueError, KeyError, poros.PorosError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="poros-cost-") as folder:
        records = run(
            todo,
            runner=lambda work, path: in_a_process(work, path, timeout=options.timeout),
            checkpoint=lambda work: checkpoint_for(work, Path(folder), timeout=options.timeout),
            json_dir=options.json_dir,
            command=shlex.join(["python", *sys.argv]),
        )
    if also is not None:
        print(also(records))
    return 1 if any(record["outcome"] in FAILED for record in records) else 0


if __name__ == "__main__":
    sys.exit(main(arguments(about=__doc__)))
