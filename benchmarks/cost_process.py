"""The processes that measure.

[Note: Started ahead]
What a process imports takes seconds. So the processes of a run start together and import while the
first one builds its model, not while anything is timed; then each waits for its job. Until then it
does not touch the GPU, so it does not import bitsandbytes, which asks CUDA about the device.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from cost_work import Work, as_plain

_SCRIPT = Path(__file__).with_name("training_cost.py")
_POLL_SECONDS = 0.05
_SHOWN_LINES = 15
_MOST_READY = 8
_IMPORTED_AHEAD = ("transformers.modeling_utils", "torch._inductor.compile_fx", "accelerate")


class Worker:
    """A process that waits for its job."""

    def __init__(self, folder: Path) -> None:
        environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ}
        self._errors: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._out = Path(tempfile.mkdtemp(dir=folder)) / "outcomes"
        self._out.touch()
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), "--worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def give(self, works: Sequence[Work], path: Path | None, *, checkpoint: bool = False) -> None:
        """Let it measure, or write the checkpoint of the first work."""
        job = {
            "works": [as_plain(work) for work in works],
            "path": None if path is None else str(path),
            "out": str(self._out),
            "checkpoint": checkpoint,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which ``outcomes`` says

    def outcomes(self, *, timeout: float | None) -> Iterator[dict[str, Any]]:
        """Yield what it says of each work, as it says so, until it ends; if it ends badly, that.

        Args:
            timeout: seconds that it may take for each.
        """
        start = time.monotonic()
        with self._out.open(encoding="utf-8") as lines:
            line = ""
            while True:
                ended = self._process.poll() is not None
                while part := lines.readline():
                    line += part
                    if line.endswith("\n"):
                        yield json.loads(line)
                        line, start = "", time.monotonic()
                if ended:
                    break
                if timeout is not None and time.monotonic() - start > timeout:
                    self.stop()
                    yield {"outcome": "too slow", "error": f"stopped after {timeout:.0f} s"}
                    return
                time.sleep(_POLL_SECONDS)
        if self._process.returncode < 0:
            yield {"outcome": "killed", "error": f"by signal {-self._process.returncode}"}
        elif self._process.returncode:
            yield {"outcome": "failed", "error": self._last_words()}

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._errors.close()

    def said(self) -> str:
        """Return what it said on standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def _last_words(self) -> str:
        lines = self.said().splitlines()
        print("\n".join(lines[-_SHOWN_LINES:]), file=sys.stderr)
        return lines[-1] if lines else f"exit status {self._process.returncode}"


class Workers:
    """Gives every job a process of its own."""

    def __init__(
        self, jobs: int = 1, *, timeout: float | None = None, talkative: bool = False
    ) -> None:
        """Start them; see [Note: Started ahead].

        Args:
            jobs: how many jobs there will be.
            timeout: seconds that a method may take.
            talkative: whether to show all that they say on standard error.
        """
        self._timeout = timeout
        self._talkative = talkative
        self._folder = tempfile.TemporaryDirectory(prefix="poros-cost-")
        self._ready = [Worker(Path(self._folder.name)) for _ in range(min(jobs, _MOST_READY))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        for worker in self._ready:
            worker.stop()
        self._folder.cleanup()

    def measure(self, works: Sequence[Work], path: Path | None) -> Iterator[dict[str, Any]]:
        """Yield what is found for each work, in order. Where a process ends before it has measured
        all that it was given, the next one measures the rest."""
        left = list(works)
        while left:
            worker = self._take()
            try:
                worker.give(left, path)
                before = len(left)
                for found in worker.outcomes(timeout=self._timeout):
                    if not left:
                        break  # it ended badly once all was measured
                    left.pop(0)
                    yield found
                assert len(left) < before, "a process ended without a word"
                if self._talkative:
                    print(worker.said(), file=sys.stderr)
            finally:
                worker.stop()

    def write_checkpoint(self, work: Work, path: Path) -> None:
        """Write the checkpoint that ``work`` loads.

        Raises:
            RuntimeError: it could not be written.
        """
        worker = self._take()
        try:
            worker.give([work], path, checkpoint=True)
            for bad in worker.outcomes(timeout=self._timeout):
                raise RuntimeError(f"the random checkpoint could not be written: {bad['error']}")
        finally:
            worker.stop()

    def _take(self) -> Worker:
        return self._ready.pop(0) if self._ready else Worker(Path(self._folder.name))


def be_a_worker() -> None:
    """Import, wait for a job, do it."""
    for name in _IMPORTED_AHEAD:
        importlib.import_module(name)
    text = sys.stdin.read()
    if not text:
        return
    from cost_measure import outcomes
    from cost_models import write_checkpoint

    job: Mapping[str, Any] = json.loads(text)
    works = [Work(**each) for each in job["works"]]
    path = None if job["path"] is None else Path(job["path"])
    if job["checkpoint"]:
        assert path is not None
        write_checkpoint(works[0], path)
        return
    with Path(job["out"]).open("a", encoding="utf-8") as out:
        for found in outcomes(works, path):
            out.write(json.dumps(found) + "\n")
            out.flush()
