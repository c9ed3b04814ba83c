"""``poros cache``."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.table import Table
from rich.text import Text

from poros.cli.output import console, print_json, print_line
from poros_core.errors import SettingsError
from poros_core.packed_cache import PackedCache, cache_from, default_folder
from poros_core.packed_entry import EntryInfo

__all__ = ["register"]

DAMAGED = 1

Folder = Annotated[
    Path | None,
    typer.Option(
        help="The cache's folder.", show_default="what POROS_CACHE says, else the default"
    ),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(
        help="Look after bases that poros.load(cache=...) keeps on disk.", no_args_is_help=True
    )
    group.command("list")(list_entries)
    group.command("verify")(verify)
    group.command("clear")(clear)
    app.add_typer(group, name="cache")


def list_entries(folder: Folder = None, json_output: Json = False) -> None:
    """List the bases that are kept, least recently used first."""
    cache = _cache(folder)
    entries = cache.entries()
    if json_output:
        print_json([_as_json(info) for info in entries])
        return
    if entries:
        console().print(_table(entries))
    total = sum(info.nbytes for info in entries)
    print_line(
        Text(
            f"{len(entries)} bases, {total / 1e9:.2f} GB of at most {cache.limit / 1e9:.0f} GB, "
            f"in {cache.folder}"
        )
    )


def verify(folder: Folder = None, json_output: Json = False) -> None:
    """Read every file and compare it with the checksum that was noted when it was written.

    Exit status: 0 all are whole, 1 one is damaged, 2 bad input.
    """
    cache = _cache(folder)
    damaged = False
    shown: list[dict[str, Any]] = []
    for info in cache.verify():
        damaged = damaged or info.problem is not None
        shown.append(_as_json(info))
        if not json_output:
            print_line(_verdict(info))
    if json_output:
        print_json(shown)
    elif not shown:
        print_line(Text(f"No base is kept in {cache.folder}."))
    elif damaged:
        print_line(Text("Clear what is damaged; the next load makes it anew."))
    raise typer.Exit(DAMAGED if damaged else 0)


def clear(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names that `poros cache list` shows.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", metavar="", help="Remove all.")] = False,
    folder: Folder = None,
) -> None:
    """Remove bases. One that a running process reads from disk is left, and said so.

    Exit status: 0 removed, 1 one is in use, 2 bad input.
    """
    cache = _cache(folder)
    known = {info.name: info for info in cache.entries()}
    wanted = list(known) if everything else list(names or [])
    if not wanted and not everything:
        raise SettingsError(
            "Say what to remove: names that `poros cache list` shows, or --all for everything."
        )
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SettingsError(
            f"No base is kept under the name {', '.join(unknown)}. See `poros cache list`."
        )
    in_use = [name for name in wanted if not cache.remove(name)]
    freed = sum(known[name].nbytes for name in wanted if name not in in_use)
    print_line(Text(f"Removed {len(wanted) - len(in_use)} bases, {freed / 1e9:.2f} GB."))
    for name in in_use:
        print_line(Text(f"{name}: left, a process reads from it", style="yellow"))
    raise typer.Exit(1 if in_use else 0)


def _cache(folder: Path | None) -> PackedCache:
    if folder is not None:
        return PackedCache(folder)
    return cache_from(None) or PackedCache(default_folder())


def _as_json(info: EntryInfo) -> dict[str, Any]:
    return {**attrs.asdict(info), "used": _time(info).isoformat(timespec="seconds")}


def _time(info: EntryInfo) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(info.used, datetime.UTC)


def _table(entries: list[EntryInfo]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("Name", "Base", "Precision", "Size", "Last used"):
        table.add_column(heading, overflow="fold")
    for info in entries:
        table.add_row(
            info.name,
            info.title if info.problem is None else Text(info.problem, style="red"),
            info.precision,
            f"{info.nbytes / 1e9:.2f} GB",
            f"{_time(info).astimezone():%Y-%m-%d %H:%M}",
        )
    return table


def _verdict(info: EntryInfo) -> Text:
    if info.problem is None:
        return Text.assemble(f"{info.name}  ", ("whole", "green"), f"  {info.title}")
    return Text.assemble(f"{info.name}  ", (f"damaged: {info.problem}", "red"), f"  {info.title}")
