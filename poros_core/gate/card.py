"""A gate's verdict in a model card: one marked section, written anew each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poros_core.errors import GateError
from poros_core.gate.meaning import stack_text, subject_text

__all__ = ["BEGIN", "END", "card_section", "write_card"]

BEGIN = "<!-- poros gate: begin -->"
END = "<!-- poros gate: end -->"


def card_section(record: Mapping[str, Any]) -> str:
    """Return the section of a model card, markers and all."""
    surfaces = "\n".join(
        f"| {name.replace('_', ' ')} | {_number(surface['max_abs_difference'])} "
        f"| {'yes' if surface['exact'] else 'no'} |"
        for name, surface in record["surfaces"].items()
    )
    return (
        f"{BEGIN}\n"
        "## Training parity\n\n"
        f"`poros gate` on {subject_text(record)}: **{record['verdict']}**. {record['proof']}\n\n"
        "| surface | largest difference | all bits equal |\n| --- | --- | --- |\n"
        f"{surfaces}\n\n"
        f"Stack: {stack_text(record['stack'])}; Poros {record['stack']['poros']}; "
        f"{record['date']}.\n\n"
        f"```console\n$ {record['command']}\n```\n"
        f"{END}\n"
    )


def write_card(path: Path, record: Mapping[str, Any]) -> None:
    """Put the section into a card: in place of an older one, else at the end.

    Raises:
        GateError: the card has one of the two markers only, or they are in the wrong order.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    begin, end = text.find(BEGIN), text.find(END)
    section = card_section(record)
    if begin == end == -1:
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        path.write_text(text + gap + section, encoding="utf-8")
        return
    if not 0 <= begin < end or text.count(BEGIN) > 1 or text.count(END) > 1:
        raise GateError(
            f"'{path}' does not have each of the markers '{BEGIN}' and '{END}' once, in this "
            "order. Remove what is left of them, and run the gate again."
        )
    rest = text[end + len(END) :].removeprefix("\n")
    path.write_text(text[:begin] + section + rest, encoding="utf-8")


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.2e}"
