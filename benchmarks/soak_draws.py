"""What a soak draws: how the streamed arm is prepared, how long batches are, what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import field, frozen

from poros_core.gate.arms import Arm

KINDS = (RuntimeError, KeyboardInterrupt, ValueError, ZeroDivisionError, MemoryError)
"""What is raised. An interrupt comes early in the list, so that short runs have one."""

PLACES = (
    "layer forward",
    "gradient",
    "loss",
    "layer backward",
    "before the step",
    "head",
    "loss backward",
    "after the step",
)
"""Where: moments that a resident run has too, and that come at the same place in its order."""

_BUDGETS = ("bytes", "none", "bytes", "auto")
_SEVERAL = 0.15
"""How many steps have two micro-batches."""
_SIGNATURES = (2, 2, 3, 4, 6)
"""How many lengths a way may have. Under a budget graphs are kept for four at most."""
SETTLING = 3
"""Steps at the start of a phase that have its longest batches: a budget is settled by the first of
them, and once more if it is raised."""
_CALM = 5
"""Steps after a budget was given in which nothing goes wrong."""


@frozen(kw_only=True)
class Way:
    """One way to prepare the streamed arm, and the lengths that it trains at.

    Attributes:
        number: which of the run's.
        budget: ``"none"``, ``"auto"`` or ``"bytes"``.
        share: of the layers' bytes that a budget leaves room for, beside what the run needs.
        block_size: as in ``poros.prepare``.
        offload_activations: as in ``poros.prepare``.
        copy_ahead: as in ``poros.prepare``.
        optimizer_state: ``"device"`` or ``"host"``.
        lengths: tokens in a sequence at most, one for each signature.
    """

    number: int
    budget: str = "none"
    share: float = 0.0
    block_size: int = 1
    offload_activations: bool = False
    copy_ahead: bool = False
    optimizer_state: str = "device"
    lengths: tuple[int, ...] = ()


@frozen(kw_only=True)
class Mishap:
    """An exception that is raised in both arms.

    Attributes:
        step: before this step, which is trained as if nothing had been.
        place: one of ``PLACES``.
        kind: what is raised.
        where: chooses layer or parameter.
        micro_batch: in which one, from 1.
        lengths: of the micro-batches of the step that fails.
    """

    step: int
    place: str
    kind: type[BaseException] = field(repr=lambda kind: kind.__name__)
    where: float
    micro_batch: int
    lengths: tuple[int, ...]


def draw_ways(
    draw: random.Random, count: int, *, depth: int, shortest: int, longest: int
) -> list[Way]:
    """Return so many ways. The first is the default, which is measured to know what fits."""

    def lengths() -> tuple[int, ...]:
        count = draw.choice(_SIGNATURES)
        return tuple(draw.randint(shortest, longest) for _ in range(count))

    sizes = [size for size in (1, 2, 4) if size <= depth]
    ways = [Way(number=0, lengths=(longest, *lengths()[1:]))]
    for number in range(1, count):
        budget = _BUDGETS[(number - 1) % len(_BUDGETS)]
        ways.append(
            Way(
                number=number,
                budget=budget,
                share=0.0 if budget == "none" else draw.random(),
                block_size=draw.choice(sizes),
                offload_activations=draw.random() < 0.5,
                copy_ahead=draw.random() < 0.5,
                optimizer_state=draw.choice(("device", "host")),
                lengths=lengths(),
            )
        )
    return ways


def in_rounds(draw: random.Random, ways: Sequence[Way], phases: int) -> list[Way]:
    """Return the way of each phase: all ways by turns, each round in an order of its own."""
    found = list(ways)
    while len(found) < phases:
        found += draw.sample(ways, len(ways))
    return found[:phases]


def draw_steps(draw: random.Random, way: Way, count: int) -> list[tuple[int, ...]]:
    """Return the lengths of the micro-batches of each step of a phase.

    Every length comes twice more where that is possible, so that phases of one way end alike.
    """
    settling = [max(way.lengths)] * min(SETTLING, count)
    sure = list(way.lengths * 2)[: count - len(settling)]
    rest = [draw.choice(way.lengths) for _ in range(count - len(settling) - len(sure))]
    firsts = settling + draw.sample(sure + rest, len(sure) + len(rest))
    return [
        (first, draw.choice(way.lengths)) if draw.random() < _SEVERAL else (first,)
        for first in firsts
    ]


def draw_mishaps(
    draw: random.Random, *, steps: int, every: int, phase: int, ways: Sequence[Way]
) -> dict[int, Mishap]:
    """Return what goes wrong before which step, once in ``every`` steps.

    Not while a budget is settled: what an arm that fails leaves would count as what the run needs.
    """
    places = _endless(draw, PLACES)
    found: dict[int, Mishap] = {}
    for number, first in enumerate(range(1, steps - every + 2, every)):
        step = draw.randrange(first, first + every)
        way, place = ways[(step - 1) // phase], (step - 1) % phase
        if way.budget != "none":
            step = min(step + max(0, min(_CALM, phase - 1) - place), first + every - 1)
        lengths = tuple(draw.choice(way.lengths) for _ in range(draw.randint(1, 2)))
        found[step] = Mishap(
            step=step,
            place=next(places),
            kind=KINDS[number % len(KINDS)],
            where=draw.random(),
            micro_batch=draw.randint(1, len(lengths)),
            lengths=lengths,
        )
    return found


def _endless(draw: random.Random, places: Sequence[str]) -> Iterator[str]:
    while True:
        yield from draw.sample(places, len(places))


@contextmanager
def planted(mishap: Mishap, arm: Arm, *, layers: Sequence[Any]) -> Iterator[None]:
    """Have an arm's next step raise, at the same moment in either arm.

    Micro-batches are counted by the model's own calls, since a layer that streams runs twice.
    """
    begun = 0

    def begin(*_: object) -> None:
        nonlocal begun
        begun += 1

    def burst(*_: object) -> None:
        if begun >= mishap.micro_batch:
            raise mishap.kind(text_of(mishap))

    handles = [arm.model.register_forward_pre_hook(begin), _hook(mishap, arm, layers, burst)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(mishap: Mishap, arm: Arm, layers: Sequence[Any], burst: Callable[..., None]) -> Any:
    def on_output(module: object, args: object, output: Any) -> None:
        output.register_hook(burst)

    def on_loss(module: object, args: object, output: Any) -> None:
        output.loss.register_hook(burst)

    model: Any = arm.model
    inner = layers[int(mishap.where * len(layers))].mlp
    params = list(arm.params.values())
    if mishap.place == "layer forward":
        return inner.register_forward_hook(burst)
    if mishap.place == "layer backward":
        return inner.register_forward_hook(on_output)
    if mishap.place == "head":
        return model.get_output_embeddings().register_forward_hook(burst)
    if mishap.place == "loss":
        return model.register_forward_hook(burst)
    if mishap.place == "loss backward":
        return model.register_forward_hook(on_loss)
    if mishap.place == "gradient":
        param = params[int(mishap.where * len(params))]
        return param.register_post_accumulate_grad_hook(burst)
    if mishap.place == "before the step":
        return arm.optimizer.register_step_pre_hook(burst)
    return arm.optimizer.register_step_post_hook(burst)


def text_of(mishap: Mishap) -> str:
    """Return what the exception says, by which it is told from one that nobody planted."""
    return f"planted before step {mishap.step}, {mishap.place}"
