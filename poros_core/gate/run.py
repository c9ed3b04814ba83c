"""Running a gate: the arms in lockstep, stopped at the first divergence."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen

from poros_core.errors import GateError
from poros_core.gate.arms import Arm, Workshop
from poros_core.gate.content import checkpoint_identity
from poros_core.gate.data import make_batches
from poros_core.gate.fingerprints import Against, FingerprintWriter
from poros_core.gate.flags import settings_of
from poros_core.gate.layers import cut_checkpoint
from poros_core.gate.lockstep import (
    Batch,
    Lockstep,
    Observer,
    evidence_of,
    least_bytes,
    loss_of,
)
from poros_core.gate.modes import applied
from poros_core.gate.options import FIT, GateOptions, Subject, subject_of
from poros_core.gate.packed_checkpoint import write_packed_checkpoint
from poros_core.gate.progress import Progress
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.record import AgainstWhat, GateResult, Run, make_record
from poros_core.gate.stack import stack_of
from poros_core.load import local_folder

__all__ = ["GateFiles", "Observer", "least_bytes", "run_gate"]

_TINY = 256


class _Silent:
    def phase(self, text: str) -> None:
        """Say nothing."""

    def arms_ready(self, arms: Mapping[str, Arm]) -> None:
        """Say nothing."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Say nothing."""


@frozen(kw_only=True)
class GateFiles:
    """What a gate reads and writes besides its checkpoint and data, and how long it may take.

    Attributes:
        state: where a run that is cut short is kept, and from where it goes on.
        minutes: when to stop, from the start of the run; None means never. Needs ``state``.
        write_fingerprints: where fingerprints of the resident arm go.
        against: fingerprints that take the place of the resident arms.
    """

    state: Path | None = None
    minutes: float | None = None
    write_fingerprints: Path | None = None
    against: Path | None = None

    def __attrs_post_init__(self) -> None:
        if self.minutes is not None and (self.state is None or self.minutes <= 0):
            raise GateError(
                "--minutes must be more than 0, and needs --state FILE, where a run that is cut "
                "short is kept."
            )
        if self.against is not None and (self.state or self.write_fingerprints):
            raise GateError(
                "--against goes with neither --state nor --write-fingerprints: it builds no "
                "resident arm."
            )
        if self.write_fingerprints is not None and self.state is not None:
            raise GateError("--write-fingerprints goes without --state: write them in one run.")


def run_gate(
    options: GateOptions,
    *,
    command: str = "",
    observer: Observer | None = None,
    files: GateFiles | None = None,
) -> GateResult:
    """Train a resident and a streamed model in lockstep, and compare them bit for bit.

    A second resident model, built independently, is the control: if it differs from the first, the
    environment is not deterministic and nothing is said of streaming. ``options.control`` can leave
    it out.

    Args:
        options: what to do.
        command: how it was asked for, for the record.
        observer: is told how far it is.
        files: what it reads and writes besides.

    Returns:
        The verdict and the record.

    Raises:
        GateError: the options do not fit the model, or a kernel has no deterministic version.
        StateError: CUDA was used before kernels could be made deterministic.
        CheckpointError: the checkpoint cannot be read.
    """
    watch = observer or _Silent()
    files = files or GateFiles()
    until = None if files.minutes is None else time.monotonic() + 60 * files.minutes
    with applied(options.modes), _named_failures():
        if options.layers != FIT:
            return _Gate(options, files, command=command, watch=watch, until=until).run()
        layers = subject_of(options).depth
        while True:
            try:
                cut = attrs.evolve(options, layers=layers)
                return _Gate(cut, files, command=command, watch=watch, until=until).run()
            except torch.OutOfMemoryError:
                if layers == 1:
                    raise
                layers //= 2
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            watch.phase(f"the device has too little memory: trying the first {layers} layers")


class _Gate:
    """One gate, with the number of layers settled."""

    def __init__(
        self,
        options: GateOptions,
        files: GateFiles,
        *,
        command: str,
        watch: Observer,
        until: float | None,
    ) -> None:
        self.options = options
        self.files = files
        self.command = command
        self.watch = watch
        self.until = until
        self.subject = subject_of(options)
        if files.write_fingerprints is not None and not options.control:
            raise GateError(
                "--write-fingerprints needs the control, which shows that a resident run repeats "
                "itself: leave --no-control out."
            )
        if files.against is not None and options.resume_at is not None:
            raise GateError(
                "--resume-at goes without --against, which follows one streamed arm from the first "
                "step to the last. Leave one of the two out."
            )
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    def run(self) -> GateResult:
        """Build the arms, step them, and judge."""
        with (
            _few_threads(self.subject),
            tempfile.TemporaryDirectory(prefix="poros-gate-") as folder,
        ):
            workshop = Workshop(
                options=self.options, subject=self.subject, path=Path(folder), device=self.device
            )
            path = _checkpoint(workshop, Path(folder), watch=self.watch)
            workshop = attrs.evolve(workshop, path=path)
            batches = make_batches(
                self.subject, data=self.options.data, seed=self.options.seed, device=self.device
            )
            first = next(batches)
            run = self._against if self.files.against is not None else self._lockstep
            return run(workshop, _chained(first, batches))

    def _lockstep(self, workshop: Workshop, batches: Iterator[Batch]) -> GateResult:
        self.watch.phase("loading the resident arm")
        resident = workshop.resident("resident")
        control = None
        if self.options.control:
            self.watch.phase("loading the control")
            control = workshop.resident("control")
        self.watch.phase("loading the streamed arm")
        streamed, fault = workshop.streamed()
        arms = {arm.name: arm for arm in (resident, streamed, control) if arm is not None}
        self.watch.arms_ready(arms)
        del streamed
        stack, asked = stack_of(self.device), settings_of(self.options)
        inputs = None if self.files.state is None else self._inputs(workshop.path)
        progress = Progress(
            path=self.files.state,
            identity={"asked": asked, "stack": stack, "inputs": inputs},
            until=self.until,
        )
        writer = None if self.files.write_fingerprints is None else FingerprintWriter()
        lockstep = Lockstep(
            self.options,
            arms,
            progress=progress,
            rebuild=lambda: workshop.streamed()[0],
            fingerprints=writer,
        )
        lockstep.run(batches, watch=self.watch)
        if writer is not None and self.files.write_fingerprints is not None:
            self._write(writer, lockstep, workshop.path)
        return make_record(
            Run(
                options=self.options,
                subject=self.subject,
                arms=arms,
                control=lockstep.control if self.options.control else None,
                streamed=lockstep.streamed,
                evidence=evidence_of(arms["streamed"], progress.counters, options=self.options),
                fault=fault,
                losses=progress.losses,
                segments=progress.segments,
                finished=lockstep.finished,
                command=self.command,
            )
        )

    def _inputs(self, path: Path) -> dict[str, Any]:
        """Return the identity of what a gate that goes on must find again on this machine."""
        model = self.options.model
        source = path if model is None else local_folder(model)
        # random weights are written anew each time, and have the seed's bits
        return checkpoint_identity(source, data=self.options.data, dated=model is not None)

    def _write(self, writer: FingerprintWriter, lockstep: Lockstep, path: Path) -> None:
        """Write fingerprints of a resident run that another one has repeated."""
        assert self.files.write_fingerprints is not None
        if not lockstep.control.exact or lockstep.control.steps < self.options.steps:
            self.watch.phase("no fingerprints were written: the resident run was not repeated")
            return
        writer.write(
            self.files.write_fingerprints,
            asked=settings_of(self.options),
            checkpoint=checkpoint_identity(path, data=self.options.data),
            stack=stack_of(self.device),
            command=self.command,
        )
        self.watch.phase(f"fingerprints: {self.files.write_fingerprints}")

    def _against(self, workshop: Workshop, batches: Iterator[Batch]) -> GateResult:
        assert self.files.against is not None
        against = Against.read(
            self.files.against,
            asked=settings_of(self.options),
            checkpoint=checkpoint_identity(workshop.path, data=self.options.data),
            stack=stack_of(self.device),
        )
        self.watch.phase("loading the streamed arm")
        arm, fault = workshop.streamed()
        self.watch.arms_ready({"streamed": arm})
        losses, counters = self._follow(arm, against, batches)
        return make_record(
            Run(
                options=self.options,
                subject=self.subject,
                arms={"streamed": arm},
                control=None,
                streamed=against.comparison,
                evidence=evidence_of(arm, counters, options=self.options),
                fault=fault,
                losses={"streamed": losses},
                segments=[],
                against=AgainstWhat(
                    file=against.file,
                    sha256=against.sha256,
                    command=against.content["command"],
                    same_stack=against.same_stack,
                    differing=list(against.differing_stack),
                    stack=against.content["stack"],
                    largest=against.largest,
                ),
                command=self.command,
            )
        )

    def _follow(
        self, arm: Arm, against: Against, batches: Iterator[Batch]
    ) -> tuple[list[float], list[dict[str, int]]]:
        """Step a streamed arm beside fingerprints; return losses and what the counters rose by."""
        losses: list[float] = []
        counters: list[dict[str, int]] = []
        for step in range(1, self.options.steps + 1):
            before = arm.counters()
            view = arm.step(list(islice(batches, self.options.accumulate)))
            after = arm.counters()
            counters.append({name: after[name] - before[name] for name in after})
            losses.append(loss_of(view))
            if not against.compare(view, step=step):
                break
            self.watch.step(step, self.options.steps, losses[-1])
        return losses, counters


def _checkpoint(workshop: Workshop, folder: Path, *, watch: Observer) -> Path:
    """Return the checkpoint's folder; what has to be written goes to ``folder``."""
    options, subject, device = workshop.options, workshop.subject, workshop.device
    if options.model is not None:
        source = local_folder(options.model)
        if subject.depth == subject.whole:
            return source
        watch.phase(f"copying the first {subject.depth} of {subject.whole} layers")
        cut_checkpoint(source, folder, config=subject.config, whole=subject.whole)
        return folder
    watch.phase(f"writing random weights at shape {subject.shape}")
    if options.weights == "rolled":
        target = folder / "rolled"
        target.mkdir()
        write_packed_checkpoint(
            subject.config, target, seed=options.seed, device=device, load=workshop.plain
        )
        return target
    write_random_checkpoint(
        subject.config, folder, seed=options.seed, dtype=torch.bfloat16, device=device
    )
    return folder


def _chained(first: Batch, rest: Iterator[Batch]) -> Iterator[Batch]:
    yield first
    yield from rest


@contextmanager
def _few_threads(subject: Subject) -> Iterator[None]:
    """Run tiny models on one thread: handing them out costs more than it saves."""
    found = torch.get_num_threads()
    if int(subject.text_config["hidden_size"]) <= _TINY:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(found)


@contextmanager
def _named_failures() -> Iterator[None]:
    """Turn the two failures that a user can do something about into errors that say so."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GateError(
            "The device has too little memory for a resident arm, its control and the streamed "
            f"arm side by side ({str(error).splitlines()[0]}). Use --layers fit for as many "
            "leading layers as fit, --against with fingerprints from a larger device, a smaller "
            "shape, or a shorter --seq-len."
        ) from error
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise GateError(
            f"A kernel of this model has no deterministic version here: "
            f"{str(error).splitlines()[0]} Bitwise parity cannot be shown with it. Change what "
            "asks for that kernel, or use a release of PyTorch that has one."
        ) from error
