"""The command line of the cost benchmarks: settings, methods with settings of their own, sweeps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from attrs import evolve, fields
from cost_work import CARD, METHODS, Work

from poros_core.sizes import parse_size

LEAST_STEPS = 10
_OWN = ("block-size", "graphs", "vram-budget", "offload-activations")


def _bytes(text: str) -> int:
    return int(float(text))


def _budget(text: str) -> int | str | None:
    if text.lower() == "none":
        return None
    return int(text) if text.isdigit() else text


def _block_size(text: str) -> int | str:
    return text if text == "all" else int(text)


def _multiple(text: str) -> int | None:
    return None if text == "none" else int(text)


def _one_of(choices: Mapping[str, Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in choices:
            raise ValueError(f"'{text}' is none of {', '.join(choices)}")
        return choices[text]

    return read


def _named(*choices: str) -> Callable[[str], Any]:
    return _one_of({choice: choice for choice in choices})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# how the text of each setting is read, on the command line and behind a method's name
SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "layers": int,
    "precision": _named("nf4", "bf16"),
    "seq-len": int,
    "batch": int,
    "rank": int,
    "dropout": float,
    "steps": int,
    "warmup": int,
    "seed": int,
    "optimizer-state": _named("device", "host"),
    "graphs": _named("auto", "on", "off"),
    "block-size": _block_size,
    "vram-budget": _budget,
    "offload-activations": _one_of({"yes": True, "no": False}),
    "chunk": int,
    "pad-to": _multiple,
    "nan-filter": _one_of({"yes": True, "no": False}),
    "profiled": int,
    "direct": _one_of({"yes": True, "no": False, "auto": None}),
    "weights": _named("drawn", "rolled"),
    "cap-bytes": _bytes,
    "cap-reserve-bytes": _bytes,
}


def arguments(
    argv: Sequence[str] | None = None,
    *,
    about: str | None,
    data: bool = False,
    cards: bool = False,
) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: without the script's name; None means this process's own.
        about: what the help says.
        data: whether there is a file of records, and the loop is a Trainer's.
        cards: whether there are cards to emulate.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if data:
        parser.add_argument("--data", help="tokenised records: ids, offsets and prompt_len")
    if cards:
        parser.add_argument("--cards", help="their sizes in GB, separated by commas")
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--shape", help="a shape of the family, such as 7b")
    parser.add_argument("--methods", default="poros,peft-checkpointing", help=", ".join(METHODS))
    defaults = {field.name: field.default for field in fields(Work)}
    for name, read in SETTINGS.items():
        default = defaults[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=read, default=default, help=f"default {default}")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="every method once for each value; Poros' own settings for Poros only",
    )
    parser.add_argument(
        "--prepare", action="append", default=[], metavar="NAME=VALUE",
        help="a further setting of poros.prepare, the value as JSON",
    )  # fmt: skip
    parser.add_argument(
        "--shared", action="store_true",
        help="one process for all works with the same base, which is built once",
    )  # fmt: skip
    parser.add_argument("--json-dir", type=Path, help="write a record for each method there")
    parser.add_argument("--timeout", type=float, help="seconds that one method may take")
    parser.add_argument(
        "--talkative", action="store_true", help="show what methods say on standard error"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args(argv)
    missing = [name for name in ("shape", "data") if getattr(found, name, "") is None]
    if missing and not found.worker:
        parser.error(f"--{missing[0]} is needed")
    return found


def works(options: argparse.Namespace) -> list[Work]:
    """Return the work of every method that was asked for.

    Raises:
        ValueError: one of them is none, or has a setting that is none.
    """
    sweeps = [_pair(text) for text in options.sweep]
    common = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in SETTINGS}
    extra = dict(_pair(text) for text in options.prepare)
    found = []
    for spec in options.methods.split(","):
        method, *own = spec.split(":")
        if method not in METHODS:
            raise ValueError(f"there is no method '{method}'; there are {', '.join(METHODS)}")
        work = Work(
            method=method,
            family=options.family,
            shape=options.shape,
            data=getattr(options, "data", None),
            prepare={name: _value(text) for name, text in extra.items()},
            **common,
        )
        pairs = [_pair(text) for text in own]
        fixed = {*dict(pairs), *([] if method == "poros" else _OWN)}
        swept = [_each(name, texts) for name, texts in sweeps if name not in fixed]
        for values in product(*swept):
            found.append(_checked(_changed(work, [*values, *pairs], spec=spec)))
    return found


def _each(name: str, texts: str) -> list[tuple[str, str]]:
    return [(name, text) for text in texts.split(",")]


def _changed(work: Work, pairs: Sequence[tuple[str, str]], *, spec: str) -> Work:
    for name, text in pairs:
        if name not in SETTINGS:
            raise ValueError(f"method '{spec}': '{name}' is none of {', '.join(SETTINGS)}")
        work = evolve(work, **{name.replace("-", "_"): SETTINGS[name](text)})
    return work


def _checked(work: Work) -> Work:
    if work.steps < LEAST_STEPS or work.warmup < 1:
        raise ValueError(
            f"a median needs {LEAST_STEPS} steps or more after 1 step of warm-up or more; got "
            f"--steps {work.steps} --warmup {work.warmup}"
        )
    if work.direct and work.weights == "rolled":
        raise ValueError("rolled weights come from a checkpoint, and direct ones from none")
    if work.data is not None and not Path(work.data).is_file():
        raise ValueError(f"there is no file {work.data}")
    if known := [name for name in work.prepare if name.replace("_", "-") in SETTINGS]:
        raise ValueError(f"--prepare {known[0]} is --{known[0].replace('_', '-')}")
    if isinstance(work.vram_budget, str) and work.vram_budget not in ("auto", CARD):
        parse_size(work.vram_budget, what="--vram-budget")
    if work.vram_budget == CARD and work.cap_bytes is None:
        raise ValueError(f"--vram-budget {CARD} is an emulated card's, so it needs --cap-bytes")
    work.subject()
    return work


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"'{text}' is no NAME=VALUE")
    return name, value
