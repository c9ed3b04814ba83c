"""One run of a gate: the arms in lockstep, stopped at the first divergence."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from poros_core.gate.arms import Arm
from poros_core.gate.compare import Comparison, StepView
from poros_core.gate.evidence import Evidence
from poros_core.gate.fingerprints import FingerprintWriter
from poros_core.gate.options import GateOptions
from poros_core.gate.progress import Progress
from poros_core.host_store import ALIGNMENT
from poros_core.prepare import Prepared

__all__ = ["Lockstep", "Observer", "evidence_of", "least_bytes", "loss_of"]

Batch = dict[str, torch.Tensor]


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


class Lockstep:
    """Steps a resident arm, its control and a streamed arm, and compares them."""

    def __init__(
        self,
        options: GateOptions,
        arms: dict[str, Arm],
        *,
        progress: Progress,
        rebuild: Callable[[], Arm],
        fingerprints: FingerprintWriter | None = None,
    ) -> None:
        """Take over arms that have not stepped yet.

        Args:
            options: what the gate was asked to do.
            arms: ``resident``, ``streamed``, and ``control`` if there is one.
            progress: how far it is, and where that is kept.
            rebuild: builds a new streamed arm, for ``options.resume_at``.
            fingerprints: takes down what the resident arm shows.
        """
        self.options = options
        self.arms = arms
        self.progress = progress
        self.control = Comparison()
        self.streamed = Comparison()
        self.finished = False
        self._rebuild = rebuild
        self._fingerprints = fingerprints

    def run(self, batches: Iterator[Batch], *, watch: Observer) -> None:
        """Step until the first divergence, the end, or the end of the time."""
        found = self.progress.load(self.arms)
        if found is not None:
            watch.phase(found)
        done = self.progress.step
        same = self._equal_at_start(done)
        self.progress.begin()
        accumulate = self.options.accumulate
        for _ in islice(batches, done * accumulate):
            pass
        for step in range(done + 1, self.options.steps + 1) if same else ():
            if self.progress.time_is_up:
                self.progress.save_if_due(self.arms, now=True)
                return
            loss = self._step(list(islice(batches, accumulate)), step)
            if loss is None:
                break
            watch.step(step, self.options.steps, loss)
            if step == self.options.resume_at:
                watch.phase("resuming the streamed arm from a file")
                self._resume()
            self.progress.save_if_due(self.arms)
        self.finished = True

    def _equal_at_start(self, step: int) -> bool:
        views = {name: arm.view() for name, arm in self.arms.items()}
        if "control" in views and not self.control.compare(
            views["resident"], views["control"], step=step
        ):
            return False
        return self.streamed.compare(views["resident"], views["streamed"], step=step)

    def _step(self, micro_batches: Sequence[Batch], step: int) -> float | None:
        """Step every arm; return the loss, or None after a divergence."""
        reference = self.arms["resident"].step(micro_batches)
        control = self.arms.get("control")
        if control is not None and not self.control.compare(
            reference, control.step(micro_batches), step=step
        ):
            return None
        if self._fingerprints is not None:
            self._fingerprints.add(step, reference)
        arm = self.arms["streamed"]
        before = arm.counters()
        other = arm.step(micro_batches)
        after = arm.counters()
        rises = {name: after[name] - before[name] for name in after}
        equal = self.streamed.compare(reference, other, step=step)
        losses = {"resident": loss_of(reference), "streamed": loss_of(other)}
        self.progress.note(step, rises, losses)
        return losses["resident"] if equal else None

    def _resume(self) -> None:
        """Save the streamed arm, throw it away, build it anew, and let it go on."""
        arm = self.arms.pop("streamed")
        with tempfile.TemporaryDirectory(prefix="poros-gate-") as folder:
            file = Path(folder) / "streamed"
            torch.save(arm.state(), file)
            measured = arm.meter.state()
            del arm
            gc.collect()
            self.arms["streamed"] = arm = self._rebuild()
            arm.load_state(torch.load(file, map_location="cpu", weights_only=True))
            arm.meter.load_state(measured)


def loss_of(view: StepView) -> float:
    """Return the loss of a step: the sum of its micro-batches' shares."""
    losses = view.surfaces["loss"]
    return sum(float(loss) for name, loss in losses.items() if name.startswith("micro-batch"))


def evidence_of(
    arm: Arm, counters: Sequence[Mapping[str, int]], *, options: GateOptions
) -> Evidence:
    """Return what a streamed arm shows of its streaming and training."""
    prepared = arm.prepared
    assert prepared is not None
    resident = arm.counters()["resident_units"]
    once = options.backward == "block-major"
    return Evidence(
        counters=counters,
        resident_units=resident,
        least_bytes=least_bytes(arm) * (1 if once else options.accumulate),
        most_bytes=_bytes_of_one(prepared) if once else None,
        untrained=arm.untrained(),
        budget=prepared.settings.vram_budget,
        resident_bytes=resident * min(_layer_bytes(prepared)),
        layers=len(prepared.plan.layers),
        not_finite=[n for n, p in arm.params.items() if not p.detach().isfinite().all()],
    )


def least_bytes(arm: Arm) -> int:
    """Return how many bytes the layers of a micro-batch stream at least.

    Every layer is needed twice. A copy is spared only where the backward finds a layer that the
    forward left in its slot, and where the forward finds what it starts with, two layers; and for
    the layers that a budget keeps on the device.
    """
    prepared = arm.prepared
    assert prepared is not None
    sizes = _layer_bytes(prepared)
    block = max(len(group) for group in prepared.plan.blocks(prepared.settings.block_size))
    spared = min(2 * block, len(sizes)) + 2
    if prepared.settings.vram_budget is not None:
        spared += 2 * arm.counters()["resident_units"]
    return max(0, 2 * sum(sizes) - spared * max(sizes))


def _bytes_of_one(prepared: Prepared) -> int:
    """Return how many bytes one micro-batch streams at most: every layer twice, the head once."""
    layers, head = prepared.plan.layers, prepared.plan.head
    units = [*layers, *layers, *([] if head is None else [head])]
    sizes = [ref.get().nbytes for unit in units for ref in unit.refs]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def _layer_bytes(prepared: Prepared) -> list[int]:
    return [sum(ref.get().nbytes for ref in unit.refs) for unit in prepared.plan.layers]
