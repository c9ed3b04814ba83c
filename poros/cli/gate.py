"""``poros gate``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poros.cli.gate_display import (
    SURFACE_TITLES,
    GateDisplay,
    print_result,
    quiet_libraries,
    size_text,
)
from poros.cli.gate_matrix import gate_matrix
from poros.cli.output import console
from poros_core.errors import GateError
from poros_core.gate.card import check_card, write_card
from poros_core.gate.flags import options_of
from poros_core.gate.html_report import html_report
from poros_core.gate.options import FIT, GateOptions, subject_of

if TYPE_CHECKING:
    from poros_core.gate.record import GateResult

__all__ = [
    "SURFACE_TITLES",
    "GateDisplay",
    "gate",
    "print_result",
    "quiet_libraries",
    "register",
    "size_text",
]

_MODES = "How every arm computes"
_FILES = "Reports, and machines on which the resident arm does not fit"
_MATRIX = "Many gates"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("gate")(gate)


def gate(
    family: Annotated[str | None, typer.Option(help="Family whose shape is used.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="A shape of the family, with seeded random weights.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint folder or Hub id, instead of a shape.")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Random weights: every layer 'drawn', or most a 'rolled' copy, quantised on disk."
        ),
    ] = "drawn",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence.", show_default="32 for a tiny shape, else 512"),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences per micro-batch; more than one are of different lengths, padded.",
            show_default="2 for a tiny shape, else 1",
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    rank: Annotated[
        int | None,
        typer.Option(help="LoRA rank.", show_default="4 for a tiny shape, else 16"),
    ] = None,
    dropout: Annotated[
        float, typer.Option(help="Of LoRA, and of the attention where there is any.")
    ] = 0.0,
    precision: Annotated[str, typer.Option(help="Of the base: nf4, bf16.")] = "nf4",
    load_strategy: Annotated[
        str, typer.Option(help="How the streamed arm is loaded: auto, streamed, standard.")
    ] = "auto",
    block_size: Annotated[
        str, typer.Option(help="Layers that share one recompute boundary, or 'all'.")
    ] = "1",
    vram_budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory for the streamed arm: 16GB, bytes, or auto.",
            show_default="everything streams",
        ),
    ] = None,
    graphs: Annotated[str, typer.Option(help="CUDA graphs: auto, on, off.")] = "auto",
    optimizer_state: Annotated[
        str,
        typer.Option(
            help="Where the streamed arm's optimizer state is between steps: device, host."
        ),
    ] = "device",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Tokenised records in a safetensors file (ids, offsets, prompt_len).",
            show_default="seeded random tokens",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, adapters, data and dropout.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record there.")
    ] = None,
    plant_fault: Annotated[
        bool,
        typer.Option("--plant-fault", metavar="", help="Flip one bit of a streamed weight first."),
    ] = False,
    plant: Annotated[
        str | None,
        typer.Option(
            help="Plant a fault: flipped-bit, rng-not-restored, no-grad-forward, early-read, "
            "late-arguments, autocast-not-restored."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Train only so many leading layers; 'fit' takes as many as the device holds "
            "resident.",
            show_default="all",
        ),
    ] = None,
    padding: Annotated[
        str, typer.Option(help="Where rows are padded: right, left.", rich_help_panel=_MODES)
    ] = "right",
    backward: Annotated[
        str,
        typer.Option(
            help="One backward for 'each' micro-batch, or a 'joint' one for all of a step.",
            rich_help_panel=_MODES,
        ),
    ] = "each",
    checkpointing: Annotated[
        bool,
        typer.Option(
            "--checkpointing",
            metavar="",
            help="Train the resident arms with gradient checkpointing, which takes less memory.",
            rich_help_panel=_MODES,
        ),
    ] = False,
    resume_at: Annotated[
        int | None,
        typer.Option(
            help="After this step, save the streamed arm, build it anew and go on; the resident "
            "arms are not interrupted.",
            show_default="never",
            rich_help_panel=_MODES,
        ),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option(help="Run deterministic kernels only.", rich_help_panel=_MODES)
    ] = True,
    attention: Annotated[
        str,
        typer.Option(
            help="The only attention kernel: auto, math, flash, efficient, cudnn.",
            rich_help_panel=_MODES,
        ),
    ] = "auto",
    tf32: Annotated[
        bool,
        typer.Option(
            "--tf32", metavar="", help="Float32 products in TF32.", rich_help_panel=_MODES
        ),
    ] = False,
    autocast: Annotated[
        str, typer.Option(help="Around each forward: off, bf16.", rich_help_panel=_MODES)
    ] = "off",
    compile_layers: Annotated[
        bool,
        typer.Option(
            "--compile",
            metavar="",
            help="Compile every decoder layer, in each arm.",
            rich_help_panel=_MODES,
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a report there.", rich_help_panel=_FILES),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Put the verdict into this model card, in a section of its own.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    write_fingerprints: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write hashes and values of the resident arm there, for --against.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with these fingerprints; no resident arm is built.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the run there while it lasts, and go on from there.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop after so many; with --state, or with --matrix.",
            show_default="no limit",
            rich_help_panel=_FILES,
        ),
    ] = None,
    matrix: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|GROUP",
            help="Run the rows of a matrix file, or of a group of the one that comes along: ci, "
            "first, second, controls, all.",
            rich_help_panel=_MATRIX,
        ),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run this row only.", rich_help_panel=_MATRIX),
    ] = None,
    json_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where rows leave their records; a row whose record is there is done.",
            rich_help_panel=_MATRIX,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where rows find their data files.", rich_help_panel=_MATRIX
        ),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls",
            metavar="",
            help="Run the negative controls: each fault must be found, and gone once removed.",
            rich_help_panel=_MATRIX,
        ),
    ] = False,
) -> None:
    """Train resident and streamed side by side, and compare them bit for bit at every step.

    Exit status: 0 exact; 1 diverged; 2 bad input, or void: the run does not prove that anything
    streamed or trained; 3 nothing can be said of bits: two resident runs differ already, or
    fingerprints come from another stack; 4 the time was up.
    """
    if matrix is not None or controls:
        asked = matrix or "controls"
        status = gate_matrix(
            asked, rows=row, folder=json_dir, data=data_dir, minutes=minutes, json_file=json_file
        )
        raise typer.Exit(status)
    options = options_of(
        {
            "family": family,
            "shape": shape,
            "model": model,
            "weights": weights,
            "steps": steps,
            "seq_len": seq_len,
            "batch": batch,
            "accumulate": accumulate,
            "rank": rank,
            "dropout": dropout,
            "precision": precision,
            "load_strategy": load_strategy,
            "optimizer_state": optimizer_state,
            "data": data,
            "padding": padding,
            "backward": backward,
            "checkpointing": checkpointing,
            "resume_at": resume_at,
            "layers": _layers(layers),
            "seed": seed,
            "plant_fault": plant_fault,
            "plant": plant,
            "deterministic": deterministic,
            "attention": attention,
            "tf32": tf32,
            "autocast": autocast,
            "compile": compile_layers,
            "block_size": _block_size(block_size),
            "vram_budget": vram_budget,
            "graphs": graphs,
        }
    )
    for path, what in _targets(json_file, html, card, write_fingerprints, state):
        _check_target(path, what)
    if card is not None:
        check_card(card)
    result = _run(
        options,
        state=state,
        minutes=minutes,
        write_fingerprints=write_fingerprints,
        against=against,
    )
    _report(result, json_file=json_file, html=html, card=card)
    raise typer.Exit(result.exit_status)


def _run(
    options: GateOptions,
    *,
    state: Path | None,
    minutes: float | None,
    write_fingerprints: Path | None,
    against: Path | None,
) -> GateResult:
    subject = subject_of(options)
    out = console()
    with quiet_libraries():
        from poros_core.gate.run import GateFiles, run_gate

        files = GateFiles(
            state=state, minutes=minutes, write_fingerprints=write_fingerprints, against=against
        )
        with GateDisplay(out, options, subject=subject) as display:
            command = shlex.join(["poros", *sys.argv[1:]])
            return run_gate(options, command=command, observer=display, files=files)


def _report(
    result: GateResult, *, json_file: Path | None, html: Path | None, card: Path | None
) -> None:
    """Write what was asked for, and print the tables."""
    out = console()
    if json_file is not None:
        json_file.write_text(json.dumps(result.record, indent=2) + "\n", encoding="utf-8")
    if html is not None:
        html.write_text(html_report(result.record), encoding="utf-8")
    if card is not None:
        write_card(card, result.record)
    print_result(out, result)
    for path, what in _targets(json_file, html, card):
        out.print(f"[dim]{what}: {path}[/dim]", soft_wrap=True)


def _targets(*paths: Path | None) -> list[tuple[Path, str]]:
    names = ("record", "report", "model card", "fingerprints", "state")
    return [(path, name) for path, name in zip(paths, names, strict=False) if path is not None]


def _block_size(text: str) -> Any:
    # what is no number goes on as it is: Settings says what is allowed
    return int(text) if text.isdecimal() else text


def _layers(text: str | None) -> Any:
    return text if text is None or text == FIT or not text.isdecimal() else int(text)


def _check_target(path: Path, what: str) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise GateError(
            f"The {what} cannot be written to '{path}': name a file in a folder that exists."
        )
