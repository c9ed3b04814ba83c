"""README's figures come from committed records, or from the code's own constants."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

import pytest
from helpers_pages import (
    NUMBERS,
    RECORD,
    ROOT,
    TIMES,
    Cells,
    Record,
    absent,
    gb,
    linked,
    model,
    read,
    seconds,
    unheld,
    wrong_rows,
)
from helpers_records import command_settings
from rich.console import Console

from poros.cli.gate_display import print_result
from poros_core.gate.flags import same_settings
from poros_core.gate.record import GateResult
from poros_core.planner.memory import _COUNTED_BYTES
from poros_core.planner.step_time import CARDS
from poros_runtimes.streamed.graphs import SIGNATURES
from poros_runtimes.streamed.residency import _SIGNATURES

PAGE = ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")
RECORDS = "benchmarks/records"
CARD_32B = f"{RECORDS}/training-cost-32b-nf4-poros-20261201T170102Z-41c886-0.json"
CARD_72B = f"{RECORDS}/training-cost-72b-nf4-poros-20261201T171917Z-8c3894-0.json"
PEFT_7B = f"{RECORDS}/training-cost-7b-nf4-peft-20261203T054639Z-c1c510-1.json"


def _parity(record: Record, name: str) -> list[str]:
    arms = [record["arms"][arm] for arm in ("resident", "streamed")]
    return [
        model(record),
        *(gb(arm["peak_allocated_bytes"]) for arm in arms),
        *(seconds(arm["step_seconds"]) for arm in arms),
    ]


def _model_and_how(record: Record) -> str:
    settings = record["settings"]
    how = ", optimizer state on the host" if settings["optimizer_state"] == "host" else ""
    how += ", `copy_ahead=True`" if settings.get("copy_ahead") else ""
    how += ", resident with checkpointing" if record["method"] == "peft-checkpointing" else ""
    filters = settings.get("logging_nan_inf_filter", True)
    return model(record) + how + ("" if filters else ", `logging_nan_inf_filter=False`")


def _cost(record: Record, name: str) -> list[str]:
    return [
        _model_and_how(record),
        *(gb(record[f"peak_{kind}_bytes"]) for kind in ("allocated", "reserved", "device")),
        seconds(record["step_seconds"]["median"]),
        "-" if record["link_floor_seconds"] is None else seconds(record["link_floor_seconds"]),
    ]


def _real_loop(record: Record, name: str) -> list[str]:
    cells = _cost(record, name)
    share = record["graph_share"]
    return [*cells[:3], *cells[4:], "-" if share is None else f"{100 * share:.1f} %"]


def _script(record: Record, name: str) -> list[str]:
    said = {"trainer": "HF `Trainer`", "sft": "TRL `SFTTrainer`, which checkpoints"}
    arms = [record["arms"][arm] for arm in ("plain", "poros")]
    return [said[record["loop"]], *(gb(arm["peak_allocated_bytes"]) for arm in arms)]


PARITY = (*("model", "resident peak", "streamed peak", "resident step", "streamed step", "record"),)
COST = ("model", "allocated", "reserved", "driver", "step", "link floor", "record")
REAL_LOOP = ("model", "allocated", "reserved", "step", "link floor", "blocks replayed", "record")
SCRIPT = ("script", "plain peak", "Poros peak", "record")
KINDS: Mapping[tuple[str, ...], Cells] = {
    PARITY: _parity,
    COST: _cost,
    REAL_LOOP: _real_loop,
    SCRIPT: _script,
}


def records_of(headings: tuple[str, ...]) -> dict[str, Record]:
    """Return the records of README's table of these headings, by name."""
    return {
        path.stem: read(path) for path, found in linked(PAGE, README).items() if headings in found
    }


def one(texts: set[str]) -> str:
    """Return the one text that all records give."""
    assert len(texts) == 1, texts
    return texts.pop()


# sentences


def stack_sentence() -> str:
    """Name the stack of every record that README links, and the settings of its first table."""

    def of(record: Record) -> str:
        stack = record["stack"]
        return (
            f"{stack['gpu']}, driver {stack['driver']}, torch {_minor(stack['torch'])} (CUDA "
            f"{stack['cuda']}), Transformers {_minor(stack['transformers'])}, bitsandbytes "
            f"{stack['bitsandbytes']}. "
        )

    stack = one({of(read(PAGE.parent / link)) for link in RECORD.findall(README)})
    return stack + one({_gate_settings(record) for record in records_of(PARITY).values()})


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _gate_settings(record: Record) -> str:
    settings = record["settings"]
    kernels = "deterministic kernels" if settings["deterministic"] else "any kernels"
    return (
        f"{record['precision'].upper()}, rank {record['rank']} on all linear layers, batch "
        f"{record['batch']}, {record['seq_len']} tokens, dropout {record['dropout']}, "
        f"{settings['optimizer']}, {kernels};"
    )


def resident_sentence() -> str:
    record = read(ROOT / PEFT_7B)
    assert record["method"] == "peft"
    assert f"]({PEFT_7B.removeprefix('benchmarks/')})" in (
        ROOT / "benchmarks" / "results.md"
    ).read_text(encoding="utf-8")
    return (
        f"there a resident step of {record['shape'].upper()} takes "
        f"{seconds(record['step_seconds']['median'])} ([other methods]"
    )


def rolled_sentence() -> str:
    """From the smallest shape on whose weights are rolled, all are, and no smaller one's."""
    found = {True: set(), False: set()}  # type: dict[bool, set[float]]
    for record in records_of(PARITY).values():
        size = float(re.sub("[^0-9.]", "", record["shape"]))
        found[record["settings"]["weights"] == "rolled"].add(size)
    assert max(found[False]) < min(found[True])
    return f"From {min(found[True]):g}B on most layers are rolled copies"


def loop_sentence() -> str:
    """Say how the second table's loop ran, and how fast the link was."""

    def of(record: Record) -> str:
        assert "AdamW, fused; no deterministic kernels" in record["loop"]
        assert "drawn as stored" in record["weights"]
        assert (record["rank"], record["batch"], record["seq_len"]) == (16, 1, 512)
        assert record["settings"]["vram_budget"] is None
        return (
            f"(PCIe 5 {TIMES}16, some {record['link_bytes_per_second'] / 1e9:.0f} GB/s): a plain "
            f"loop, dropout {record['dropout']}, fused AdamW, no deterministic kernels, weights "
            "drawn as stored."
        )

    assert "PCIe 5 x16" in CARDS["h200"].source
    return one({of(record) for record in records_of(COST).values()})


def cards_sentence() -> str:
    """Say what emulated cards reached."""
    said = []
    for link in (CARD_32B, CARD_72B):
        record = read(ROOT / link)
        assert record["within_cap"] is True
        assert record["settings"]["optimizer_state"] == "host"
        assert record["build_peak_device_bytes"] <= record["peak_device_bytes"]
        size = f"{record['card']['cap_bytes'] / 1e9:g} GB"
        reached = f"{gb(record['peak_device_bytes'])} ([record]({link}))"
        said.append((record["shape"].upper(), size, reached))
    (small, small_card, first), (large, large_card, second) = said
    return (
        f"{small} loads and trains on a card of {small_card}, and {large} on one of {large_card}: "
        "with the allocator bounded so that the driver's figure stays below, loading included, it "
        f"reached {first} and {second}."
    )


def script_sentence() -> str:
    """Say how the scripts of the third table ran."""
    return one(
        {
            f"{model(record)}, {record['autocast']} autocast, dropout {record['dropout']}, "
            f"{record['steps']} steps, load and training in one process"
            for record in records_of(SCRIPT).values()
        }
    )


def padding_sentence() -> str:
    """Say how the loops of the fourth table padded."""

    def of(record: Record) -> str:
        assert "bf16 autocast" in record["loop"]
        said = (record["rank"], record["batch"], record["seq_len"], record["dropout"])
        assert said == (16, 1, 512, 0.05)
        padded = record["settings"]["pad_to_multiple_of"]
        return f"one at a time, padded to multiples of {padded}, bf16 autocast."

    return one({of(record) for record in records_of(REAL_LOOP).values()})


def graphs_sentence() -> str:
    """Say what graphs take."""
    return (
        f"about {_COUNTED_BYTES / 1e6:.0f} MB each: two for each layer and length of batch, for up "
        f"to {NUMBERS[SIGNATURES]} lengths, or for up to {NUMBERS[_SIGNATURES[0]]} under a "
        "`vram_budget`"
    )


def python_sentence() -> str:
    """Name the oldest Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"with Python {project['requires-python'].removeprefix('>=')} or newer"


SENTENCES = {
    "stack": stack_sentence,
    "resident": resident_sentence,
    "rolled": rolled_sentence,
    "loop": loop_sentence,
    "cards": cards_sentence,
    "script": script_sentence,
    "padding": padding_sentence,
    "graphs": graphs_sentence,
    "python": python_sentence,
}


def gate_block() -> str:
    """Return what ``poros gate`` prints of the record that README shows."""
    record = read(ROOT / "docs" / "validation" / "qwen2-7b.json")
    result = GateResult(
        verdict=record["verdict"], divergence=None, void_reasons=[], fault=None, record=record
    )
    out = Console(width=100, no_color=True, force_terminal=False)
    with out.capture() as captured:
        print_result(out, result)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert lines.pop() == record["proof"]
    return "\n".join(lines)


def problems(text: str) -> list[str]:
    """Return what in a README does not come from a record."""
    sentences = [sentence() for sentence in SENTENCES.values()]
    found = [*wrong_rows(PAGE, text, KINDS), *absent(text, sentences)]
    found += unheld(text, sentences)
    block = re.search(r"```text\n\$ (poros gate .*)\n((?:.*\n)*?)```", text)
    assert block is not None
    record = read(ROOT / "docs" / "validation" / "qwen2-7b.json")
    if not same_settings(command_settings(block[1]), record["asked"]):
        found.append(block[1])
    if block[2].strip() != gate_block():
        found.append(block[2])
    return found


def test_there_are_rows() -> None:
    for headings, least in ((PARITY, 5), (COST, 3), (REAL_LOOP, 2), (SCRIPT, 2)):
        assert len(records_of(headings)) >= least
    assert all(record["verdict"] == "exact" for record in records_of(PARITY).values())
    assert all(record["outcome"] == "trained" for record in records_of(COST).values())


def test_every_figure_is_a_records() -> None:
    assert problems(README) == []


FIRST_COST = next(line for line in README.splitlines() if f"]({RECORDS}/training-cost-7b" in line)
EDITS = [
    ("takes 0.141 s", "takes 0.041 s"),
    ("it reached 4.74 GB", "it reached 1.74 GB"),
    ("and 6.41 GB", "and 2.41 GB"),
    ("on a card of 6 GB", "on a card of 3 GB"),
    ("some 55 GB/s", "some 5 GB/s"),
    ("| Qwen3 32B | 41.69", "| Qwen3 235B | 41.69"),
    ("| Qwen2.5 72B | 6.82", "| Qwen2.5 405B | 6.82"),
    ("| HF `Trainer` | 11.48", "| DeepSpeed ZeRO-3 | 11.48"),
    ("exact: 50 steps", "exact: 5000 steps"),
    ("--steps 50 --seq-len 512 --dropout 0.1", "--steps 50 --seq-len 512 --dropout 0.5"),
    (f"loss{' ' * 34}0.00e+00", f"loss{' ' * 34}1.00e-09"),
    ("0.203 s             8.17 GB", "0.203 s             4.17 GB"),
    ("about 1 MB each", "about 9 MB each"),
    ("sixteen lengths", "sixty lengths"),
    ("to four under", "to forty under"),
    ("(CUDA 13.0)", "(CUDA 12.0)"),
    ("bitsandbytes 0.50.2", "bitsandbytes 0.99"),
    ("rank 16 on all linear", "rank 64 on all linear"),
    ("batch 1, 512 tokens", "batch 8, 512 tokens"),
    ("| model | resident peak | streamed peak |", "| model | streamed peak | resident peak |"),
    ("| allocated | reserved | driver |", "| reserved | allocated | driver |"),
    ("dropout 0.1, 20 steps", "dropout 0.1, 2000 steps"),
    ("a plain loop, dropout 0.05", "a plain loop, dropout 0.5"),
    ("padded to multiples of 64", "padded to multiples of 512"),
    ("From 27B on", "From 7B on"),
    ("## Families", f"It is 3 {TIMES} as fast.\n\n## Families"),
    ("## Families", "It takes 0.3 s.\n\n## Families"),
    ("## Families", f"See [this]({PEFT_7B}).\n\n## Families"),
    (FIRST_COST, FIRST_COST.replace("2.80 GB", "1.80 GB")),
    (FIRST_COST, f"{FIRST_COST}\n{FIRST_COST.replace('[record]', '[a record]')}"),
    (FIRST_COST, f"{FIRST_COST}\n| Qwen2.5 405B | 1.00 GB | 1.00 GB | 1.00 GB | 1 s | 1 s | |"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "edited"), EDITS, ids=[edited[:60] for _, edited in EDITS])
def test_an_edit_is_found(said: str, edited: str) -> None:
    assert README.count(said) >= 1
    assert problems(README.replace(said, edited, 1)) != []
