"""The bench that checks work on: a random checkpoint, and arms that train from it in lockstep."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal

import attrs
import torch
from attrs import define, field

from poros_core.determinism import deterministic
from poros_core.errors import PorosError
from poros_core.gate.arms import Arm, Workshop
from poros_core.gate.compare import Comparison, Divergence, StepView
from poros_core.gate.data import make_batches
from poros_core.gate.options import GateOptions, Subject, subject_of
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.plan import group_layers
from poros_core.settings import POISON_VARIABLE, Settings

__all__ = ["BLOCK_SIZES", "Bench", "BlockSize", "ConformanceError", "bench"]

BlockSize = int | Literal["all"]
Batch = Mapping[str, torch.Tensor]

BLOCK_SIZES: tuple[BlockSize, ...] = (1, 2, 4, "all")
"""Those that the training check runs; of two that group the layers alike, one is run."""

_HINT = "Check that the family's decoder, layers, shared and breaks fit this architecture."


class ConformanceError(PorosError, AssertionError):
    """A family does not hold the contract; the message says where."""


@define(eq=False)
class Bench:
    """A random checkpoint of one shape, and the arms that train from it.

    Attributes:
        workshop: builds arms.
        block_sizes: of the streamed arms.
        steps: steps of the training check.
        batches: the micro-batches still to come.
        resident: the arm that everything is compared with; None before the first step.
        control: a second one, built independently.
        streamed: the streamed arms by block size.
        comparisons: what was found so far, by the arm's name.
        counters: per streamed arm, by how much its runtime's totals rose in each step.
        trace: per step, the micro-batches and what the resident arm showed.
    """

    workshop: Workshop
    block_sizes: Sequence[BlockSize]
    steps: int
    batches: Iterator[dict[str, torch.Tensor]]
    resident: Arm | None = None
    control: Arm | None = None
    streamed: dict[BlockSize, Arm] = field(factory=dict)
    comparisons: dict[str, Comparison] = field(factory=dict)
    counters: dict[str, list[dict[str, int]]] = field(factory=dict)
    trace: list[tuple[Sequence[Batch], StepView]] = field(factory=list)

    @property
    def title(self) -> str:
        """What error messages call it."""
        subject = self.workshop.subject
        return f"Family '{subject.family.name}', shape '{subject.shape}'"

    @property
    def layers(self) -> int:
        """How many decoder layers the config asks for."""
        return int(self.workshop.subject.text_config["num_hidden_layers"])

    def build(self) -> None:
        """Build all arms, once."""
        if self.resident is not None:
            return
        self.resident = self.workshop.resident("resident")
        self.control = self.workshop.resident("control")
        for size in _distinct(self.block_sizes, self.workshop.subject):
            options = attrs.evolve(
                self.workshop.options, settings=Settings(block_size=size, poison=True)
            )
            arm, _ = attrs.evolve(self.workshop, options=options).streamed()
            arm.name = f"streamed, block_size={size}"
            self.streamed[size] = arm

    def reset(self) -> None:
        """Forget all arms; the next step builds new ones."""
        self.resident = self.control = None
        for kept in (self.streamed, self.comparisons, self.counters):
            kept.clear()
        self.trace.clear()

    def step(self, what: str, *, streamed: bool = True) -> None:
        """Train every arm one step on the same batches, and compare it with the resident arm.

        Args:
            what: names the check in an error.
            streamed: False leaves the streamed arms behind; ``reset`` the bench afterwards.

        Raises:
            ConformanceError: an arm differs.
        """
        self.build()
        assert self.resident is not None
        assert self.control is not None
        batches = list(islice(self.batches, self.workshop.options.accumulate))
        reference = self.resident.step(batches)
        kept = {name: reference.surfaces[name] for name in ("loss", "grad_norms")}
        self.trace.append((batches, StepView(kept)))
        for arm in (self.control, *(self.streamed.values() if streamed else ())):
            before = arm.counters()
            view = self._stepped(arm, batches, what)
            rises = {name: total - before.get(name, 0) for name, total in arm.counters().items()}
            self.counters.setdefault(arm.name, []).append(rises)
            comparison = self.comparisons.setdefault(arm.name, Comparison())
            if not comparison.compare(reference, view, step=len(self.trace)):
                self._fail(what, arm, comparison.first)

    def _stepped(self, arm: Arm, batches: Sequence[Batch], what: str) -> StepView:
        try:
            return arm.step(batches)
        except Exception as error:
            raise ConformanceError(
                f"{self.title}, {what}: {arm.name} fails where resident does not: {error} {_HINT}"
            ) from error

    def _fail(self, what: str, arm: Arm, divergence: Divergence | None) -> None:
        if arm is self.control and what == "training":
            raise ConformanceError(
                f"{self.title}: two resident runs differ ({divergence}), so nothing can be said "
                "of streaming. Find the kernel that is not deterministic."
            )
        raise ConformanceError(
            f"{self.title}, {what}: {arm.name} differs from resident: {divergence}. {_HINT}"
        )


@contextmanager
def bench(
    name: str,
    *,
    shape: str = "tiny",
    precision: str = "nf4",
    block_sizes: Sequence[BlockSize] = BLOCK_SIZES,
    steps: int = 2,
    accumulate: int = 2,
    dropout: float = 0.1,
    seed: int = 0,
) -> Iterator[Bench]:
    """Write a random checkpoint and open a bench on it.

    Kernels are deterministic, released weights are poisoned and one CPU thread computes while it
    is open; what was found is put back.

    Args:
        name: the family's name.
        shape: the shape.
        precision: of the base.
        block_sizes: of the streamed arms.
        steps: of the training check; an adapter's first matrix trains from the second on.
        accumulate: micro-batches per step.
        dropout: of the adapters, and of the attention where the architecture has it.
        seed: of weights, adapters, data and dropout.

    Raises:
        GateError: there is no such family or shape.
    """
    options = GateOptions(
        family=name,
        shape=shape,
        precision=precision,
        steps=steps,
        accumulate=accumulate,
        dropout=dropout,
        seed=seed,
    )
    subject = _with_attention_dropout(subject_of(options), dropout)
    with (
        deterministic(),
        _one_thread(),
        _poison(),
        tempfile.TemporaryDirectory(prefix="poros-conformance-") as folder,
    ):
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        path = Path(folder)
        write_random_checkpoint(
            subject.config, path, seed=seed, dtype=torch.bfloat16, device=device
        )
        workshop = Workshop(options=options, subject=subject, path=path, device=device)
        batches = make_batches(subject, data=None, seed=seed, device=device)
        yield Bench(workshop, block_sizes, steps, batches)


def _distinct(block_sizes: Sequence[BlockSize], subject: Subject) -> list[BlockSize]:
    count = int(subject.text_config["num_hidden_layers"])
    fitting = [size for size in block_sizes if size == "all" or size <= count]
    by_blocks = {tuple(group_layers(count, size)): size for size in reversed(fitting)}
    return [size for size in fitting if size in by_blocks.values()]


def _with_attention_dropout(subject: Subject, dropout: float) -> Subject:
    """Return the subject with attention dropout in its config, where its decoder has that."""
    if "attention_dropout" not in subject.text_config:
        return subject
    text = {**subject.text_config, "attention_dropout": dropout}
    nested = "text_config" in subject.config
    config = {**subject.config, "text_config": text} if nested else text
    return attrs.evolve(subject, config=config)


@contextmanager
def _one_thread() -> Iterator[None]:
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(found)


@contextmanager
def _poison() -> Iterator[None]:
    found = os.environ.get(POISON_VARIABLE)
    os.environ[POISON_VARIABLE] = "1"
    try:
        yield
    finally:
        if found is None:
            del os.environ[POISON_VARIABLE]
        else:
            os.environ[POISON_VARIABLE] = found
