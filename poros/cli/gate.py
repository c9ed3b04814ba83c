"""``poros gate``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from poros.cli import gate_flags as flags
from poros.cli.gate_display import (
    SURFACE_TITLES,
    GateDisplay,
    print_result,
    quiet_libraries,
    size_text,
)
from poros.cli.gate_load import gate_load, training_flags
from poros.cli.gate_matrix import gate_matrix
from poros.cli.output import console
from poros_core.errors import GateError
from poros_core.gate.card import check_card, write_card
from poros_core.gate.files import json_text, write_whole
from poros_core.gate.flags import flags_of, options_of
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


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("gate")(gate)


def gate(
    family: flags.Family = None,
    shape: flags.Shape = None,
    model: flags.Model = None,
    weights: flags.Weights = "drawn",
    steps: flags.Steps = 20,
    seq_len: flags.SeqLen = None,
    batch: flags.Batch = None,
    accumulate: flags.Accumulate = 1,
    rank: flags.Rank = None,
    dropout: flags.Dropout = 0.0,
    precision: flags.Precision = "nf4",
    load_strategy: flags.LoadStrategy = "auto",
    host: flags.Host = "auto",
    block_size: flags.BlockSize = "1",
    vram_budget: flags.VramBudget = None,
    graphs: flags.Graphs = "auto",
    offload_activations: flags.OffloadActivations = False,
    copy_ahead: flags.CopyAhead = False,
    optimizer_state: flags.OptimizerState = "device",
    data: flags.Data = None,
    seed: flags.Seed = 0,
    json_file: flags.JsonFile = None,
    plant_fault: flags.PlantFault = False,
    plant: flags.Plant = None,
    layers: flags.Layers = None,
    padding: flags.Padding = "right",
    backward: flags.Backward = "each",
    checkpointing: flags.Checkpointing = False,
    control: flags.Control = True,
    resume_at: flags.ResumeAt = None,
    deterministic: flags.Deterministic = True,
    attention: flags.Attention = "auto",
    tf32: flags.Tf32 = False,
    autocast: flags.Autocast = "off",
    compile_layers: flags.CompileLayers = False,
    html: flags.Html = None,
    card: flags.Card = None,
    write_fingerprints: flags.WriteFingerprints = None,
    against: flags.Against = None,
    state: flags.State = None,
    minutes: flags.Minutes = None,
    matrix: flags.MatrixName = None,
    row: flags.Row = None,
    json_dir: flags.JsonDir = None,
    data_dir: flags.DataDir = None,
    jobs: flags.Jobs = 1,
    controls: flags.Controls = False,
    load: flags.Load = False,
    pieces: flags.Pieces = 1,
) -> None:
    """Train resident and streamed side by side, and compare them bit for bit at every step.

    Exit status: 0 exact; 1 diverged; 2 bad input, or void: the run does not prove that anything
    streamed or trained; 3 nothing can be said of bits: two resident runs differ already, or
    fingerprints come from another stack; 4 the time was up, or no row of a matrix could run to its
    end. Rows that are left are no failure otherwise.
    """
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
            "host": host,
            "optimizer_state": optimizer_state,
            "data": data,
            "padding": padding,
            "backward": backward,
            "checkpointing": checkpointing,
            "control": control,
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
            "offload_activations": offload_activations,
            "copy_ahead": copy_ahead,
        }
    )
    files = {
        "--state": state,
        "--write-fingerprints": write_fingerprints,
        "--against": against,
        "--html": html,
        "--card": card,
    }
    for_rows = {
        "--row": row,
        "--json-dir": json_dir,
        "--data-dir": data_dir,
        "--jobs": jobs != 1,
    }
    _check_targets({"--json": json_file, **{name: files[name] for name in _WRITTEN}}, against)
    if json_dir is not None and json_dir.exists() and not json_dir.is_dir():
        raise GateError(f"--json-dir '{json_dir}' is a file. Name a folder.")
    if matrix is not None or controls:
        _refuse("--matrix and --controls run rows, which have their own settings", files, options)
        asked = matrix or "controls"
        status = gate_matrix(
            asked,
            rows=row,
            folder=json_dir,
            data=data_dir,
            minutes=minutes,
            json_file=json_file,
            jobs=jobs,
        )
        raise typer.Exit(status)
    _refuse("a single gate has no rows; name a --matrix", for_rows)
    if load:
        _refuse("--load trains nothing", {**files, **dict.fromkeys(training_flags(options), True)})
        raise typer.Exit(gate_load(options, pieces=pieces, json_file=json_file))
    _refuse("only --load deals layers out", {"--pieces": pieces != 1})
    if card is not None:
        check_card(card)
    result = _run(
        options,
        state=state,
        minutes=minutes,
        write_fingerprints=write_fingerprints,
        against=against,
    )
    _report(result, json_file=json_file, html=html, card=card, state=state)
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
        from poros_core.gate.data import read_records
        from poros_core.gate.run import GateFiles, run_gate

        if options.data is not None:
            read_records(options.data, subject)  # nothing is built for records that do not fit
        files = GateFiles(
            state=state, minutes=minutes, write_fingerprints=write_fingerprints, against=against
        )
        with GateDisplay(out, options, subject=subject) as display:
            command = shlex.join(["poros", *sys.argv[1:]])
            return run_gate(options, command=command, observer=display, files=files)


def _report(
    result: GateResult,
    *,
    json_file: Path | None,
    html: Path | None,
    card: Path | None,
    state: Path | None,
) -> None:
    """Print the tables, and write what was asked for: a verdict that took hours is on the terminal
    if nothing can be written. A gate that was cut short has no report; the saved state of one that
    was not goes last."""
    out = console()
    print_result(out, result)
    written = {"record": json_file, "report": html, "model card": card}
    if result.verdict == "unfinished":
        written |= {"report": None, "model card": None}
    if json_file is not None:
        write_whole(json_file, json_text(result.record))
    if written["report"] is not None:
        write_whole(written["report"], html_report(result.record))
    if written["model card"] is not None:
        write_card(written["model card"], result.record)
    if state is not None and result.verdict != "unfinished":
        state.unlink(missing_ok=True)
    for what, path in written.items():
        if path is not None:
            out.print(Text(f"{what}: {path}", style="dim"), soft_wrap=True)


def _refuse(why: str, files: Mapping[str, object], options: GateOptions | None = None) -> None:
    """Refuse flags that would have no effect.

    Raises:
        GateError: one of them is given.
    """
    given = [] if options is None else flags_of(options)
    given += [flag for flag, value in files.items() if value]
    if given:
        raise GateError(f"{given[0]} has no effect here: {why}. Leave it out.")


def _block_size(text: str) -> Any:
    # what is no number goes on as it is: Settings says what is allowed
    return int(text) if text.isdecimal() else text


def _layers(text: str | None) -> Any:
    return text if text is None or text == FIT or not text.isdecimal() else int(text)


_WRITTEN = ("--write-fingerprints", "--state", "--html", "--card")


def _check_targets(targets: Mapping[str, Path | None], against: Path | None) -> None:
    """Check where things are to be written, before a gate runs for them.

    Raises:
        GateError: a folder is not there, or one file is named twice.
    """
    seen: dict[Path, str] = {} if against is None else {against.resolve(): "--against"}
    for flag, path in targets.items():
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise GateError(
                f"Nothing can be written to '{path}': name a file in a folder that exists."
            )
        other = seen.setdefault(path.resolve(), flag)
        if other != flag and not path.is_char_device():
            raise GateError(f"{other} and {flag} name the same file, '{path}'. Name two.")
