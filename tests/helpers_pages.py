"""Pages held to records: their tables, their figures in prose, and their links.

A table is known by its headings; what its rows must be is made from the records that they link. A
figure in prose stands in a sentence that is made from records or constants. What is linked or has
a unit, and is in neither, is a figure that nothing holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Record = Mapping[str, Any]
Cells = Callable[[Record, str], list[str]]
"""Makes a row's cells, all but the link, from its record and the record's name."""
Kinds = Mapping[tuple[str, ...], Cells]

RECORD = re.compile(r"\]\(([^)#\s]*records?/[\w.-]+\.json|[^)#\s]*validation/[\w.-]+\.json)\)")
TIMES = "\N{MULTIPLICATION SIGN}"
UNIT = re.compile(rf"\d[\d.,]*(?:\s?(?:[kKMGT]i?B|m?s|%|x|{TIMES})(?![\w-])| times as )")
TITLES = {"qwen2": "Qwen2.5", "qwen3": "Qwen3", "qwen3_5": "Qwen3.5"}
TITLES |= {"gemma3": "Gemma 3", "gemma4": "Gemma 4"}
NUMBERS = {4: "four", 5: "five", 6: "six", 12: "twelve", 13: "thirteen", 16: "sixteen"}


def read(path: Path) -> Record:
    """Return a record."""
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


def model(record: Record) -> str:
    """Return a model as tables name it."""
    return f"{TITLES[record['family']]} {record['shape'].upper()}"


def gb(nbytes: float) -> str:
    """Return a size as tables have it."""
    return f"{nbytes / 1e9:.2f} GB"


def seconds(value: float) -> str:
    """Return a step's time as tables have it."""
    return f"{value:.3f} s"


# tables


def tables(text: str) -> Iterator[tuple[tuple[str, ...], list[list[str]]]]:
    """Yield every table's headings and rows."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [
            [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
            for line in block.splitlines()
        ]
        yield tuple(lines[0]), lines[2:]


def linked(page: Path, text: str) -> dict[Path, list[tuple[str, ...]]]:
    """Return every record that a table's rows link, with the headings of these tables."""
    found: dict[Path, list[tuple[str, ...]]] = {}
    for headings, rows in tables(text):
        for link in (link for row in rows for cell in row for link in RECORD.findall(cell)):
            found.setdefault(page.parent / link, []).append(headings)
    return found


def wrong_rows(page: Path, text: str, kinds: Kinds) -> list[str]:
    """Return the rows that are not what their records say, and those that no kind knows."""
    wrong = []
    for headings, rows in tables(text):
        for row in rows:
            links = RECORD.findall(" | ".join(row))
            if headings in kinds:
                path = page.parent / links[-1] if len(links) == 1 else None
                if path is None or row != _row(path, links[0], kinds[headings]):
                    wrong.append(" | ".join(row))
            elif links:
                wrong.append(f"no such table: {' | '.join(headings)}")
    return wrong


def _row(path: Path, link: str, cells: Cells) -> list[str]:
    name = "record" if "benchmarks/" in link else path.stem
    return [*cells(read(path), path.stem), f"[{name}]({link})"]


# prose


def prose(text: str) -> str:
    """Return a page without blocks, tables and line breaks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return " ".join(text.split())


def absent(text: str, sentences: Sequence[str]) -> list[str]:
    """Return the sentences that a page does not have."""
    whole = prose(text)
    return [sentence for sentence in sentences if sentence not in whole]


def unheld(text: str, sentences: Sequence[str]) -> list[str]:
    """Return the figures with a unit, and the links to records, that are in no sentence."""
    whole = prose(text)
    for sentence in sorted(sentences, key=len, reverse=True):
        whole = whole.replace(sentence, " … ")
    return [*UNIT.findall(re.sub(r"`[^`]*`", "", whole)), *RECORD.findall(whole)]
