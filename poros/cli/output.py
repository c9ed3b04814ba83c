"""How the command line shows things: consoles, errors, JSON and log output."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["configure_logging", "console", "print_error", "print_json", "print_line", "status_text"]


def console(*, stderr: bool = False) -> Console:
    """Return a console on the present standard output, or standard error."""
    return Console(stderr=stderr, highlight=False)


def print_error(message: str) -> None:
    """Print one red paragraph on standard error."""
    out = console(stderr=True)
    out.print(Text(f"Error: {message}", style="red"), soft_wrap=not out.is_terminal)


def print_line(line: Text) -> None:
    """Print one line on standard output: wrapped between words on a terminal, whole elsewhere."""
    out = console()
    out.print(line, soft_wrap=not out.is_terminal)


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output, without colours or wrapping."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


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
