"""Sizes as people write them."""

from __future__ import annotations

import re

from poros_core.errors import SettingsError

__all__ = ["parse_size"]

_UNITS = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
_BYTES_FROM = 1000
"""A number without a unit is bytes from here on: nobody's card has so many of anything else."""


def parse_size(text: str, *, what: str) -> int:
    """Return a size in bytes.

    Args:
        text: a number with a unit, as ``16GB`` (1e9 bytes each) or ``16GiB``; without one, bytes,
            of which there must be so many that nothing else can be meant.
        what: which setting it is, for the error.

    Raises:
        SettingsError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    factor = None if match is None else _UNITS.get(match[2].upper())
    if match is None or factor is None or float(match[1]) == 0:
        raise SettingsError(f"{what} must be a size such as 16GB or 15.5GiB; got '{text}'.")
    if not match[2] and float(match[1]) < _BYTES_FROM:
        raise SettingsError(f"{what} needs a unit, such as {match[1]}GB; got '{text}'.")
    return round(float(match[1]) * factor)
