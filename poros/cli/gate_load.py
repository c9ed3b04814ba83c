"""``poros gate --load``: how the load gate is shown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from poros.cli.gate_display import quiet_libraries
from poros.cli.output import console
from poros_core.gate import GateOptions
from poros_core.gate.files import json_text, write_whole
from poros_core.gate.flags import flags_of

__all__ = ["gate_load", "training_flags"]

_LOADS = {
    "--family", "--shape", "--model", "--precision", "--seed", "--layers", "--plant-fault",
}  # fmt: skip


def training_flags(options: GateOptions) -> list[str]:
    """Return the flags that were given and that concern training only."""
    return [flag for flag in flags_of(options) if flag.startswith("--") and flag not in _LOADS]


def gate_load(options: GateOptions, *, pieces: int, json_file: Path | None) -> int:
    """Run the load gate, show it, and return the exit status."""
    out = console()
    with quiet_libraries():
        from poros_core.gate.load_bytes import LoadGateOptions, run_load_gate

        result = run_load_gate(
            LoadGateOptions(gate=options, pieces=pieces),
            command=shlex.join(["poros", *sys.argv[1:]]),
            observer=lambda text: out.print(text, style="dim", soft_wrap=True),
        )
    if json_file is not None:
        write_whole(json_file, json_text(result.record))
    out.print(_table(result.record))
    out.print(_verdict(result.record), soft_wrap=not out.is_terminal)
    return result.exit_status


def _table(record: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for heading in ("loaded", "double", "stored as", "tensors", "mismatched", "time"):
        table.add_column(heading)
    for run in record["runs"]:
        settings = run["quantisation"] or {"double": "-", "storage": "-"}
        wrong = run["mismatched"]
        table.add_row(
            run["way"],
            {True: "yes", False: "no"}.get(settings["double"], "-"),
            settings["storage"],
            str(run["tensors"]),
            Text(str(wrong), style="red" if wrong else "green"),
            f"{run['seconds']:.2f} s",
        )
    return table


def _verdict(record: Mapping[str, Any]) -> Text:
    if record["verdict"] == "exact":
        return Text(
            f"exact: {record['tensors']} tensors compared with from_pretrained, all bytes equal",
            style="green",
        )
    if record["verdict"] == "void":
        return Text(f"void: {'; '.join(record['void_reasons'])}", style="red")
    first = next(run["first"] for run in record["runs"] if run["first"] is not None)
    return Text(
        f"diverged: {record['mismatched']} of {record['tensors']} tensors, first "
        f"{first['tensor']}: {first['got']} instead of {first['expected']}",
        style="red",
    )
