"""A gate's verdict in a model card: one marked section, written anew each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poros_core.errors import GateError
from poros_core.gate.files import write_whole
from poros_core.gate.meaning import subject_text, to_repeat

__all__ = ["BEGIN", "END", "card_section", "check_card", "write_card"]

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
        f"`poros gate` on {_tame(subject_text(record))}: **{record['verdict']}**. "
        f"{record['proof']}\n\n"
        "| surface | largest difference | all bits equal |\n| --- | --- | --- |\n"
        f"{surfaces}\n\n"
        f"Poros {record['stack']['poros']}, {record['date'][:10]}:\n\n"
        f"```console\n$ {_tame(to_repeat(record))}\n```\n"
        f"{END}\n"
    )


def check_card(path: Path) -> None:
    """Check that a card can take a section, before a gate runs for it.

    Raises:
        GateError: it cannot be read, or has not each of the markers once and in order.
    """
    _split(path)


def write_card(path: Path, record: Mapping[str, Any]) -> None:
    """Put the section into a card: in place of an older one, else at the end.

    Raises:
        GateError: see ``check_card`` and ``write_whole``.
    """
    before, after = _split(path)
    end = _line_end(before + after)
    write_whole(path, before + card_section(record).replace("\n", end) + after)


def _split(path: Path) -> tuple[str, str]:
    """Return what stands before and after the section."""
    if path.exists() and not path.is_file():
        raise GateError(f"The model card '{path}' is no file. Name one.")
    try:
        text = path.read_bytes().decode() if path.exists() else ""  # line ends as they are
    except (OSError, ValueError) as error:
        raise GateError(f"The model card '{path}' cannot be read: {error}.") from error
    begin, end = text.find(BEGIN), text.find(END)
    if begin == end == -1:
        gap = 0 if not text else 1 if text.endswith("\n") else 2
        return text + gap * _line_end(text), ""
    if not 0 <= begin < end or text.count(BEGIN) > 1 or text.count(END) > 1:
        raise GateError(
            f"'{path}' does not have each of the markers '{BEGIN}' and '{END}' once, in this "
            "order. Remove what is left of them, and run the gate again."
        )
    return text[:begin], text[end + len(END) :].removeprefix("\r").removeprefix("\n")


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _tame(text: str) -> str:
    """Return somebody's names so that they neither end the section nor what they stand in."""
    text = " ".join(text.splitlines())
    return text.replace("<!--", "<! --").replace("-->", "-- >").replace("```", "~~~")


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.2e}"
