"""``poros gate``."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from poros.cli.output import console
from poros_core.errors import GateError
from poros_core.gate import GateOptions
from poros_core.gate.options import Subject, subject_of
from poros_core.settings import Graphs, Settings

if TYPE_CHECKING:
    from poros_core.gate.arms import Arm
    from poros_core.gate.record import GateResult

__all__ = [
    "SURFACE_TITLES",
    "GateDisplay",
    "print_result",
    "quiet_libraries",
    "register",
    "size_text",
]

SURFACE_TITLES = {
    "loss": "loss",
    "adapter_weights": "adapter weights",
    "grad_norms": "gradient norms",
    "optimizer_state": "optimizer state",
}


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
        int | None,
        typer.Option(help="Device memory in bytes.", show_default="everything streams"),
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
) -> None:
    """Train resident and streamed side by side, and compare them bit for bit at every step.

    Exit status: 0 exact; 1 diverged; 2 bad input, or void: the run does not prove that anything
    streamed or trained; 3 not deterministic: two resident runs differ already.
    """
    options = GateOptions(
        family=family,
        shape=shape,
        model=model,
        steps=steps,
        seq_len=seq_len,
        batch=batch,
        accumulate=accumulate,
        rank=rank,
        dropout=dropout,
        precision=precision,
        load_strategy=load_strategy,
        optimizer_state=cast(Literal["device", "host"], optimizer_state),
        data=data,
        seed=seed,
        plant_fault=plant_fault,
        settings=Settings(
            block_size=_layers(block_size), vram_budget=vram_budget, graphs=cast(Graphs, graphs)
        ),
    )
    _check_target(json_file)
    subject = subject_of(options)
    out = console()
    with quiet_libraries():
        from poros_core.gate.run import run_gate

        with GateDisplay(out, options, subject=subject) as display:
            command = shlex.join(["poros", *sys.argv[1:]])
            result = run_gate(options, command=command, observer=display)
    if json_file is not None:
        json_file.write_text(json.dumps(result.record, indent=2) + "\n", encoding="utf-8")
    print_result(out, result)
    if json_file is not None:
        out.print(f"[dim]record: {json_file}[/dim]", soft_wrap=True)
    raise typer.Exit(result.exit_status)


def _layers(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    # what is no number goes on as it is: Settings says what is allowed
    return int(text) if text.isdecimal() else cast(int, text)


def _check_target(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise GateError(
            f"The record cannot be written to '{path}': name a file in a folder that exists."
        )


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep other libraries' progress bars and warnings off the screen of a command.

    Errors stay. What is found is put back.
    """
    from transformers.utils import logging as library

    bar, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.set_verbosity(level)
        if bar:
            library.enable_progress_bar()


class GateDisplay:
    """Shows how far a gate is. Implements ``poros_core.gate.run.Observer``."""

    def __init__(self, out: Console, options: GateOptions, *, subject: Subject) -> None:
        self._out = out
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
            console=out,
            transient=True,
            disable=not out.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=options.steps, loss="")
        self._every = max(1, options.steps // 10)
        out.print(
            f"[bold]Poros gate[/bold]  {subject.family.title}, {subject.shape}, "
            f"{options.precision.upper()}: {options.steps} steps of {options.accumulate} x "
            f"{subject.batch} sequences up to {subject.seq_len} tokens, LoRA rank {subject.rank}, "
            f"dropout {options.dropout}, block size {options.settings.block_size}",
            soft_wrap=not self._out.is_terminal,
        )

    def __enter__(self) -> GateDisplay:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=text)
        if not self._out.is_terminal:
            self._out.print(text, soft_wrap=True)

    def arms_ready(self, arms: Mapping[str, Arm]) -> None:
        """Say what is compared."""
        arm = arms["streamed"]
        self._progress.update(self._task, description="comparing")
        self._out.print(
            f"comparing {len(arm.params)} adapter tensors on {arm.device} at every step",
            soft_wrap=not self._out.is_terminal,
        )

    def step(self, done: int, total: int, loss: float) -> None:
        """Move the bar; off a terminal, print every tenth part."""
        self._progress.update(self._task, completed=done, loss=f"loss {loss:.4f}")
        if not self._out.is_terminal and (done % self._every == 0 or done == total):
            self._out.print(f"step {done}/{total}  loss {loss:.4f}  equal so far")


def print_result(out: Console, result: GateResult) -> None:
    """Print a gate's tables and its verdict."""
    record = result.record
    out.print(_surfaces(record))
    out.print(_arms(record))
    out.print(_verdict(result), soft_wrap=not out.is_terminal)


def _surfaces(record: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("streamed against resident")
    table.add_column("largest difference", justify="right")
    table.add_column("exact")
    for name, title in SURFACE_TITLES.items():
        surface = record["surfaces"][name]
        compared = record["steps_compared"] > 0 or surface["first_divergence"] is not None
        exact = surface["exact"]
        table.add_row(
            title,
            f"{surface['max_abs_difference']:.2e}" if compared else "not compared",
            Text("yes" if exact else "no", style="green" if exact else "red"),
        )
    return table


def _arms(record: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for heading in ("arm", "peak memory", "reserved", "step", "streamed per step"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for name, arm in record["arms"].items():
        streamed = arm.get("bytes_streamed_per_step")
        table.add_row(
            name,
            size_text(arm["peak_allocated_bytes"]),
            size_text(arm["peak_reserved_bytes"]),
            "-" if arm["step_seconds"] is None else f"{arm['step_seconds']:.3f} s",
            "nothing" if streamed is None else size_text(streamed),
        )
    return table


def size_text(nbytes: int | None) -> str:
    """Return a size as people read it, or a dash for None."""
    if nbytes is None:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"


def _verdict(result: GateResult) -> Text:
    record = result.record
    steps = record["steps"]
    text = Text()
    if result.fault is not None:
        fault = result.fault
        text.append(
            f"planted fault: bit {fault.bit} of byte {fault.byte} of {fault.tensor} "
            f"({fault.unit})\n"
        )
    if result.verdict == "exact":
        text.append(f"exact: {steps} steps, streamed equals resident bit for bit", style="green")
    elif result.verdict == "diverged":
        text.append(f"diverged: {result.divergence}", style="red")
    elif result.verdict == "not-deterministic":
        text.append(
            "not deterministic: two resident runs that Poros never touched differ "
            f"({result.divergence}), so this environment can show nothing about streaming",
            style="red",
        )
    else:
        text.append(f"void: {'; '.join(result.void_reasons)}", style="red")
    return text
