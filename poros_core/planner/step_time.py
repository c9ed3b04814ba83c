"""How long a step takes: the sum of its phases, each as long as the slowest of link, GPU, launches.

[Note: Step time]
In a phase a layer's copy and the kernels of other layers run at the same time, so the slower of
link and compute sets the pace; the other one adds what it takes for one layer, before the first or
after the last. Phases follow each other: a forward may wait for the link and the backward, with
three times its kernels, for the GPU. Without CUDA graphs the host launches some 700 kernels a
layer, a third of them in the forward, which is a third bound. Between forward and backward the head
is copied into the arena while nothing computes, and then there is the loss. State of the optimizer
that stands on the host moves while nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from attrs import frozen

from poros_core.planner.memory import arena_of
from poros_core.planner.settings import RunSettings
from poros_core.planner.weights import LINEAR_ATTENTION, Weights

__all__ = [
    "ASSUMED_LINK",
    "CARDS",
    "Phase",
    "Rates",
    "StepTime",
    "step_time",
    "streamed_bytes",
]

ASSUMED_LINK = 25e9
"""Bytes a second over PCIe 4 x16 from page-locked memory, where nothing is said or measured."""
_KEPT = 2
"""Layers that stay on the device between steps; as in ``poros_runtimes.streamed.units``."""


@frozen(kw_only=True)
class Rates:
    """How fast a machine is.

    Attributes:
        link: bytes a second from page-locked host memory to the device.
        ring: bytes a second from layers that are not page-locked, while all of them are in memory,
            or None if that is not known; then they are taken to be as fast as the link.
        compute: floating-point operations a second that a step's matrix products reach, or None if
            nothing is known of the GPU.
        dequantise: numbers of a quantised weight a second.
        kernels: seconds that the small kernels of a layer's forward take whatever its size, apart
            from those of its normalisations.
        norm: seconds that the kernels of a normalisation's forward take whatever its size.
        linear_attention: seconds for each token and layer of linear attention beyond its matrix
            products.
        launch: seconds in which the host launches a layer's kernels one by one, both ways.
        beside: seconds of a micro-batch beside its phases.
        optimizer: seconds for each adapter tensor in which the host clips gradients and launches
            an optimizer that is not fused.
        source: where the figures are from.
    """

    link: float
    ring: float | None = None
    compute: float | None = None
    dequantise: float = math.inf
    kernels: float = 0.0
    norm: float = 0.0
    linear_attention: float = 0.0
    launch: float = 0.0
    beside: float = 0.0
    optimizer: float = 0.0
    source: str = ""


CARDS: Mapping[str, Rates] = {
    "h200": Rates(
        link=55.4e9,
        ring=25.5e9,
        compute=381e12,
        dequantise=7.5e11,
        kernels=2e-4,
        norm=1.2e-4,
        linear_attention=8e-6,
        launch=0.017,
        beside=0.01,
        optimizer=1e-4,
        source="measured on an H200 (PCIe 5 x16)",
    )
}
"""Rates by card. Compute is what 2048 more tokens take of a step of Qwen2.5 32B with checkpointing,
and what does not grow with tokens is fitted to it; launch is that of eager steps at 512 tokens;
ring lies between what gates of 32B give for layers in ordinary memory, 27.2e9, and in files,
23.1e9; the rest is fitted to the committed records. What the host launches can take half as long
again with the same GPU on another host."""


@frozen(kw_only=True)
class Phase:
    """One phase of a micro-batch, in seconds; see [Note: Step time].

    Attributes:
        name: ``"forward"``, ``"head"`` or ``"backward"``.
        link: what the copies take.
        compute: what the kernels take, or None if nothing is known of the GPU.
        launch: what launching takes, where blocks are not captured as graphs.
        overlap: by how many pieces copies and kernels come; one means that they do not overlap.
    """

    name: str
    link: float
    compute: float | None
    launch: float = 0.0
    overlap: int = 1

    @property
    def seconds(self) -> float:
        """All of it; a lower bound where nothing is known of the GPU."""
        busy = max(self.compute or 0.0, self.launch)
        short, long = sorted((self.link, busy))
        return long + short / self.overlap

    @property
    def bound(self) -> str:
        """What sets the pace: ``"link"``, ``"compute"`` or ``"launches"``."""
        return _longest(self.link, self.compute, self.launch)


@frozen(kw_only=True)
class StepTime:
    """Seconds of an optimizer step; see [Note: Step time].

    Attributes:
        phases: of one micro-batch, in order.
        accumulate: micro-batches.
        optimizer: what moving the optimizer's state takes.
        beside: what is in no phase.
        streamed: bytes that the copies of one step move to the device.
        rate: bytes a second at which layers are copied.
    """

    phases: tuple[Phase, ...]
    accumulate: int
    optimizer: float
    beside: float
    streamed: int
    rate: float

    @property
    def seconds(self) -> float:
        """All of it; a lower bound where nothing is known of the GPU."""
        phases = sum(phase.seconds for phase in self.phases)
        return self.accumulate * phases + self.optimizer + self.beside

    @property
    def pace(self) -> float:
        """What the slower of link and compute takes, phase by phase, as if neither waited for the
        other: what a step cannot be shorter than with the memory that it has. A forward finds on
        the device what a budget holds, and must wait for all other layers, so compute of the
        backward cannot make up for copies of the forward."""
        slower = sum(max(phase.link, phase.compute or 0.0) for phase in self.phases)
        return self.accumulate * slower + self.optimizer

    @property
    def link(self) -> float:
        """What the copies take, in all phases and for the optimizer."""
        return self.accumulate * sum(phase.link for phase in self.phases) + self.optimizer

    @property
    def compute(self) -> float | None:
        """What the kernels take, or None if nothing is known of the GPU."""
        known = [phase.compute for phase in self.phases if phase.compute is not None]
        return self.accumulate * sum(known) if known else None

    @property
    def launch(self) -> float:
        """What launching takes, where blocks are not captured as graphs."""
        return self.accumulate * sum(phase.launch for phase in self.phases)

    @property
    def bound(self) -> str:
        """What takes most in sum: ``"link"``, ``"compute"`` or ``"launches"``. In a phase it may
        be another."""
        return _longest(self.link, self.compute, self.launch)


def _longest(link: float, compute: float | None, launch: float) -> str:
    bounds = {"link": link, "compute": compute or 0.0, "launches": launch}
    return max(bounds, key=lambda name: bounds[name])


def streamed_bytes(
    weights: Weights, run: RunSettings, *, resident: Collection[int] = frozenset()
) -> int:
    """Return the bytes that one micro-batch copies to the device.

    Every layer that streams comes twice and the head once. At the turn the last layers are still
    in their slots, unless the head took their place; between steps the first ones stay.

    Args:
        weights: the model's.
        run: the run.
        resident: layers that a budget keeps on the device.
    """
    forward, backward = _layers_streamed(weights, run, resident)
    return forward + backward + weights.head_bytes


def _layers_streamed(
    weights: Weights, run: RunSettings, resident: Collection[int]
) -> tuple[int, int]:
    """Return the bytes of layers that a forward copies, and a backward with what it leaves for the
    next forward."""
    every = weights.layer_bytes(run.precision)
    sizes = [nbytes for layer, nbytes in enumerate(every) if layer not in resident]
    regions = arena_of(weights, run, resident=resident)
    turn = range(max(0, len(sizes) - regions.slots), len(sizes))
    head = regions.head
    stay = sum(sizes[n] for n in turn if head is None or not regions.layers[n].overlaps(head))
    first = sum(sizes[: min(_KEPT, regions.slots)])
    return sum(sizes) - first, sum(sizes) - stay


def step_time(
    weights: Weights,
    run: RunSettings,
    rates: Rates,
    *,
    resident: Collection[int] = frozenset(),
) -> StepTime:
    """Return how long an optimizer step takes.

    Args:
        weights: the model's.
        run: the run.
        rates: how fast the machine is.
        resident: layers that a budget keeps on the device.
    """
    forward, backward = _layers_streamed(weights, run, resident)
    state = 8 * weights.adapter_count(run.rank) if run.optimizer_state == "host" else 0
    layers = len(weights.layers)
    launch = 0.0 if run.graphs else layers * rates.launch
    computed = _compute(weights, run, rates)
    ring = None if run.host == "pinned" else rates.ring
    rate = min(rates.link, ring or rates.link)
    phases = (
        Phase(
            name="forward",
            link=forward / rate,
            compute=computed and computed[0],
            launch=launch / 3,
            overlap=-(-layers // run.block_size),
        ),
        Phase(name="head", link=weights.head_bytes / rates.link, compute=computed and computed[1]),
        Phase(
            name="backward",
            link=backward / rate,
            compute=computed and computed[2],
            launch=launch * 2 / 3,
            overlap=-(-layers // run.block_size),
        ),
    )
    streamed = forward + weights.head_bytes + backward
    return StepTime(
        phases=phases,
        accumulate=run.accumulate,
        optimizer=2 * state / rates.link,
        beside=run.accumulate * rates.beside
        + (0.0 if run.fused else weights.adapter_tensors * rates.optimizer),
        streamed=run.accumulate * streamed + state,
        rate=rate,
    )


def _compute(weights: Weights, run: RunSettings, rates: Rates) -> tuple[float, float, float] | None:
    """Return what the kernels of forward, head and backward take; None if it is not known.

    A matrix takes two operations for each of its numbers and tokens in the forward, as many when
    that is repeated, and as many for the gradient of its input; each time it is dequantised first.
    Of attention only the causal half counts, and its backward is two and a half times its forward.
    The backward of linear attention, with its repetition, is three times its forward.
    """
    if rates.compute is None:
        return None
    matrices = sum(w.count for layer in weights.layers for w in layer if w.linear)
    queries = sum(
        w.shape[0] for layer in weights.layers for w in layer if w.name.endswith("q_proj.weight")
    )
    linear = sum(any(LINEAR_ATTENTION in w.name for w in layer) for layer in weights.layers)
    products = 2 * matrices * run.tokens / rates.compute
    attention = 2 * queries * run.tokens * run.seq_len / rates.compute
    norms = sum("norm" in w.name.split(".")[-2] for layer in weights.layers for w in layer)
    fixed = len(weights.layers) * rates.kernels + norms * rates.norm
    fixed += matrices / rates.dequantise if run.precision == "nf4" else 0.0
    recurrent = rates.linear_attention / 4 * run.tokens * linear
    return (
        products + attention + fixed + recurrent,
        4 * weights.head.count * run.tokens / rates.compute,
        2 * products + 3.5 * attention + 2 * fixed + 3 * recurrent,
    )
