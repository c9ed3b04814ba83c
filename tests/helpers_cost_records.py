"""What a benchmark's record says twice: rules by which it is held to itself, as of a gate's."""

from __future__ import annotations

import importlib
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers_benchmarks import scripts
from helpers_records import Record, Rule, stack

_TRAINED = ("training-cost", "real-loop", "step-profile")
_WHOLE = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "step_seconds")


def cost_problems(record: Record) -> list[str]:
    """Return what does not fit in a record of a benchmark."""
    rules: dict[str, tuple[Rule, ...]] = {
        **dict.fromkeys(_TRAINED, (_steps, _memory, _link, _introduced, _command, stack)),
        "load-cost": (_load, _load_command, stack),
        "load-bytes": (_bytes, _load_command, stack),
    }
    return [found for rule in rules[record["kind"]] for found in rule(record)]


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > 1e-9 * max(abs(one), abs(other))


def _steps(record: Record) -> Iterator[str]:
    seconds = record["step_seconds"]
    if (record["outcome"] == "trained") is not (record["error"] is None and seconds is not None):
        yield "outcome: trained without figures, or figures without training"
    if record["outcome"] != "trained" and any(record[name] is not None for name in _WHOLE):
        yield "outcome: refused, with figures"
    if seconds is None:
        return
    every = record["step_seconds_all"]
    if len(every) != record["steps"]:
        yield "steps: not a time for each"
    said = (seconds["min"], seconds["median"], seconds["max"], record["step_seconds_mean"])
    wanted = (min(every), statistics.median(every), max(every), statistics.fmean(every))
    if any(abs(one - other) > 1e-6 for one, other in zip(said, wanted, strict=True)):
        yield "steps: their median, least, most or mean is another"
    if record["kind"] == "real-loop":
        if len(record["widths"]) != record["steps"]:
            yield "losses: not a width for each step"
        blocks = record["graph_replays"] + record["eager_blocks"]
        share, streams = record["graph_share"], record["method"] == "poros"
        if streams is not (share is not None and blocks > 0):
            yield "graphs: a share where nothing streams, or none where it does"
        elif streams and _differ(share, record["graph_replays"] / blocks):
            yield "graphs: another share was replayed"
    elif len(record["losses"]) != record["steps"] + record["warmup"]:
        yield "losses: not one for each step"


def _memory(record: Record) -> Iterator[str]:
    if record["step_seconds"] is None:
        return
    names = (*_WHOLE[:3], "peak_device_bound_bytes")
    peaks = [record[name] for name in names]
    if peaks != sorted(peaks) or not peaks[0] > 0:
        yield "peaks: allocated, reserved and the device's are not in order"
    if record["allocated_between_steps_bytes"] > peaks[0]:
        yield "peaks: more is allocated between steps"
    cap, card = record["settings"].get("cap_bytes"), record["card"]
    most = max(peaks[3], record["build_peak_device_bytes"])
    if record["within_cap"] is not (None if cap is None else most <= cap):
        yield "peaks: within the card, or not"
    if card is not None:
        used = card["context_bytes"] + card["reserved_for_graphs_bytes"]
        if card["cap_bytes"] != cap or card["allocator_limit_bytes"] != cap - used:
            yield "peaks: the card is another"
        if peaks[1] > card["allocator_limit_bytes"]:
            yield "peaks: more was reserved than the card had"


def _link(record: Record) -> Iterator[str]:
    streamed, rate = record["bytes_streamed_per_step"], record["link_bytes_per_second"]
    floor, ratio = record["link_floor_seconds"], record["step_over_floor"]
    ours = record["method"] == "poros" and record["outcome"] == "trained"
    if ours is not bool(streamed):
        yield "link: streamed, or not"
    if (floor is None) is bool(streamed) or (ratio is None) is bool(streamed):
        yield "link: a floor without bytes, or bytes without a floor"
    elif floor is not None and (
        _differ(floor, streamed / rate) or _differ(ratio, record["step_seconds"]["median"] / floor)
    ):
        yield "link: the floor is not bytes over rate, or the step over it is another"
    if any(found > rate for found in (record["link_rates_by_size"] or {}).values()):
        yield "link: a copy was faster than the highest rate"
    if ours and not 0 <= record["resident_units"] <= record["layers"]:
        yield "link: more layers stayed than there are"


def _introduced(record: Record) -> Iterator[str]:
    """Hold a record to what results.md says of all rows."""
    said = (record["family"], record["batch"], record["rank"], record["dropout"])
    if said != ("qwen2", 1, 16, 0.05):
        yield f"introduced: {said}"
    if record["steps"] < 10:
        yield "introduced: a median of fewer than ten steps"
    if record["stack"]["gpu"] != "NVIDIA H200":
        yield "introduced: another GPU"


def _words(record: Record, *names: str) -> list[str]:
    python, script, *words = shlex.split(record["command"])
    assert python == "python", record["command"]
    assert script.removeprefix("benchmarks/") in names, record["command"]
    return words


def _command(record: Record) -> Iterator[str]:
    scripted = {
        "training-cost": ("training_cost.py", "emulated_cards.py"),
        "real-loop": ("real_loop.py",),
        "step-profile": ("step_profile.py",),
    }
    words = _words(record, *scripted[record["kind"]])
    with scripts() as bench, TemporaryDirectory() as folder:
        if record["data"] is not None:  # the scripts look whether their data is there
            place = words.index("--data") + 1
            words[place] = f"{folder}/{Path(words[place]).name}"
            Path(words[place]).touch()
        options = bench.cost_options.arguments(
            [*_defaults(bench, record), *words],
            about=None,
            data=record["kind"] == "real-loop",
            cards="--cards" in words,
        )
        if record["kind"] == "real-loop":
            options.methods = bench.real_loop.methods_at_paddings(options.methods)
        works = bench.cost_options.works(options)
        found = [bench.cost_work.described(work) for work in works]
    settings = {n: v for n, v in record["settings"].items() if not n.startswith("cap")}
    said = {name: record[name] for name in found[0] if name not in ("weights", "settings")}
    if not any(_says(work, said, settings) for work in found):
        yield "command: it measures nothing that the record says"
    cards = getattr(options, "cards", None)
    cap = record["settings"].get("cap_bytes")
    if cap is not None and f"{cap / 1e9:g}" not in str(cards).split(","):
        yield "command: it emulates another card"


def _says(work: dict[str, Any], said: Record, settings: Record) -> bool:
    """Say whether a work is a record's; settings that a record is too old to have are left out."""
    own = {name: value for name, value in work["settings"].items() if name in settings}
    return {**work, "settings": own} == {**work, **said, "settings": settings}


def _defaults(bench: Any, record: Record) -> Sequence[str]:
    """Return what a script puts before the command line that it was given."""
    if record["kind"] == "real-loop":
        return [*bench.real_loop.STEPS, "--methods", bench.real_loop.METHODS]
    return bench.step_profile.STEPS if record["kind"] == "step-profile" else ()


# loads


def _load(record: Record) -> Iterator[str]:
    rates, stages, report = record["rates"], record["stage_seconds"], record["report"]
    if (record["outcome"], record["error"]) != ("loaded", None):
        yield "outcome: not loaded"
    floor = record["floor_seconds"]
    if floor != max(stages.values()):
        yield "floor: another stage is slower"
    if _differ(record["seconds_over_floor"], record["seconds"] / floor):
        yield "floor: the time over it is another"
    packed, store = record["packed_bytes"], record["host_store_bytes"]
    whole = packed + record["unquantised_bytes"]
    if not whole <= store + record["device_base_bytes"] <= 1.01 * whole:
        yield "sizes: the base's parts are not the base"
    moved = {"to_host": packed, "page_lock": None if record["host"] == "mmap" else store}
    for name, nbytes in moved.items():
        if name in stages and nbytes and abs(stages[name] * rates[name] - nbytes) > 1:
            yield f"floor: {name} is not its bytes over its rate"
    if (
        not 0.999 * record["read_bytes"]
        <= stages["read"] * rates["read"]
        <= (1.001 * record["read_bytes"])
    ):
        yield "floor: read is not its bytes over its rate"
    if record["disk_bytes_per_second"] != rates["read"]:
        yield "floor: two rates of the disk"
    same = {"source": "source", "host": "host", "read_bytes": "read_bytes"}
    same |= {"host_bytes": "host_store_bytes", "device_bytes": "device_base_bytes"}
    if any(report[one] != record[other] for one, other in same.items()):
        yield "report: it says something else"
    if (
        report["seconds"] > record["seconds"]
        or report["device_peak_bytes"] != (record["device_peak_bytes"])
    ):
        yield "report: another time or peak"
    if record["host_peak_bytes"] < record["host_steady_bytes"]:
        yield "peaks: more stays on the host than was there"
    if record["device_peak_bytes"] > record["device_driver_peak_bytes"]:
        yield "peaks: more allocated than the driver knows of"
    if record["stack"]["gpu"] != "NVIDIA H200":
        yield "introduced: another GPU"


def _load_command(record: Record) -> Iterator[str]:
    words = _words(record, "load_cost.py")
    with scripts():
        load_cost = importlib.import_module("load_cost")
        works = load_cost.works(load_cost.arguments(words))
        found = [work.described() for work in works]
    method = record["method"].split(":")[0]
    names = ("family", "shape", "precision", "layers", "seed")
    names += ("settings",) if record["kind"] == "load-cost" else ()
    if not any(
        work["method"] == method and all(work[name] == record[name] for name in names)
        for work in found
    ):
        yield "command: it loads nothing that the record says"


def _bytes(record: Record) -> Iterator[str]:
    runs = record["runs"]
    for name in ("tensors", "mismatched"):
        if record[name] != sum(run[name] for run in runs):
            yield f"bytes: the runs' {name} are others"
    wrong = any(run["first"] is not None for run in runs)
    if wrong is not (record["mismatched"] > 0):
        yield "bytes: the first that differs is named, or none does"
    clean = record["mismatched"] == 0 and not record["void_reasons"] and record["tensors"] > 0
    clean = clean and all(run["as_asked"] for run in runs) and not record["planted_fault"]
    if (record["verdict"] == "exact") is not clean:
        yield f"verdict: {record['verdict']}"
