"""Train for long while everything changes, and compare every step with a resident run.

Two arms see the same batches and random-number states: an ordinary Transformers and PEFT model that
Poros never touched, and one that streams. Every few steps the streamed arm is unprepared and
prepared another way (vram_budget, block_size, activations, copies ahead, optimizer state); every
now and then both fail at a random moment and go on. After each step loss, gradient norms, optimizer
state and adapter weights must be equal bit for bit, and after each phase no more memory may be in
use.

    python benchmarks/soak.py --shape 0.5b --steps 500 --json benchmarks/records/soak-0.5b.json
    python benchmarks/soak.py --shape tiny --steps 60 --phase 6 --exception-every 7 --plant-fault

Exit status: 0 exact and no growth, 1 otherwise, 2 bad input.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from soak_draws import (
    Mishap,
    Way,
    draw_mishaps,
    draw_steps,
    draw_ways,
    in_rounds,
    planted,
    text_of,
)
from soak_record import levels, record_of, row, summary

import poros
from poros_core.gate.arms import Arm, Workshop
from poros_core.gate.compare import Comparison, StepView
from poros_core.gate.data import make_batches
from poros_core.gate.lockstep import loss_of
from poros_core.gate.modes import Modes, applied
from poros_core.gate.options import GateOptions, subject_of
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.host_memory import layout_of

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
CUDA = DEVICE.type == "cuda"
DROPOUT = 0.1

AUTO_SLACK = 600 << 20
"""Bytes that an allocator that is bounded must have beside the highest of the first phase: for
fragments, blocks of several layers and graphs."""
NEEDED = re.compile(r"vram_budget is .* this run needs (\d+\.\d+) GB")
TRIES = 8


class Clock:
    """Takes the time of an arm's steps. It starts no new peak of memory, unlike a gate's meter:
    a budget is settled by the peak of the step before."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Take the time of one step that succeeds."""
        _wait()
        start = time.perf_counter()
        yield
        _wait()
        self.seconds.append(time.perf_counter() - start)


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize(DEVICE)


class Soak:
    """The two arms, and what was found so far."""

    def __init__(self, options: argparse.Namespace, workshop: Workshop) -> None:
        self.options = options
        self.dropout = DROPOUT
        self.subject = workshop.subject
        self.resident = workshop.resident("resident")
        self.streamed, self.fault = workshop.streamed()
        self.clocks = {arm.name: _clocked(arm) for arm in (self.resident, self.streamed)}
        layers = self.subject.family.layers
        decoder = self.subject.family.decoder
        self._layers = {
            arm.name: list(layers(decoder(arm.model))) for arm in (self.resident, self.streamed)
        }
        prepared = self.streamed.prepared
        assert prepared is not None
        head = prepared.plan.head
        units = [*prepared.plan.layers, *([] if head is None else [head])]
        sizes = [layout_of([ref.get().nbytes for ref in unit.refs])[1] for unit in units]
        self._sizes, self._heads = sizes[: self.subject.depth], sizes[self.subject.depth :]
        self._draw = random.Random(options.seed)
        count = -(-options.steps // options.phase)
        self.ways = draw_ways(
            self._draw,
            max(1, (count + 1) // 2),
            depth=self.subject.depth,
            shortest=max(4, self.subject.seq_len // 8),
            longest=self.subject.seq_len,
        )
        self.plan = in_rounds(self._draw, self.ways, count)
        self.mishaps = draw_mishaps(
            self._draw,
            steps=options.steps,
            every=options.exception_every,
            phase=options.phase,
            ways=self.plan,
        )
        self.comparison = Comparison()
        self.phases: list[dict[str, Any]] = []
        self.exceptions: list[dict[str, Any]] = []
        self.unprepared: list[dict[str, int]] = []
        self.prepared: dict[int, list[dict[str, int]]] = {}
        self.step = 0
        self.loss: float | None = None
        self.error: str | None = None
        self._until = time.monotonic() + 60 * options.minutes
        self._budgets: dict[int, int] = {}
        self._way = self.ways[0]
        self._offloaded: poros.OffloadedOptimizer | None = None
        self._since = 0
        self._peak = 0
        self._refusals = 0

    @property
    def finished(self) -> bool:
        """Whether all steps were made."""
        return self.step == self.options.steps

    def run(self) -> None:
        """Train until the end, the first divergence, or the end of the time."""
        for number, way in enumerate(self.plan):
            if not self._phase(number, way):
                return

    # -- a phase -------------------------------------------------------------------------------

    def _phase(self, number: int, way: Way) -> bool:
        """Train one phase; say whether to go on."""
        start, self._refusals = time.perf_counter(), 0
        first, self._way = self.step + 1, way
        if number:
            self._prepare()
        count = min(self.options.phase, self.options.steps - self.step)
        counts = dict.fromkeys(self.streamed.counters(), 0)
        for lengths in draw_steps(self._draw, way, count):
            if time.monotonic() > self._until:
                return False
            self.step += 1
            mishap = self.mishaps.get(self.step)
            if mishap is not None and not self._fail(mishap):
                return False
            if not self._train(lengths, counts):
                return False
        at_end = levels(DEVICE)
        self.prepared.setdefault(way.number, []).append(at_end)
        self._unprepare()
        self.unprepared.append(levels(DEVICE))
        self.phases.append(
            {
                "steps": [first, self.step],
                **attrs.asdict(way),
                "vram_budget": self._budgets.get(way.number),
                "refused_budgets": self._refusals,
                "streamed": counts,
                "seconds": round(time.perf_counter() - start, 2),
                "memory": {"prepared": at_end, "unprepared": self.unprepared[-1]},
            }
        )
        print(row(self.phases[-1]), flush=True)
        return True

    def _prepare(self) -> None:
        way = self._way
        budget: int | str | None = None
        if way.budget != "none":
            budget = self._budgets.setdefault(way.number, self._fitting(way))
        poros.prepare(
            self.streamed.model,
            block_size=way.block_size,
            vram_budget="auto" if way.budget == "auto" else budget,
            offload_activations=way.offload_activations,
            copy_ahead=way.copy_ahead,
            verbose=False,
        )
        if way.optimizer_state == "host":
            self._offloaded = poros.offload_optimizer(self.streamed.optimizer)
        self._since = 0

    def _unprepare(self) -> None:
        """Put the streamed arm's base, and its optimizer's state, on the device as they were."""
        if self._offloaded is not None:
            self._offloaded.remove()
            self._offloaded = None
        poros.unprepare(self.streamed.model, device=DEVICE)

    def _fitting(self, way: Way) -> int:
        """Return a budget to begin with: what is needed with nothing resident, and a share of the
        layers. On CUDA the need of a number of bytes is what its refusal says.

        Both arms stand on the device, and a budget is for the whole process.
        """
        share = round(way.share * sum(self._sizes))
        if not CUDA:  # only the arena is counted
            slots = min(2 * way.block_size, len(self._sizes))
            return max(slots * max(self._sizes), *self._heads) + share
        return self._peak + (AUTO_SLACK + share if way.budget == "auto" else 0)

    def _raised(self, refusal: str) -> int:
        """Return the budget to try after one was refused as too small."""
        if not CUDA:
            return self._budgets[self._way.number] + max(self._sizes)
        needed = NEEDED.search(refusal)
        assert needed is not None
        rounding = 10_000_000
        share = round(self._way.share * sum(self._sizes))
        return round(float(needed[1]) * 1e9) + rounding + share

    # -- a step --------------------------------------------------------------------------------

    def _train(self, lengths: Sequence[int], counts: dict[str, int]) -> bool:
        """Train both arms for one step; say whether they are equal."""
        batches = self._batches(lengths)
        before = self.streamed.counters()
        views: list[StepView] = []

        def reference() -> StepView:
            if not views:
                views.append(self.resident.step(batches))
            return views[0]

        # The first two streamed steps follow each other: the second settles a budget by the peak
        # since the first, which must not be the resident arm's.
        if self._since != 1:
            reference()
        refused = self._refusals
        other = self._streamed_step(batches, meanwhile=reference)
        after = self.streamed.counters()
        start = before if refused == self._refusals else dict.fromkeys(before, 0)
        for name in counts:
            counts[name] += after[name] - start[name]
        counts["resident_units"] = after["resident_units"]
        self.loss = loss_of(reference())
        return self.comparison.compare(reference(), other, step=self.step)

    def _streamed_step(
        self, batches: Sequence[dict[str, torch.Tensor]], *, meanwhile: Callable[[], object]
    ) -> StepView:
        """Step the streamed arm. A budget that is refused as too small is raised."""
        for _ in range(TRIES):
            if CUDA and (self._since == 0 or self._way.number == 0):
                torch.cuda.reset_peak_memory_stats(DEVICE)
            try:
                with self._bounded():
                    view = self.streamed.step(batches)
            except poros.StateError as error:
                refusal = str(error)
                if self._way.budget != "bytes" or NEEDED.search(refusal) is None:
                    raise
            else:
                self._since += 1
                if CUDA and self._way.number == 0:
                    self._peak = max(self._peak, torch.cuda.max_memory_allocated(DEVICE))
                return view
            meanwhile()
            self._refusals += 1
            self._budgets[self._way.number] = self._raised(refusal)
            self._unprepare()
            self._prepare()
        raise RuntimeError(f"{TRIES} budgets were refused as too small")

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Bound the allocator for one step of the streamed arm, where a budget is ``"auto"``."""
        if not CUDA or self._way.budget != "auto":
            yield
            return
        total = torch.cuda.mem_get_info(DEVICE)[1]
        torch.cuda.empty_cache()
        bound = min(1.0, self._budgets[self._way.number] / total)
        torch.cuda.set_per_process_memory_fraction(bound, DEVICE)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)

    def _batches(self, lengths: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        found = []
        for length in lengths:
            subject = attrs.evolve(self.subject, seq_len=length)
            seed = self._draw.randrange(2**31)
            found.append(next(make_batches(subject, data=None, seed=seed, device=DEVICE)))
        return found

    # -- an exception --------------------------------------------------------------------------

    def _fail(self, mishap: Mishap) -> bool:
        """Let both arms fail; say whether they are equal afterwards.

        An arm takes its random-number state over from the last step that succeeded.
        """
        batches = self._batches(mishap.lengths)
        self._burst(self.resident, mishap, lambda: self.resident.step(batches))
        self._burst(
            self.streamed,
            mishap,
            lambda: self._streamed_step(batches, meanwhile=lambda: None),
        )
        self.exceptions.append(
            {
                "step": mishap.step,
                "place": mishap.place,
                "type": mishap.kind.__name__,
                "micro_batch": mishap.micro_batch,
                "micro_batches": len(mishap.lengths),
                "way": self._way.number,
            }
        )
        return self.comparison.compare(
            _state_of(self.resident), _state_of(self.streamed), step=self.step
        )

    def _burst(self, arm: Arm, mishap: Mishap, step: Callable[[], object]) -> None:
        with planted(mishap, arm, layers=self._layers[arm.name]):
            try:
                step()
            except mishap.kind as error:
                if text_of(mishap) not in str(error):
                    raise
            else:
                raise RuntimeError(f"no exception came {text_of(mishap)}, in the {arm.name} arm")
        arm.optimizer.zero_grad(set_to_none=True)


def _clocked(arm: Arm) -> Clock:
    clock: Any = Clock()
    arm.meter = clock
    return clock  # type: ignore[no-any-return]


def _state_of(arm: Arm) -> StepView:
    state = {
        f"{name} {key}": value
        for name, param in arm.params.items()
        for key, value in arm.optimizer.state[param].items()
    }
    return StepView({"optimizer_state": state, "adapter_weights": arm.params})


# -- the command line ---------------------------------------------------------------------------


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--shape", default="0.5b", help="seeded random weights at this shape")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--phase", type=int, default=25, help="steps between two preparations")
    parser.add_argument("--exception-every", type=int, default=50, help="steps, about")
    parser.add_argument("--seq-len", type=int, help="tokens at most; 512, or 32 for a tiny shape")
    parser.add_argument("--layers", type=int, help="train so many leading layers only")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to stop unfinished")
    parser.add_argument("--plant-fault", action="store_true", help="flip a bit; the run must fail")
    parser.add_argument("--json", type=Path, help="write the record there")
    return parser.parse_args(line)


def soak(options: argparse.Namespace, *, command: str) -> dict[str, Any]:
    """Build the arms, train them, and return the record."""
    asked = GateOptions(
        family=options.family,
        shape=options.shape,
        steps=options.steps,
        seq_len=options.seq_len,
        layers=options.layers,
        dropout=DROPOUT,
        seed=options.seed,
        plant_fault=options.plant_fault,
    )
    subject = subject_of(asked)
    start = time.perf_counter()
    with applied(Modes()), tempfile.TemporaryDirectory(prefix="poros-soak-") as folder:
        path = Path(folder)
        write_random_checkpoint(
            subject.config, path, seed=options.seed, dtype=torch.bfloat16, device=DEVICE
        )
        run = Soak(options, Workshop(options=asked, subject=subject, path=path, device=DEVICE))
        try:
            run.run()
        except Exception:
            run.error = traceback.format_exc()
        return record_of(run, command=command, seconds=time.perf_counter() - start)


def main(line: Sequence[str] | None = None) -> int:
    """Do what was asked for; return the exit status."""
    options = arguments(line)
    if options.shape.startswith("tiny"):
        torch.set_num_threads(1)
    try:
        if min(options.steps, options.phase, options.exception_every) < 1:
            raise ValueError("--steps, --phase and --exception-every must be 1 or more.")
        record = soak(options, command=shlex.join(["python", *sys.argv]))
    except (ValueError, poros.PorosError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(summary(record))
    if record["error"] is not None:
        print(record["error"], file=sys.stderr)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if record["verdict"] == "exact" else 1


def set_imports_aside() -> None:
    """Import what the run will, and keep it out of all garbage collections, of which each phase
    makes some."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch._inductor  # noqa: F401
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: F401

    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    set_imports_aside()
    sys.exit(main())
