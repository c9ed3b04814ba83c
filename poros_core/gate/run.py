"""Running a gate: the arms in lockstep, stopped at the first divergence."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from poros_core.determinism import deterministic
from poros_core.errors import GateError
from poros_core.gate.arms import Arm, Workshop
from poros_core.gate.compare import Comparison
from poros_core.gate.data import make_batches
from poros_core.gate.fault import PlantedFault
from poros_core.gate.options import GateOptions, Subject, subject_of
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.record import Evidence, GateResult, make_record
from poros_core.load import local_folder

__all__ = ["Observer", "run_gate"]

_TINY = 256


class Observer(Protocol):
    """Is told how far a gate is."""

    def phase(self, text: str) -> None:
        """Called when something that takes time begins, with what it is."""
        ...

    def arms_ready(self, arms: Mapping[str, Arm]) -> None:
        """Called when every arm is built, before the first step."""
        ...

    def step(self, done: int, total: int, loss: float) -> None:
        """Called after every step that was compared."""
        ...


class _Silent:
    def phase(self, text: str) -> None:
        """Say nothing."""

    def arms_ready(self, arms: Mapping[str, Arm]) -> None:
        """Say nothing."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Say nothing."""


def run_gate(
    options: GateOptions, *, command: str = "", observer: Observer | None = None
) -> GateResult:
    """Train a resident and a streamed model in lockstep, and compare them bit for bit.

    A second resident model, built independently, is the control: if it differs from the first, the
    environment is not deterministic and nothing is said of streaming.

    Args:
        options: what to do.
        command: how it was asked for, for the record.
        observer: is told how far it is.

    Returns:
        The verdict and the record.

    Raises:
        GateError: the options do not fit the model, or a kernel has no deterministic version.
        StateError: CUDA was used before kernels could be made deterministic.
        CheckpointError: the checkpoint cannot be read.
    """
    watch = observer or _Silent()
    subject = subject_of(options)
    with (
        deterministic(),
        _few_threads(subject),
        _named_failures(),
        tempfile.TemporaryDirectory(prefix="poros-gate-") as folder,
    ):
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        path = _checkpoint(options, subject, Path(folder), device=device, watch=watch)
        batches = make_batches(subject, data=options.data, seed=options.seed, device=device)
        first = next(batches)
        workshop = Workshop(options=options, subject=subject, path=path, device=device)
        watch.phase("loading the resident arm")
        resident = workshop.resident("resident")
        watch.phase("loading the control")
        control = workshop.resident("control")
        watch.phase("loading the streamed arm")
        streamed, fault = workshop.streamed()
        arms = {arm.name: arm for arm in (resident, streamed, control)}
        watch.arms_ready(arms)
        return _Lockstep(options, subject, arms, fault).run(
            _chained(first, batches), watch=watch, command=command
        )


def _checkpoint(
    options: GateOptions, subject: Subject, folder: Path, *, device: torch.device, watch: Observer
) -> Path:
    if options.model is not None:
        return local_folder(options.model)
    watch.phase(f"writing random weights at shape {subject.shape}")
    write_random_checkpoint(
        subject.config, folder, seed=options.seed, dtype=torch.bfloat16, device=device
    )
    return folder


def _chained(
    first: dict[str, torch.Tensor], rest: Iterator[dict[str, torch.Tensor]]
) -> Iterator[dict[str, torch.Tensor]]:
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
            f"arm side by side ({str(error).splitlines()[0]}). Use a smaller shape, a shorter "
            "--seq-len, or a device with more memory."
        ) from error
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise GateError(
            f"A kernel of this model has no deterministic version here: "
            f"{str(error).splitlines()[0]} Bitwise parity cannot be shown with it. Change what "
            "asks for that kernel, or use a release of PyTorch that has one."
        ) from error


class _Lockstep:
    """One run of a gate."""

    def __init__(
        self,
        options: GateOptions,
        subject: Subject,
        arms: Mapping[str, Arm],
        fault: PlantedFault | None,
    ) -> None:
        self.options = options
        self.subject = subject
        self.arms = arms
        self.fault = fault
        self.control = Comparison()
        self.streamed = Comparison()
        self.counters: list[dict[str, int]] = []

    def run(
        self,
        batches: Iterator[dict[str, torch.Tensor]],
        *,
        watch: Observer,
        command: str,
    ) -> GateResult:
        """Step until the first divergence or the end, and judge."""
        resident, control, streamed = (
            self.arms[name] for name in ("resident", "control", "streamed")
        )
        same = self.control.compare(resident.view(), control.view(), step=0)
        same = same and self.streamed.compare(resident.view(), streamed.view(), step=0)
        for step in range(1, self.options.steps + 1) if same else ():
            micro_batches = list(islice(batches, self.options.accumulate))
            loss = self._step(micro_batches, step)
            if loss is None:
                break
            watch.step(step, self.options.steps, loss)
        return make_record(
            options=self.options,
            subject=self.subject,
            arms=self.arms,
            control=self.control,
            streamed=self.streamed,
            evidence=self._evidence(),
            fault=self.fault,
            command=command,
        )

    def _step(self, micro_batches: Sequence[dict[str, torch.Tensor]], step: int) -> float | None:
        """Step every arm; return the loss, or None after a divergence."""
        reference = self.arms["resident"].step(micro_batches)
        other = self.arms["control"].step(micro_batches)
        if not self.control.compare(reference, other, step=step):
            return None
        arm = self.arms["streamed"]
        before = arm.counters()
        other = arm.step(micro_batches)
        after = arm.counters()
        self.counters.append({name: after[name] - before[name] for name in after})
        if not self.streamed.compare(reference, other, step=step):
            return None
        losses = reference.surfaces["loss"]
        return sum(float(losses[f"micro-batch {i}"]) for i in range(len(micro_batches)))

    def _evidence(self) -> Evidence:
        arm = self.arms["streamed"]
        return Evidence(
            counters=self.counters,
            resident_units=arm.counters()["resident_units"],
            least_bytes=self.options.accumulate * least_bytes(arm),
            untrained=arm.untrained(),
        )


def least_bytes(arm: Arm) -> int:
    """Return how many bytes the layers of a micro-batch stream at least.

    Every layer is needed twice. A copy is spared only where the backward finds a layer that the
    forward left in its slot, and where the forward finds what it starts with, two layers.
    """
    prepared = arm.prepared
    assert prepared is not None
    sizes = [sum(ref.get().nbytes for ref in unit.refs) for unit in prepared.plan.layers]
    block = max(len(group) for group in prepared.plan.blocks(prepared.settings.block_size))
    spared = min(2 * block, len(sizes)) + 2
    return 2 * sum(sizes) - spared * max(sizes)
