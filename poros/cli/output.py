"""How the command line shows things: consoles, errors, JSON and log output."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poros_core.gate.files import json_text

__all__ = [
    "configure_logging",
    "console",
    "print_error",
    "print_json",
    "print_line",
    "print_rows",
    "status_text",
]


NOBODY_READS = 128 + signal.SIGPIPE
"""Exit status when whoever read the output went away: no verdict of any command."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """End with a status of its own; rich's is 1, which is a verdict here."""
        self.quiet = True
        _end_unread()


def console(*, stderr: bool = False) -> Console:
    """Return a console on the present standard output, or standard error."""
    return _Console(stderr=stderr, highlight=False)


def _end_unread() -> None:
    """End quietly: the interpreter flushes once more, and must find no broken pipe then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(NOBODY_READS)


def print_error(message: str) -> None:
    """Print one red paragraph on standard error."""
    out = console(stderr=True)
    out.print(Text(f"Error: {message}", style="red"), soft_wrap=not out.is_terminal)


def print_line(line: Text) -> None:
    """Print one line on standard output: wrapped between words on a terminal, whole elsewhere."""
    out = console()
    out.print(line, soft_wrap=not out.is_terminal)


def print_rows(rows: Sequence[Sequence[str | Text]]) -> None:
    """Print rows under each other, the last column of any length: wrapped between words in its
    column on a terminal, whole elsewhere."""
    out = console()
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if out.is_terminal:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for _ in texts[0][:-1]:
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in texts:
            table.add_row(*row)
        out.print(table)
        return
    widths = [max(cell.cell_len for cell in column) for column in zip(*texts, strict=True)]
    for row in texts:
        line = Text()
        for cell, width in zip(row[:-1], widths, strict=False):
            line += cell
            line.append(" " * (width + 2 - cell.cell_len))
        line += row[-1]
        line.rstrip()
        print_line(line)


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output, without colours or wrapping."""
    try:
        sys.stdout.write(json_text(value))
        sys.stdout.flush()
    except BrokenPipeError:
        _end_unread()


def status_text(status: str) -> Text:
    """Return a status word in its colour."""
    return Text(status, style="green" if status == "validated" else "yellow")


def configure_logging(level: str) -> None:
    """Send the library's events to standard error.

    Args:
        level: a standard logging level's name, in any case.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("poros")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
