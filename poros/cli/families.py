"""``poros list-families``."""

from __future__ import annotations

from typing import Annotated

import attrs
import typer
from rich.table import Table
from rich.text import Text

from poros.cli.output import console, print_json, print_line, status_text
from poros_core.catalog import FamilyInfo, installed_families

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("list-families")(list_families)


def list_families(
    json_output: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """List the model families that are installed."""
    families = installed_families()
    if json_output:
        print_json([attrs.asdict(info) for info in families])
        return
    out = console()
    if not families:
        out.print("No family is installed.")
        return
    out.print(_table(families))
    for info in families:
        if info.records:
            print_line(Text(f"{info.name}: {info.status} ({info.detail})", style="dim"))
    if any(not info.records for info in families):
        out.print("[dim]others: experimental (no gate record shows parity on a GPU yet)[/dim]")


def _table(families: list[FamilyInfo]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("Family", "Name", "Model types", "Status", "Plugin"):
        table.add_column(heading, overflow="fold")
    for info in families:
        origin = (
            "registered by hand"
            if info.distribution is None
            else f"{info.distribution} {info.version}"
        )
        table.add_row(
            info.title,
            info.name,
            ", ".join(info.model_types),
            status_text(info.status),
            f"{info.plugin} ({origin})",
        )
    return table
