"""How ``poros gate`` shows itself: progress, tables and verdicts."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from poros_core.gate import GateOptions
from poros_core.gate.options import Subject

if TYPE_CHECKING:
    from poros_core.gate.arms import Arm
    from poros_core.gate.record import GateResult

__all__ = ["SURFACE_TITLES", "GateDisplay", "print_result", "quiet_libraries", "size_text"]

SURFACE_TITLES = {
    "loss": "loss",
    "adapter_weights": "adapter weights",
    "grad_norms": "gradient norms",
    "optimizer_state": "optimizer state",
}


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
        self._began = time.monotonic()
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
            f"dropout {options.dropout}, block size {options.settings.block_size}"
            f"{_layers_text(subject)}",
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
            self._out.print(f"{text} (at {time.monotonic() - self._began:.0f} s)", soft_wrap=True)

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
            seconds = time.monotonic() - self._began
            self._out.print(
                f"step {done}/{total}  loss {loss:.4f}  equal so far (at {seconds:.0f} s)"
            )


def _layers_text(subject: Subject) -> str:
    if subject.depth == subject.whole:
        return ""
    return f", the first {subject.depth} of {subject.whole} layers"


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
            difference_text(surface["max_abs_difference"]) if compared else "not compared",
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


def difference_text(value: float | None) -> str:
    """Return a difference; None is one that is no number, or without bound."""
    return "not a number" if value is None else f"{value:.2e}"


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
        text.append(f"planted fault: {result.fault}\n")
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
    elif result.verdict == "void":
        text.append(f"void: {'; '.join(result.void_reasons)}", style="red")
    else:
        text.append(f"{result.verdict.replace('-', ' ')}", style="yellow")
    text.append(f"\n{record['proof']}", style="dim")
    return text
