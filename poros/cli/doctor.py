"""``poros doctor``."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import typer
from rich.text import Text

from poros.cli.output import print_json, print_line, print_rows
from poros_core.doctor import Finding, Level, examine, worst

__all__ = ["register"]

_FAILED = 1
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("doctor")(doctor)


def doctor(
    json_output: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Look at this machine: versions, GPU, link, memory, disk; and say what to do.

    Exit status: 0 no problem, though there may be warnings; 1 a problem.
    """
    findings = examine()
    if json_output:
        print_json(_as_json(findings))
    else:
        _print(findings)
    if worst(findings) is Level.PROBLEM:
        raise typer.Exit(_FAILED)


def _as_json(findings: list[Finding]) -> dict[str, Any]:
    return {
        "verdict": worst(findings).value,
        "findings": [{**attrs.asdict(f), "level": f.level.value} for f in findings],
    }


def _print(findings: list[Finding]) -> None:
    print_rows([(_level(finding), finding.name, finding.text) for finding in findings])
    fixes: dict[str, list[str]] = {}
    for finding in findings:
        if finding.fix is not None:
            names = fixes.setdefault(finding.fix, [])
            if finding.name not in names:
                names.append(finding.name)
    if not fixes:
        print_line(Text("\nNothing to do.", style="green"))
        return
    print_line(Text("\nWhat to do", style="bold"))
    for fix, names in fixes.items():
        print_line(Text.assemble((f"{', '.join(names)}: ", "bold"), fix))


def _level(finding: Finding) -> Text:
    return Text(finding.level.value.upper(), style=_STYLES[finding.level])
