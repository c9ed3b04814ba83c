"""``poros demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from poros.cli.gate import SURFACE_TITLES, GateDisplay, quiet_libraries, size_text
from poros.cli.output import console
from poros_core.gate import GateOptions
from poros_core.gate.options import subject_of

if TYPE_CHECKING:
    from poros_core.demo import DemoResult, TrainingStep

__all__ = ["register"]

DEFAULT_OUTPUT = Path("poros-demo-adapter")
_FAILED = 1


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo")(demo)


def demo(
    output: Annotated[
        Path, typer.Option(help="Folder for the adapter; made if it is not there.")
    ] = DEFAULT_OUTPUT,
) -> None:
    """Train a small adapter with a streamed base, and check that nothing differs. No download.

    Exit status: 0 all went as it should; 1 something did not, and the table says what.
    """
    out = console()
    start = time.perf_counter()
    with quiet_libraries():
        from poros_core.demo import run_demo

        with _Display(out) as display:
            result = run_demo(output, observer=display)
    out.print()
    out.print(_table(result))
    out.print(_ending(result, seconds=time.perf_counter() - start), soft_wrap=not out.is_terminal)
    raise typer.Exit(0 if result.succeeded else _FAILED)


class _Display:
    """Shows how far the demo is. Implements ``poros_core.demo.DemoObserver``."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._number = 0
        self._progress: Progress | None = None
        self._gate: GateDisplay | None = None

    def __enter__(self) -> _Display:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def phase(self, text: str) -> None:
        """Print a heading."""
        self._stop()
        self._number += 1
        self._out.print(
            f"\n[bold]{self._number}. {text}[/bold]", soft_wrap=not self._out.is_terminal
        )

    def trained(self, step: TrainingStep) -> None:
        """Move the bar; off a terminal, print every tenth step."""
        loss = f"loss {step.loss:.3f}"
        speed = f"{step.tokens_per_second:.0f} tokens/s"
        peak = f"peak {size_text(step.peak_bytes)}"
        if not self._out.is_terminal:
            if step.done == 1 or step.done % 10 == 0:
                line = f"step {step.done}/{step.total}  {loss}  {speed}  {peak}"
                self._out.print(line, soft_wrap=True)
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=30),
                *(TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "speed", "peak")),
                console=self._out,
            )
            self._progress.add_task("", total=step.total, loss=loss, speed=speed, peak=peak)
            self._progress.start()
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=step.done, loss=loss, speed=speed, peak=peak)

    def gate(self, options: GateOptions) -> GateDisplay:
        """Return the gate's own display."""
        self._gate = GateDisplay(self._out, options, subject=subject_of(options))
        return self._gate.__enter__()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._gate is not None:
            self._gate.__exit__()
            self._gate = None


def _table(result: DemoResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for heading in ("what was checked", "result", "right"):
        table.add_column(heading, overflow="fold")
    table.add_row(
        f"loss on {result.examples} examples, start -> end",
        f"{result.first_loss:.2f} -> {result.last_loss:.2f}",
        _yes(result.loss_fell),
    )
    table.add_row(
        "adapter read by plain PEFT: logits differ by",
        f"{result.logits_difference:.2e}",
        _yes(result.logits_equal),
    )
    for name, title in SURFACE_TITLES.items():
        surface = result.gate.record["surfaces"][name]
        table.add_row(
            f"gate, streamed - resident: {title}",
            f"{surface['max_abs_difference']:.2e}",
            _yes(surface["exact"]),
        )
    memory = "most GPU memory" if result.on_gpu else "most memory, whole process (no GPU)"
    table.add_row(memory, size_text(result.last.peak_bytes), "")
    table.add_row("training speed", f"{result.last.tokens_per_second:.0f} tokens/s", "")
    return table


def _yes(good: bool) -> Text:
    return Text("yes" if good else "no", style="green" if good else "red")


def _ending(result: DemoResult, *, seconds: float) -> Text:
    text = Text()
    text.append(f"adapter: {result.adapter}   base model: {result.base}\n")
    if result.gate.verdict != "exact":
        text.append(f"The gate's verdict is {result.gate.verdict}.\n", style="red")
    if result.succeeded:
        text.append(
            f"Done in {seconds:.0f} s. Streaming the base changed no bit of the training: 0.00e+00 "
            "is not rounded.",
            style="green",
        )
    else:
        text.append("Something is not as it should be; see the table.", style="red")
    return text
