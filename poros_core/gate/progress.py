"""The saved state of a gate that was cut short, from which it goes on.

[Note: One state for all arms]
A gate goes on only while its arms are equal in every bit: adapter weights, optimizer state and
random-number streams are surfaces, compared after every step. So the state of one arm is the state
of all, and what is saved is the resident arm's. Bases, batches and what adapters started from
follow from the seed.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from poros_core.errors import GateError
from poros_core.gate.arms import Arm
from poros_core.gate.flags import same_settings

__all__ = ["Progress"]

_VERSION = 1
_EVERY_S = 180.0


@define(eq=False, kw_only=True)
class Progress:
    """How far a gate is, and where that is kept.

    Attributes:
        path: the file; None keeps nothing.
        identity: what is asked, and on what stack: a saved state of another gate is refused, and
            one from another stack is of no use.
        until: when to stop, by ``time.monotonic``; None means never.
        step: the last step that was compared.
        counters: per step, how much the runtime's totals rose.
        losses: per step and arm.
        segments: the stretches of steps that ran without a break, with their dates.
    """

    path: Path | None
    identity: Mapping[str, Any]
    until: float | None = None
    step: int = 0
    counters: list[dict[str, int]] = field(factory=list)
    losses: dict[str, list[float]] = field(factory=dict)
    segments: list[dict[str, Any]] = field(factory=list)
    _saved_at: float = field(factory=time.monotonic)
    _first: int = 1

    @property
    def time_is_up(self) -> bool:
        """Whether to stop. At least one step is made first, so that a run gets on."""
        return self.until is not None and self.step >= self._first and time.monotonic() > self.until

    def load(self, arms: Mapping[str, Arm]) -> str | None:
        """Go on from the file, if there is one.

        Returns:
            What to say of it, or None if there is nothing to go on from.

        Raises:
            GateError: it is no saved state, or that of another gate.
        """
        if self.path is None or not self.path.exists():
            return None
        state = _read(self.path)
        asked = _plain(self.identity["asked"])
        if not same_settings(state["identity"]["asked"], asked):
            raise GateError(
                f"'{self.path}' is the saved state of a gate with other settings. Name another "
                "file, or remove it."
            )
        if state["identity"]["stack"] != _plain(self.identity["stack"]):
            return "the saved state is from another stack or commit: starting from the first step"
        for name, arm in arms.items():
            arm.load_state(state["arm"])
            arm.meter.load_state(state["meters"][name])
        self.step = state["step"]
        self._first = self.step + 1
        self.counters, self.losses = state["counters"], state["losses"]
        self.segments = state["segments"]
        return f"going on after step {self.step}"

    def begin(self) -> None:
        """Open a segment, now that the arms stand."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.segments.append({"first": self.step + 1, "last": None, "date": now})

    def note(self, step: int, counters: dict[str, int], losses: Mapping[str, float]) -> None:
        """Note a step that was compared."""
        self.step = step
        self.counters.append(counters)
        for name, loss in losses.items():
            self.losses.setdefault(name, []).append(loss)
        self.segments[-1]["last"] = step

    def save_if_due(self, arms: Mapping[str, Arm], *, now: bool = False) -> None:
        """Save, if there is a file and the last time is some minutes ago, or at once."""
        if self.path is None or not (now or time.monotonic() - self._saved_at > _EVERY_S):
            return
        state = {
            "version": _VERSION,
            "identity": _plain(self.identity),
            "step": self.step,
            "arm": arms["resident"].state(),
            "meters": {name: arm.meter.state() for name, arm in arms.items()},
            "counters": self.counters,
            "losses": self.losses,
            "segments": self.segments,
        }
        part = self.path.with_name(f"{self.path.name}.part")
        torch.save(state, part)
        os.replace(part, self.path)
        self._saved_at = time.monotonic()

    def forget(self) -> None:
        """Remove the file: the gate has ended."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if state["version"] != _VERSION:
            raise KeyError("version")
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise GateError(
            f"'{path}' is no saved state of a gate ({str(error).splitlines()[0]}). Name another "
            "file, or remove it."
        ) from error
    return state
