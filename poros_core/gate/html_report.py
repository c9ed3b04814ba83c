"""A gate's record as one HTML page: inline SVG, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from poros_core.gate.meaning import stack_text, subject_text, to_repeat

__all__ = ["html_report"]

_TITLES = {
    "loss": "loss",
    "adapter_weights": "adapter weights",
    "grad_norms": "gradient norms",
    "optimizer_state": "optimizer state",
}
_ORDER = ("loss", "grad_norms", "optimizer_state", "adapter_weights")
"""In which a step produces its surfaces; the first that differs is the cause."""
_COLOURS = {"resident": "#8ab4d8", "streamed": "#b3541e", "control": "#b9b9b9"}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 46rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid #e4e4e4; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.verdict { font-size: 1.3rem; font-weight: 600; }
.exact { color: #1a6e2e; } .other { color: #a3261b; }
code { background: #f4f4f4; padding: .1rem .3rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #444; }
"""
_WIDTH, _HEIGHT = 720, 240
_LEFT, _BOTTOM, _TOP = 62, 28, 34


def html_report(record: Mapping[str, Any]) -> str:
    """Return a self-contained page.

    Args:
        record: a gate's record.
    """
    title = f"Poros gate: {subject_text(record)}"
    verdict = record["verdict"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {"exact" if verdict == "exact" else "other"}">{escape(verdict)}</p>',
        f"<p>{escape(record['proof'])}</p>",
        _divergence(record),
        "<h2>Surfaces</h2>",
        _surfaces(record),
        "<h2>Loss</h2>",
        _losses(record["losses"]),
        "<h2>Memory and time</h2>",
        _memory(record["arms"]),
        "<h2>What ran</h2>",
        _settings(record),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _divergence(record: Mapping[str, Any]) -> str:
    divergences = [s["first_divergence"] for s in record["surfaces"].values()]
    control = record["control"]
    if control is not None and control["first_divergence"] is not None:
        divergences = [control["first_divergence"]]
    found = [d for d in divergences if d is not None]
    lines = [f"<p>{escape(reason)}</p>" for reason in record["void_reasons"]]
    if record["planted_fault"] is not None:
        planted = ", ".join(f"{k} {v}" for k, v in record["planted_fault"].items())
        lines.append(f"<p>Planted on purpose: {escape(planted)}.</p>")
    if found:
        first = min(found, key=lambda d: (d["step"], _ORDER.index(d["surface"])))
        lines.append(
            f"<p>First divergence: step {first['step']}, {escape(_TITLES[first['surface']])}, "
            f"<code>{escape(first['tensor'])}</code>: {first['differing']} of "
            f"{first['elements']} elements differ, by "
            f"{_number(first['max_abs_difference'])} at most.</p>"
        )
    return "\n".join(lines)


def _surfaces(record: Mapping[str, Any]) -> str:
    rows = [
        [_TITLES[name], _number(surface["max_abs_difference"]), "yes" if surface["exact"] else "no"]
        for name, surface in record["surfaces"].items()
    ]
    return _table(["surface", "largest difference", "all bits equal"], rows, numbers={1})


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.2e}"


def _losses(losses: Mapping[str, Sequence[float | None]]) -> str:
    """Return one line per arm; the streamed one is thin and lies over the resident one."""
    known = {
        name: [(step, value) for step, value in enumerate(values) if value is not None]
        for name, values in losses.items()
    }
    every = [value for points in known.values() for _, value in points]
    if not every:
        return "<p>There is no loss to show.</p>"
    low, high = min(every), max(every)
    steps = max(len(values) for values in losses.values())
    right, floor = _WIDTH - 10, _HEIGHT - _BOTTOM
    span, reach = (high - low) or 1.0, max(1, steps - 1)

    def at(step: int, value: float) -> str:
        x = _LEFT + (right - _LEFT) * step / reach
        return f"{x:.1f},{floor - (floor - _TOP) * (value - low) / span:.1f}"

    parts = [
        f'<path d="M{_LEFT} {_TOP}V{floor}H{right}" fill="none" stroke="#bbb"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{high:.4f}</text>',
        f'<text x="{_LEFT - 6}" y="{floor}" text-anchor="end">{low:.4f}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">step 1</text>',
        f'<text x="{right}" y="{_HEIGHT - 8}" text-anchor="end">step {steps}</text>',
    ]
    for number, (name, found) in enumerate(known.items()):
        points = " ".join(at(step, value) for step, value in found)
        width = 7 if name == "resident" else 2
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_COLOURS[name]}" '
            f'stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"/>'
        )
        parts.append(
            f'<text x="{right - 90 * (len(known) - number)}" y="20" '
            f'style="fill: {_COLOURS[name]}; font-weight: 600">{escape(name)}</text>'
        )
    return _svg(parts, _HEIGHT, "Loss by step")


def _memory(arms: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [
            name,
            _size(arm["peak_allocated_bytes"]),
            _size(arm["peak_reserved_bytes"]),
            "-" if arm["step_seconds"] is None else f"{arm['step_seconds']:.3f} s",
            _size(arm.get("bytes_streamed_per_step")),
        ]
        for name, arm in arms.items()
    ]
    heads = ["arm", "peak memory", "reserved", "step", "streamed per step"]
    return _bars(arms) + _table(heads, rows, numbers={1, 2, 3, 4})


def _bars(arms: Mapping[str, Mapping[str, Any]]) -> str:
    peaks = {n: a["peak_allocated_bytes"] for n, a in arms.items() if a["peak_allocated_bytes"]}
    if not peaks:
        return "<p>Memory is not measured on a CPU.</p>"
    largest = max(peaks.values())
    parts = []
    for number, (name, peak) in enumerate(peaks.items()):
        y, width = 8 + 34 * number, (_WIDTH - 200) * peak / largest
        parts += [
            f'<text x="78" y="{y + 16}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="86" y="{y}" width="{width:.1f}" height="24" fill="{_COLOURS[name]}"/>',
            f'<text x="{92 + width:.1f}" y="{y + 16}">{_size(peak)}</text>',
        ]
    return _svg(parts, 10 + 34 * len(peaks), "Peak device memory by arm")


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _settings(record: Mapping[str, Any]) -> str:
    layers = record["layers"]
    rows = [
        ["layers", f"{layers['trained']} of {layers['of']}"],
        ["steps compared", f"{record['steps_compared']} of {record['steps']}"],
        ["micro-batches", f"{record['accumulate']} of {record['batch']} x {record['seq_len']}"],
        ["data", record["data"] or f"random tokens, seed {record['seed']}"],
        ["adapter", f"LoRA rank {record['rank']}, dropout {record['dropout']}"],
        *([name.replace("_", " "), str(value)] for name, value in record["settings"].items()),
        ["stack", stack_text(record["stack"])],
        ["commit", record["stack"]["poros_commit"] or "-"],
        ["date", record["date"]],
    ]
    command = f"<p>Run it again: <code>{escape(to_repeat(record))}</code></p>"
    return _table(["setting", "value"], rows, numbers=set()) + command


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: set[int]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)

    def cell(column: int, text: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        return f"<td{kind}>{escape(text)}</td>"

    lines = ["".join(cell(i, text) for i, text in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f"<table>\n<tr>{head}</tr>\n{body}</table>"


def _svg(parts: Sequence[str], height: int, label: str) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">\n'
        f"{inner}\n</svg>\n"
    )
