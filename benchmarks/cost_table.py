"""The table that a run of ``training_cost.py`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REFERENCE = "peft-checkpointing"
_COLUMNS = ("method", "peak", "reserved", "driver", "step", "floor", "/ floor", "/ ckpt", "graphs")
_USUAL: Mapping[str, Any] = {
    "pad_to_multiple_of": None,
    "logging_nan_inf_filter": True,
    "optimizer_state": "device",
    "block_size": 1,
    "vram_budget": None,
    "graphs": "auto",
    "offload_activations": False,
    "copy_ahead": False,
    "loss_chunk": None,
    "cap_bytes": None,
}
"""Settings that are shown where they are not these."""


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records of one run as text: sizes in GB (1e9 bytes), times in seconds, medians.

    ``/ floor`` is the step over the link's floor, ``/ ckpt`` over the step of peft-checkpointing
    at the same length, precision and shape.
    """
    rows = [_COLUMNS, *(_row(record, _reference(record, records)) for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for record, row in zip([None, *records], rows, strict=True):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
        if record is not None and record["outcome"] != "trained":
            lines.append(f"  {record['outcome']}: {' '.join(str(record['error']).split())[:160]}")
    return "\n".join(lines)


def _reference(
    record: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    same = ("shape", "layers", "precision", "seq_len", "batch", "rank", "dropout")
    loop = ("pad_to_multiple_of", "logging_nan_inf_filter")
    for other in records:
        alike = all(other[key] == record[key] for key in same) and all(
            other["settings"].get(key) == record["settings"].get(key) for key in loop
        )
        if other["method"] == REFERENCE and alike:
            return other
    return None


def _row(record: Mapping[str, Any], reference: Mapping[str, Any] | None) -> tuple[str, ...]:
    step = _median(record)
    other = None if reference is None else _median(reference)
    replayed, eager = record["graph_replays"], record["eager_blocks"]
    blocks = (replayed or 0) + (eager or 0)
    return (
        name_of(record),
        *(_gb(record[f"peak_{kind}_bytes"]) for kind in ("allocated", "reserved", "device")),
        _number(step, 3),
        _number(record["link_floor_seconds"], 3),
        _number(record["step_over_floor"], 3),
        _number(step / other if step and other else None, 3),
        f"{100 * replayed / blocks:.0f} %" if blocks else "-",
    )


def name_of(record: Mapping[str, Any]) -> str:
    """Return the method of a record with what it was set to."""
    settings = record["settings"]
    own = [
        f"{key}={settings[key]}"
        for key, usual in _USUAL.items()
        if settings.get(key, usual) != usual
    ]
    return " ".join([record["method"], f"{record['seq_len']} tokens", record["precision"], *own])


def _median(record: Mapping[str, Any]) -> float | None:
    step = record["step_seconds"]
    return None if step is None else float(step["median"])


def _gb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e9:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
