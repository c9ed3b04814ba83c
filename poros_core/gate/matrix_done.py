"""Which rows of a matrix are done: their records are there, whole, and their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poros_core.gate.flags import same_settings, settings_of
from poros_core.gate.matrix import CONTROL, Row
from poros_core.gate.options import FIT
from poros_core.status import PARITY

__all__ = ["SURFACES", "record_that_is_done"]

SURFACES = ("loss", "grad_norms", "optimizer_state", "adapter_weights")
"""What a record has a verdict on, each."""

_FINAL = ("exact", "not-deterministic")
_KINDS = (PARITY, "leading-layers-parity")


def record_that_is_done(row: Row, folder: Path) -> Mapping[str, Any] | None:
    """Return a row's record; None if there is none, or a damaged one, or another row's."""
    path = folder / f"{row.name}.json"
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        done = _is_final(record, row) and _is_own(record, row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if done else None


def _is_final(record: Mapping[str, Any], row: Row) -> bool:
    """Say whether a record is whole, of the row's kind, and needs no second run."""
    if row.planted:
        faulty, clean = record["faulty"], record["clean"]
        return (
            (record["kind"], record["verdict"]) == (CONTROL, "caught")
            and (_is_whole(faulty), faulty["verdict"]) == (True, "diverged")
            and (_is_whole(clean), clean["verdict"]) == (True, "exact")
        )
    return _is_whole(record) and record["verdict"] in _FINAL


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Say whether a record is a gate's, and its surfaces say what its verdict does."""
    exact = [record["surfaces"][surface]["exact"] for surface in SURFACES]
    if record["verdict"] == "exact":
        fits = all(exact) and record["steps_compared"] == record["steps"]
    else:
        fits = record["verdict"] != "diverged" or not all(exact)
    return record["kind"] in _KINDS and fits


def _is_own(record: Mapping[str, Any], row: Row) -> bool:
    """Say whether a record was asked for as the row asks."""
    wanted, asked = settings_of(row.options()), record["asked"]
    if wanted["layers"] == FIT:  # a record says how many did
        asked = {**asked, "layers": record["row"]["settings"]["layers"]}
    return same_settings(asked, wanted)
