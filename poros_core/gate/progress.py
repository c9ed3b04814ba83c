"""The saved state of a gate that was cut short, from which it goes on.

[Note: One state for all arms]
A gate goes on only while its arms are equal in every bit: adapter weights, optimizer state and
random-number streams are surfaces, compared after every step. So the state of one arm is the state
of all, and what is saved is the resident arm's. Bases, batches and what adapters started from
follow from the seed, or are files, whose identity is kept and checked.

[Note: The file of a state]
One line names the format and the SHA-256 of all that follows it, which ``torch.save`` has written:
reading that back checks no sum, so damaged weights would load. A file appears whole or not at all.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from poros_core.errors import GateError
from poros_core.gate.arms import Arm
from poros_core.gate.files import write_whole
from poros_core.gate.flags import same_settings

__all__ = ["Progress", "pack", "unpack"]

_FORMAT = b"poros gate state 2 "
_ENTRIES: Mapping[str, type] = {
    **{"identity": dict, "step": int, "arm": dict, "meters": dict},
    **{"counters": list, "losses": dict, "segments": list},
}
_ARM = {"params", "optimizer", "rng", "had_gradient"}
_EVERY_S = 180.0


@define(eq=False, kw_only=True)
class Progress:
    """How far a gate is, and where that is kept.

    Attributes:
        path: the file; None keeps nothing.
        identity: what is ``asked``, on what ``stack``, and what identifies the ``inputs``: a saved
            state of another gate or of other inputs is refused, and one from another stack is of no
            use.
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
            GateError: it is no saved state or a damaged one, or that of another gate or of other
                weights or data.
        """
        if self.path is None or not self.path.exists():
            return None
        state = _read(self.path)
        theirs, ours = state["identity"], _plain(self.identity)
        if not same_settings(theirs["asked"], ours["asked"]):
            raise GateError(
                f"'{self.path}' is the saved state of a gate with other settings. Name another "
                "file, or remove it."
            )
        if theirs["stack"] != ours["stack"]:
            return "the saved state is from another stack or commit: starting from the first step"
        if theirs["inputs"] != ours["inputs"]:
            raise GateError(
                f"'{self.path}' is the saved state of a gate on other files: "
                f"{_other(theirs['inputs'], ours['inputs'])} differs, in its content or in when it "
                "was written. Put back what was there, or remove the state to begin anew."
            )
        _check_arms(self.path, state, arms)
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
            "identity": _plain(self.identity),
            "step": self.step,
            "arm": arms["resident"].state(),
            "meters": {name: arm.meter.state() for name, arm in arms.items()},
            "counters": self.counters,
            "losses": self.losses,
            "segments": self.segments,
        }
        write_whole(self.path, *pack(state))
        self._saved_at = time.monotonic()


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def pack(state: Mapping[str, Any]) -> tuple[bytes, memoryview]:
    """Return what a file of a state consists of. See [Note: The file of a state]."""
    stream = io.BytesIO()
    torch.save(dict(state), stream)
    payload = stream.getbuffer()
    return _FORMAT + hashlib.sha256(payload).hexdigest().encode() + b"\n", payload


def unpack(content: bytes) -> Any:
    """Return what was packed.

    Raises:
        ValueError: it is no state, or it is damaged.
    """
    line, _, payload = content.partition(b"\n")
    if not line.startswith(_FORMAT):
        raise ValueError("it does not begin as one of this version does")
    if hashlib.sha256(payload).hexdigest().encode() != line.removeprefix(_FORMAT):
        raise ValueError("it is damaged: its SHA-256 is not the one that was written with it")
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError("torch cannot read it") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        state = unpack(path.read_bytes())
        wrong = _contradiction(state)
        if wrong is not None:
            raise ValueError(wrong)
    except (OSError, ValueError) as error:
        raise _no_state(path, str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_state(path, "an entry is not what it can be") from error
    found: dict[str, Any] = state
    return found


def _no_state(path: Path, why: str) -> GateError:
    return GateError(
        f"'{path}' is no saved state of a gate that can go on ({why}). Remove it to begin anew, or "
        "name another file."
    )


def _contradiction(state: Any) -> str | None:
    """Say what a state lacks, or where it is at odds with itself; None if it is sound."""
    if not isinstance(state, dict):
        return "it holds no entries"
    for name, kind in _ENTRIES.items():
        if not isinstance(state.get(name), kind):
            return f"it has no '{name}', or not one that can be"
    missing = sorted({"asked", "stack", "inputs"} - state["identity"].keys())
    missing += sorted(_ARM - state["arm"].keys())
    if missing:
        return f"it has no '{missing[0]}'"
    step, asked = state["step"], state["identity"]["asked"]
    if not isinstance(asked, dict) or not 1 <= step <= asked.get("steps", 0):
        return f"step {step} is none of the gate's"
    lengths = {len(state["counters"]), *map(len, state["losses"].values())}
    if lengths != {step} or not {"resident", "streamed"} <= state["losses"].keys():
        return f"it is at step {step} and has not as many losses and counters"
    if not _contiguous(state["segments"], step):
        return f"its segments are not the steps from 1 to {step}"
    return None


def _contiguous(segments: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Say whether segments are all steps up to one, each once."""
    last = 0
    for segment in segments:
        if segment["first"] != last + 1 or segment["last"] is None:
            return False
        if segment["last"] < segment["first"]:
            return False
        last = segment["last"]
    return last == step


def _check_arms(path: Path, state: Mapping[str, Any], arms: Mapping[str, Arm]) -> None:
    """Check that a state fits every arm, before any of them takes it.

    Raises:
        GateError: it does not.
    """
    saved = state["arm"]["params"]
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name, arm in arms.items():
        if name not in state["meters"]:
            raise _no_state(path, f"it has no measurements of the arm '{name}'")
        if shapes != {key: tuple(param.shape) for key, param in arm.params.items()}:
            raise _no_state(path, "its adapter tensors are not those of the gate")


def _other(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Name the first input that is not the same in both."""
    return next(name for name in [*ours, *theirs] if theirs.get(name) != ours.get(name))
