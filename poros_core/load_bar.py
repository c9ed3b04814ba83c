"""The progress bar of a load, and what is printed when it is done."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from poros_core.load_progress import LoadReport

__all__ = ["LoadBar", "report_lines"]


class LoadBar:
    """Shows a load on a terminal, and only its end elsewhere. Implements ``LoadObserver``."""

    def __init__(self, console: Console | None = None) -> None:
        """Make a bar that is shown while it is entered.

        Args:
            console: where to; None means standard error.
        """
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._others = False

    def __enter__(self) -> LoadBar:
        from transformers.utils import logging as library

        self._others = library.is_progress_bar_enabled()
        library.disable_progress_bar()  # Transformers has a bar of its own, of weights
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from transformers.utils import logging as library

        self._progress.stop()
        if self._others:
            library.enable_progress_bar()

    def stage(self, title: str, total: int) -> None:
        """Begin a new bar; see ``LoadObserver``."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(title, total=total)

    def advance(self, nbytes: int) -> None:
        """Move the bar; see ``LoadObserver``."""
        if self._task is not None:
            self._progress.advance(self._task, nbytes)

    def done(self, report: LoadReport) -> None:
        """Print what the load took; see ``LoadObserver``."""
        self._progress.stop()
        for line in report_lines(report):
            self._console.print(line, highlight=False, soft_wrap=True)


def report_lines(report: LoadReport) -> list[str]:
    """Return what a load took, in words."""
    where = {
        "pinned": "host memory",
        "pageable": "host memory, layers pageable",
        "mmap": "files of the cache, head and embeddings in host memory",
    }[report.host]
    lines = [
        f"read {_size(report.read_bytes)} from the {report.source} in {report.seconds:.1f} s "
        f"({_size(report.read_bytes / max(report.seconds, 1e-9))}/s)",
        f"base: {_size(report.host_bytes)} in {where}; {_size(report.device_bytes)} on the device",
    ]
    if report.host_peak_bytes is not None and report.host_steady_bytes is not None:
        lines.append(
            f"host memory: {_size(report.host_peak_bytes)} at the peak, "
            f"{_size(report.host_steady_bytes)} now"
        )
    if report.device_peak_bytes is not None:
        lines.append(f"device memory: {_size(report.device_peak_bytes)} at the peak")
    return lines


def _size(nbytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
