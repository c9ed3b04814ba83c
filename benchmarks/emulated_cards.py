"""Say which method loads and trains on cards of several sizes, and how fast.

    python benchmarks/emulated_cards.py --shape 32b --cards 6,8,12,16,24 --json-dir records

A card is emulated by bounding the allocator, so that the GPU's whole use, context and graphs
included, stays below its size; load and training run in one process under that bound. Poros gets
the card as its budget, and once streams everything with its optimizer's state on the host. What is
loaded: a bf16 checkpoint with --direct no (TMPDIR must have room for it), one that is quantised
already with --weights rolled; weights drawn in place are no load. Settings and exit status as in
training_cost.py; a method that does not fit is recorded as out of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cost_options import arguments
from training_cost import main

METHODS = (
    "poros:vram-budget=card,poros:optimizer-state=host,peft-checkpointing,"
    "accelerate-offload:precision=bf16"
)
CARDS = "6,8,12,16,24"


def methods_on_cards(methods: str, cards: str) -> str:
    """Return every method on every card.

    Args:
        methods: as in ``--methods``.
        cards: sizes in GB (1e9 bytes), separated by commas.

    Raises:
        ValueError: one of the cards is no number.
    """
    sizes = [int(float(card) * 1e9) for card in cards.split(",")]
    return ",".join(f"{m}:cap-bytes={size}" for size in sizes for m in methods.split(","))


def cards_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each method and a column for each card: the step, or why there is none."""
    sizes = sorted({record["settings"]["cap_bytes"] for record in records})
    rows: dict[str, dict[int, str]] = {}
    for record in records:
        settings = record["settings"]
        budget = settings.get("vram_budget")
        own = [f"budget={budget}"] if budget else []
        own += ["state=host"] if settings.get("optimizer_state") == "host" else []
        name = " ".join([record["method"], record["precision"], *own])
        rows.setdefault(name, {})[settings["cap_bytes"]] = _cell(record)
    lines = [" ".join(["".ljust(30), *(f"{size / 1e9:g} GB".rjust(14) for size in sizes)])]
    for name, cells in rows.items():
        lines.append(" ".join([name.ljust(30), *(cells.get(s, "-").rjust(14) for s in sizes)]))
    return "\n".join(lines)


def _cell(record: Mapping[str, Any]) -> str:
    if record["outcome"] != "trained":
        return str(record["outcome"])
    step = f"{record['step_seconds']['median']:.3f} s"
    return step if record["within_cap"] is not False else f"{step}, over"


if __name__ == "__main__":
    line = ["--methods", METHODS, "--cards", CARDS, *sys.argv[1:]]
    options = arguments(line, about=__doc__, cards=True)
    options.methods = methods_on_cards(options.methods, options.cards)
    sys.exit(main(options, also=cards_table))
