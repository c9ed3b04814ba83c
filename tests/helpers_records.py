"""What a gate's record says twice: rules by which it is held to itself.

A rule yields a few words for everything that does not fit; a record that fits yields nothing.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from poros.cli import app
from poros_core.gate.compare import SURFACES
from poros_core.gate.flags import SETTINGS, options_of, same_settings, settings_of
from poros_core.gate.meaning import proof
from poros_core.gate.options import subject_of

Record = Mapping[str, Any]
Rule = Callable[[Record], Iterator[str]]

GATES = ("training-parity", "leading-layers-parity", "fingerprint-parity")
_SAID = {"loader": "load_strategy"}
_SET = {
    "attention_kernels": "attention",
    "resident_checkpointing": "checkpointing",
    "resumed_at": "resume_at",
}


def problems(record: Record) -> list[str]:
    """Return what does not fit in a record of a gate, of a control or of a training loop."""
    kind = record["kind"]
    rules: tuple[Rule, ...]
    if kind == "negative-control":
        rules = (_control, _row, stack)
    elif kind == "training-loop-parity":
        rules = (_loop, _loop_command, stack)
    else:
        assert kind in GATES, kind
        rules = (*_GATE, _row)
    return [found for rule in rules for found in rule(record)]


# a gate


def _verdict(record: Record) -> Iterator[str]:
    control, against = record["control"], record["against"]
    fault = record["planted_fault"]
    surfaces = record["surfaces"].values()
    if control is not None and control["first_divergence"] is not None:
        wanted = "not-deterministic"
    elif against is not None and not against["same_stack"]:
        wanted = "other-stack"
    elif any(surface["first_divergence"] is not None for surface in surfaces):
        wanted = "diverged"
    elif record["steps_compared"] < record["steps"]:
        wanted = "unfinished"
    else:
        wanted = "void" if record["void_reasons"] or fault is not None else "exact"
    if record["verdict"] != wanted:
        yield f"verdict: {record['verdict']}, and what was found is {wanted}"
    if wanted == "exact" and not all(surface["exact"] for surface in surfaces):
        yield "verdict: exact, and a surface is not"


def _surfaces(record: Record) -> Iterator[str]:
    if list(record["surfaces"]) != list(SURFACES):
        yield "surfaces: others than the four"
    for name, surface in record["surfaces"].items():
        found, difference = surface["first_divergence"], surface["max_abs_difference"]
        if surface["exact"] is not (found is None and record["steps_compared"] > 0):
            yield f"surfaces: {name} is exact or it diverged"
        if found is None and difference != 0.0 and record["verdict"] != "other-stack":
            yield f"surfaces: {name} has a difference and no divergence"
        if found is not None and found["max_abs_difference"] != difference:
            yield f"surfaces: {name} has two differences"
        if found is not None and not 1 <= found["step"] <= record["steps_compared"]:
            yield f"surfaces: {name} diverged in a step that was not compared"


def _arms(record: Record) -> Iterator[str]:
    control, against, asked = record["control"], record["against"], record["asked"]
    wanted = ["streamed"] if against is not None else ["resident", "streamed"]
    if asked.get("control", True) and against is None:
        wanted.append("control")
    if sorted(record["arms"]) != sorted(wanted) or (control is None) is ("control" in wanted):
        yield "control: what ran is not what was asked for"
    exact = None if control is None else control["first_divergence"] is None
    if record["control_exact"] is not exact:
        yield "control: it diverged, or it is exact"
    if control is not None and exact and control["steps_compared"] != record["steps_compared"]:
        yield "control: it was compared for another number of steps"
    if against is not None and against["same_stack"] is not (against["differing"] == []):
        yield "against: an equal stack on which something differs"
    for name, arm in record["arms"].items():
        # what is reserved is measured in the first steps, which may be shorter with data
        more = (arm["peak_allocated_bytes"] or 0) > (arm["peak_reserved_bytes"] or 0)
        if more and record["data"] is None:
            yield f"peaks: {name} has more allocated than reserved"


def _trained(record: Record) -> Iterator[str]:
    evidence, streamed = record["evidence"], record["arms"]["streamed"]
    compared, losses = record["steps_compared"], record["losses"]
    if record["verdict"] == "exact":
        if not 0 < evidence["adapter_tensors"] == evidence["adapter_tensors_trained"]:
            yield "evidence: exact, and not every adapter trained"
        if sorted(losses) != sorted({"resident", "streamed"} & record["arms"].keys()):
            yield "losses: of other arms"
        if len({tuple(found) for found in losses.values()}) != 1:
            yield "losses: exact, and the arms' differ"
    if compared and streamed["bytes_streamed_per_step"] < max(
        evidence["least_bytes_streamed_per_step"], 1
    ):
        yield "evidence: fewer bytes were streamed than a step streams at least"
    if compared and not streamed["copies_per_step"] > 0:
        yield "evidence: nothing was copied"
    if not 0 <= streamed["resident_units"] <= record["layers"]["trained"]:
        yield "evidence: more layers stayed than there are"
    for arm, found in losses.items():
        if len(found) != compared:
            yield f"losses: {arm} has {len(found)} in {compared} steps"
        if not all(isinstance(loss, float) and math.isfinite(loss) for loss in found):
            yield f"losses: {arm} has one that is no number"
    first = 1
    for segment in record["segments"] if compared else ():
        if segment["first"] != first or segment["last"] < first:
            yield "segments: they leave steps out"
        first = segment["last"] + 1
    if record["segments"] and compared and first != compared + 1:
        yield "segments: they end in another step"


def _asked(record: Record) -> Iterator[str]:
    asked = record["asked"]
    subject = subject_of(options_of(asked))
    wanted = {
        "family": subject.family.name,
        "shape": subject.shape,
        "layers": {"trained": subject.depth, "of": subject.whole},
        "seq_len": subject.seq_len,
        "batch": subject.batch,
        "rank": subject.rank,
    }
    for name, value in wanted.items():
        if record[name] != value:
            yield f"asked: {name} is {record[name]}, not {value}"
    for name in ("precision", "loader", "steps", "accumulate", "dropout", "block_size", "seed"):
        if record[name] != asked[_SAID.get(name, name)]:
            yield f"asked: {name} is {record[name]}"
    if record["data"] != asked["data"]:
        yield "asked: data is other data"
    for name, value in record["settings"].items():
        other = _SET.get(name, name)
        given = name != "attention" and other in asked
        if name == "host" and asked["host"] == "auto":
            continue
        if given and value != asked[other]:
            yield f"asked: the setting {name} is {value}"


def command_settings(command: str) -> dict[str, Any]:
    """Return the flat settings of a ``poros gate`` command, as the command line reads them."""
    group: Any = typer.main.get_command(app)
    poros, name, *words = shlex.split(command)
    assert (poros, name) == ("poros", "gate"), command
    given = dict(group.commands["gate"].make_context("poros gate", words).params)
    given["compile"] = given.pop("compile_layers")
    for number in ("layers", "block_size"):
        if given[number] is not None and given[number].isdigit():
            given[number] = int(given[number])
    return settings_of(options_of({name: given[name] for name in SETTINGS}))


def _command(record: Record) -> Iterator[str]:
    if not same_settings(command_settings(record["command"]), record["asked"]):
        yield "command: it asks for something else than was asked for"
    if ("--against" in record["command"]) is (record["against"] is None):
        yield "command: compared with fingerprints, or not"


def _proof(record: Record) -> Iterator[str]:
    if record["proof"] != proof(record):
        yield "proof: it says something else"


def stack(record: Record) -> Iterator[str]:
    """Yield what a stack lacks."""
    found = record["stack"]
    if not re.fullmatch(r"[0-9a-f]{40}", str(found["poros_commit"])):
        yield "stack: no commit"
    if found["gpu"] is not None and not (found["driver"] and found["compute_capability"]):
        yield "stack: a GPU without a driver"
    for name in ("torch", "transformers", "peft", "bitsandbytes"):
        if not re.match(r"\d+\.\d+", str(found[name])):
            yield f"stack: {name} has no version"


_GATE: tuple[Rule, ...] = (
    *(_verdict, _surfaces, _arms, _trained),
    *(_asked, _command, _proof, stack),
)


# rows of the matrix, controls, loops


def _row(record: Record) -> Iterator[str]:
    row = record.get("row")
    if row is not None and not same_settings(
        settings_of(options_of(row["settings"])), record["asked"]
    ):
        yield "row: its settings are not those asked for"


def _control(record: Record) -> Iterator[str]:
    faulty, clean = record["faulty"], record["clean"]
    for part in (faulty, clean):
        yield from (found for rule in _GATE for found in rule(part))
        if part["stack"] != record["stack"]:
            yield "stack: a part ran on another"
    caught = (faulty["verdict"], clean["verdict"]) == ("diverged", "exact")
    if record["verdict"] != ("caught" if caught else "missed"):
        yield f"verdict: {record['verdict']}, of {faulty['verdict']} and {clean['verdict']}"
    if not (record["plant"] == record["asked"]["plant"] and record["asked"] == faulty["asked"]):
        yield "plant: another one was asked for"
    if clean["asked"] != {**faulty["asked"], "plant": None}:
        yield "plant: without it, something else was asked for"
    if record["what"] is None or record["what"] != faulty["planted_fault"]:
        yield "plant: another one was planted"
    if record["command"] != faulty["command"]:
        yield "command: not that of the faulty part"
    found = [surface["first_divergence"] for surface in faulty["surfaces"].values()]
    if record["found"] not in found or record["found"] is None:
        yield "found: no surface has this divergence"
    elif record["found"]["step"] != min(each["step"] for each in found if each is not None):
        yield "found: another surface diverged before"


def _loop(record: Record) -> Iterator[str]:
    arms = record["arms"]
    adapters = {arm["adapter_sha256"] for arm in arms.values()}
    losses = {tuple(arm["losses"]) for arm in arms.values()}
    if sorted(arms) != ["plain", "poros", "prepared"]:
        yield "arms: others than the three"
    if record["adapter_equal"] is not (len(adapters) == 1):
        yield "verdict: the adapters are equal, or they are not"
    if record["losses_equal"] is not (len(losses) == 1):
        yield "verdict: the losses are equal, or they are not"
    if (record["verdict"] == "exact") is not (len(adapters) == len(losses) == 1):
        yield f"verdict: {record['verdict']}"
    for name, arm in arms.items():
        counters = arm["counters"]
        if len(arm["losses"]) != record["steps"]:
            yield f"losses: {name} has not one a step"
        if arm["peak_allocated_bytes"] > arm["peak_reserved_bytes"]:
            yield f"peaks: {name} has more allocated than reserved"
        if (counters is None) is not (name == "plain"):
            yield f"arms: {name} counts, or does not"
        if counters is not None and not counters["bytes_streamed"] > 0:
            yield f"arms: {name} streamed nothing"


def _loop_command(record: Record) -> Iterator[str]:
    words = shlex.split(record["command"])
    if words[:2] != ["python", "benchmarks/trainer_parity.py"]:
        yield "command: another script"
    given = dict(zip(words[2::2], words[3::2], strict=True))
    said = {name: str(record[name.removeprefix("--")]) for name in given if name != "--json"}
    if said != {name: value for name, value in given.items() if name != "--json"}:
        yield "command: it asks for something else"
    script = {"trainer": "examples/trainer_lora.py", "sft": "examples/sft_lora.py"}
    if record["script"] != script[record["loop"]]:
        yield "command: another script of the examples"
    if not (Path(__file__).resolve().parents[1] / record["script"]).exists():
        yield "command: the script is not there"
