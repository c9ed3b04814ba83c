"""The ``poros`` command line: how things are asked for and shown, not what they do."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import traceback
from enum import StrEnum
from typing import Annotated

import typer

from poros._extras import missing_extra
from poros.cli import cache, check, demo, doctor, families, gate, plan
from poros.cli.output import configure_logging, print_error
from poros_core.errors import PorosError

__all__ = ["DEBUG_VARIABLE", "app", "main"]

DEBUG_VARIABLE = "POROS_DEBUG"
"""Environment variable; ``1`` shows the traceback of errors that a user normally sees as text."""

BAD_INPUT = 2
INTERNAL_ERROR = 70


class LogLevel(StrEnum):
    """How much of the library's log is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


app = typer.Typer(
    name="poros",
    help="Train LoRA adapters with the frozen base streamed from host memory, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"poros-train {importlib.metadata.version('poros-train')}")
        raise typer.Exit


@app.callback()
def _common(
    log_level: Annotated[LogLevel, typer.Option(help="What to log to standard error.")] = (
        LogLevel.WARNING
    ),
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    configure_logging(log_level.value)


families.register(app)
check.register(app)
cache.register(app)
plan.register(app)
gate.register(app)
demo.register(app)
doctor.register(app)


def main() -> None:
    """Run the command line.

    Exit status 2 means bad input, with one paragraph on standard error; 70 means a defect of
    Poros itself, so that it can never be taken for a command's own verdict; 141 means that nobody
    reads the output any more, as of a process that SIGPIPE ends.
    """
    try:
        app()
    except PorosError as error:
        _fail(error, str(error))
    except ModuleNotFoundError as error:
        message = missing_extra(error, what="This command")
        if message is None:
            traceback.print_exc()
            sys.exit(INTERNAL_ERROR)
        _fail(error, message)
    except Exception:
        traceback.print_exc()
        sys.exit(INTERNAL_ERROR)


def _fail(error: Exception, message: str) -> None:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    else:
        print_error(message)
    sys.exit(BAD_INPUT)
