"""``poros check``."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import typer
from rich.text import Text

from poros.cli.output import print_json, print_line
from poros_core.catalog import Coverage, coverage
from poros_core.configs import read_config
from poros_core.errors import CheckpointError
from poros_core.planner.configs import quantised_with

__all__ = ["register"]

NOT_SUPPORTED = 1


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("check")(check)


def check(
    model: Annotated[str, typer.Argument(help="A local folder, a config.json, or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    json_output: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Say whether a model is supported. Reads its config.json and nothing else.

    Exit status: 0 supported, 1 not supported, 2 could not be read.
    """
    config = read_config(model, revision=revision)
    result = coverage(config)
    if result.family is not None:
        try:
            quantised_with(model, config)
        except CheckpointError as error:
            result = attrs.evolve(result, family=None, reason=str(error))
    if json_output:
        print_json(_as_json(model, result))
    else:
        print_line(_as_text(model, result))
    if result.family is None:
        raise typer.Exit(NOT_SUPPORTED)


def _as_json(model: str, result: Coverage) -> dict[str, Any]:
    return {
        "model": model,
        "model_type": result.model_type,
        "supported": result.family is not None,
        "family": None if result.family is None else attrs.asdict(result.family),
        "reason": result.reason,
    }


def _as_text(model: str, result: Coverage) -> Text:
    if result.family is None:
        return Text.assemble((f"{model}: not supported. ", "red"), result.reason or "")
    info = result.family
    return Text.assemble(
        (f"{model}: supported", "green"),
        f" by family {info.name} ({info.title}), which is {info.status} ({info.detail}).",
    )
