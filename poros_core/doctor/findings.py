"""What the doctor says: one finding a line."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

__all__ = ["Finding", "Level", "good", "not_measured", "problem", "warning", "worst"]


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """Poros works here, but slower, smaller or less surely than it could."""
    PROBLEM = "problem"
    """Something that was installed or plugged in for this purpose does not work."""


_ORDER = list(Level)


@frozen(kw_only=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: what was looked at.
        level: how bad it is.
        text: what was found.
        fix: what to do about it; None exactly if nothing is wrong.
        measured: False if it could not be looked at; ``text`` says why.
        values: the figures behind ``text``, in bytes, bytes a second or as they were read.
    """

    name: str
    level: Level
    text: str
    fix: str | None = field(default=None)
    measured: bool = True
    values: Mapping[str, Any] = field(factory=dict)

    @fix.validator
    def _fits(self, attribute: Any, value: str | None) -> None:
        assert (self.level is Level.OK) is (value is None), f"{self.name}: {self.level}, {value}"


def good(name: str, text: str, **values: Any) -> Finding:
    """Return a finding that all is well."""
    return Finding(name=name, level=Level.OK, text=text, values=values)


def warning(name: str, text: str, *, fix: str, **values: Any) -> Finding:
    """Return a finding that something could be better."""
    return Finding(name=name, level=Level.WARNING, text=text, fix=fix, values=values)


def problem(name: str, text: str, *, fix: str, **values: Any) -> Finding:
    """Return a finding that something does not work."""
    return Finding(name=name, level=Level.PROBLEM, text=text, fix=fix, values=values)


def not_measured(name: str, reason: str, *, fix: str) -> Finding:
    """Return a finding that nothing could be found out, which is never taken for all is well."""
    return Finding(
        name=name, level=Level.WARNING, text=f"not measured: {reason}", fix=fix, measured=False
    )


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of all findings."""
    return max((finding.level for finding in findings), key=_ORDER.index, default=Level.OK)
