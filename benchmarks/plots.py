"""Draw the records of the benchmarks as PNG files: peak and step time against budget, overhead
against tokens, peak and step time against block size.

    python benchmarks/plots.py --records benchmarks/records --out benchmarks/plots

Needs matplotlib: pip install 'poros-train[report]'. A plot for which there are no records is left
out and named. Exit status: 0 something was drawn, 1 nothing was, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

Record = Mapping[str, Any]
_DOTS = 150


@frozen
class Line:
    """One line of a panel: its name in the legend, and its points in order."""

    name: str
    points: Sequence[tuple[float, float]]


@frozen
class Panel:
    """One set of axes."""

    x: str
    y: str
    lines: Sequence[Line]


def read(folder: Path) -> list[Record]:
    """Return every record of a training cost that was measured to the end, oldest first.

    Raises:
        OSError: the folder cannot be read.
        ValueError: a file in it is no JSON.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder '{folder}'")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    kept = [
        record
        for record in found
        if isinstance(record, dict)
        and record.get("kind") == "training-cost"
        and record.get("step_seconds")
    ]
    return sorted(kept, key=lambda record: str(record["date"]))


def _budget(record: Record) -> float | None:
    """Return the budget in GB (1e9 bytes): the setting, or the card that was emulated."""
    settings = record["settings"]
    given = settings.get("vram_budget")
    if isinstance(given, str):
        number = given.upper().removesuffix("GB").strip()
        given = float(number) * 1e9 if number.replace(".", "", 1).isdigit() else None
    nbytes = given or settings.get("cap_bytes")
    return None if nbytes is None else nbytes / 1e9


def _subject(record: Record) -> str:
    return f"{record['shape'].upper()} {record['precision'].upper()}"


def _peak(record: Record) -> float | None:
    nbytes = record["peak_device_bytes"] or record["peak_allocated_bytes"]
    return None if nbytes is None else nbytes / 1e9


def _step(record: Record) -> float:
    return float(record["step_seconds"]["median"])


def lines_of(
    records: Iterable[Record],
    *,
    name: Callable[[Record], str],
    x: Callable[[Record], float | None],
    y: Callable[[Record], float | None],
) -> list[Line]:
    """Return a line for each name with two points or more. Of two records at one place the later
    counts."""
    found: dict[str, dict[float, float]] = {}
    for record in records:
        across, up = x(record), y(record)
        if across is not None and up is not None:
            found.setdefault(name(record), {})[across] = up
    return [
        Line(title, sorted(points.items()))
        for title, points in sorted(found.items())
        if len(points) > 1
    ]


_USUAL: Mapping[str, Any] = {
    "vram_budget": None,
    "optimizer_state": "device",
    "offload_activations": False,
    "cap_bytes": None,
}
_UNSAID: Mapping[str, Any] = {"offload_activations": False}
"""What a record that does not say had."""


def _is(**wanted: Any) -> Callable[[Record], bool]:
    return lambda record: all(
        record["settings"].get(key, _UNSAID.get(key)) == value for key, value in wanted.items()
    )


def budget_panels(records: Sequence[Record]) -> list[Panel]:
    """Peak and step time against budget."""

    def name(record: Record) -> str:
        card = record["settings"].get("cap_bytes") is not None
        return f"{_subject(record)}, {record['method']}{', emulated cards' if card else ''}"

    x = "budget, GB"
    return [
        Panel(x, "peak on the device, GB", lines_of(records, name=name, x=_budget, y=_peak)),
        Panel(x, "step, s", lines_of(records, name=name, x=_budget, y=_step)),
    ]


def token_panels(records: Sequence[Record]) -> list[Panel]:
    """Step over the link's floor and over the resident step with checkpointing, against tokens."""
    plain = _is(block_size=1, **_USUAL)
    ours = [record for record in records if record["method"] == "poros" and plain(record)]
    resident = {
        _work(record): _step(record)
        for record in records
        if record["method"] == "peft-checkpointing"
    }

    def over_resident(record: Record) -> float | None:
        other = resident.get(_work(record))
        return None if other is None else _step(record) / other

    def over_floor(record: Record) -> float | None:
        return record.get("step_over_floor")

    def tokens(record: Record) -> float:
        return float(record["seq_len"] * record["batch"])

    x = "tokens in a step"
    return [
        Panel(x, "step / link floor", lines_of(ours, name=_subject, x=tokens, y=over_floor)),
        Panel(
            x,
            "step / resident step with checkpointing",
            lines_of(ours, name=_subject, x=tokens, y=over_resident),
        ),
    ]


def _work(record: Record) -> tuple[Any, ...]:
    """What two methods share: the same work in the same run."""
    keys = ("run_id", "shape", "layers", "precision", "seq_len", "batch", "rank", "dropout")
    return tuple(record[key] for key in keys)


def block_panels(records: Sequence[Record]) -> list[Panel]:
    """Peak and step time against block size, a line for each length."""
    plain = _is(**_USUAL)
    ours = [record for record in records if record["method"] == "poros" and plain(record)]

    def name(record: Record) -> str:
        return f"{_subject(record)}, {record['seq_len']} tokens"

    def size(record: Record) -> float | None:
        layers = record["settings"]["block_size"]
        return None if layers == "all" else float(layers)

    x = "layers in a block"
    return [
        Panel(x, "peak on the device, GB", lines_of(ours, name=name, x=size, y=_peak)),
        Panel(x, "step, s", lines_of(ours, name=name, x=size, y=_step)),
    ]


PLOTS: Mapping[str, Callable[[Sequence[Record]], list[Panel]]] = {
    "budget": budget_panels,
    "tokens": token_panels,
    "block-size": block_panels,
}


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write panels side by side as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for line in panel.lines:
            axis.plot(*zip(*line.points, strict=True), marker="o", label=line.name)
        axis.set_xlabel(panel.x)
        axis.set_ylabel(panel.y)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=_DOTS)
    pyplot.close(figure)


def plots(records: Sequence[Record], out: Path) -> list[Path]:
    """Draw every plot that there are records for; return the files."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, make in PLOTS.items():
        panels = [panel for panel in make(records) if panel.lines]
        if not panels:
            print(f"{name}: no two records to draw a line through")
            continue
        path = out / f"{name}.png"
        draw(panels, path)
        print(f"{name}: {path}")
        drawn.append(path)
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--records", type=Path, default=here / "records")
    parser.add_argument("--out", type=Path, default=here / "plots")
    options = parser.parse_args(argv)
    try:
        drawn = plots(read(options.records), options.out)
    except ModuleNotFoundError as error:
        print(f"Error: {error}. Install it: pip install 'poros-train[report]'", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
