"""How long a step takes: as long as the slowest of link, GPU and launches, and what is beside.

[Note: Step time]
A block's copy and the kernels of other blocks run at the same time, so of link and compute the
slower one sets the pace. Without CUDA graphs the host launches some 700 kernels a layer, which is a
third bound. What does not overlap is the loss, the optimizer and the ends of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import frozen

from poros_core.planner.memory import arena_of
from poros_core.planner.settings import RunSettings
from poros_core.planner.weights import LINEAR_ATTENTION, Weights

__all__ = ["ASSUMED_LINK", "CARDS", "Rates", "StepTime", "step_time", "streamed_bytes"]

ASSUMED_LINK = 25e9
"""Bytes a second over PCIe 4 x16 from page-locked memory, where nothing is said or measured."""
_KEPT = 2
"""Layers that stay on the device between steps; as in ``poros_runtimes.streamed.units``."""


@frozen(kw_only=True)
class Rates:
    """How fast a machine is.

    Attributes:
        link: bytes a second from page-locked host memory to the device.
        compute: floating-point operations a second that a step's kernels reach, or None if that
            is not known.
        linear_attention: seconds for each token and layer of linear attention beyond its matrix
            products.
        launch: seconds in which the host launches a layer's kernels one by one, both ways.
        beside: seconds of a micro-batch beside its layers.
        source: where the figures are from.
    """

    link: float
    compute: float | None = None
    linear_attention: float = 0.0
    launch: float = 0.0
    beside: float = 0.0
    source: str = ""


CARDS: Mapping[str, Rates] = {
    "h200": Rates(
        link=55.4e9,
        compute=330e12,
        linear_attention=1.3e-5,
        launch=0.017,
        beside=0.05,
        source="measured on an H200 (PCIe 5 x16)",
    )
}
"""Rates by card. Compute is that of Qwen2.5 32B at 2048 and 4096 tokens with checkpointing; launch
that of eager steps at 512 tokens; the rest is fitted to the committed records."""


@frozen(kw_only=True)
class StepTime:
    """Seconds of an optimizer step; see [Note: Step time].

    Attributes:
        link: what the copies take.
        compute: what the kernels take, or None if the GPU's rate is not known.
        launch: what launching takes, where blocks are not captured as graphs.
        beside: what does not overlap.
        streamed: bytes that the copies of one step move to the device.
    """

    link: float
    compute: float | None
    launch: float
    beside: float
    streamed: int

    @property
    def seconds(self) -> float:
        """All of it; a lower bound where the GPU's rate is not known."""
        return max(self.link, self.compute or 0.0, self.launch) + self.beside

    @property
    def bound(self) -> str:
        """What sets the pace: ``"link"``, ``"compute"`` or ``"launches"``."""
        bounds = {"link": self.link, "compute": self.compute or 0.0, "launches": self.launch}
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
    every = weights.layer_bytes(run.precision)
    sizes = [nbytes for layer, nbytes in enumerate(every) if layer not in resident]
    regions = arena_of(weights, run, resident=resident)
    turn = range(max(0, len(sizes) - regions.slots), len(sizes))
    head = regions.head
    stay = {n for n in turn if head is None or not regions.layers[n].overlaps(head)}
    first = range(min(_KEPT, regions.slots, len(sizes)))
    once = sum(sizes[n] for n in stay) + sum(sizes[n] for n in first)
    return 2 * sum(sizes) - once + weights.head_bytes


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
    streamed = run.accumulate * streamed_bytes(weights, run, resident=resident)
    state = 8 * weights.adapter_count(run.rank) if run.optimizer_state == "host" else 0
    layers = len(weights.layers)
    return StepTime(
        link=(streamed + 2 * state) / rates.link,
        compute=None if rates.compute is None else run.accumulate * _compute(weights, run, rates),
        launch=0.0 if run.graphs else run.accumulate * layers * rates.launch,
        beside=run.accumulate * rates.beside,
        streamed=streamed + state,
    )


def _compute(weights: Weights, run: RunSettings, rates: Rates) -> float:
    """Two operations for each number of a matrix and token, in the forward, its repetition and the
    gradient of its input; of the head without the repetition; and the causal half of attention,
    whose backward is two and a half times its forward."""
    assert rates.compute is not None
    matrices = sum(w.count for layer in weights.layers for w in layer if w.linear)
    queries = sum(
        w.shape[0] for layer in weights.layers for w in layer if w.name.endswith("q_proj.weight")
    )
    operations = (
        6 * matrices * run.tokens
        + 4 * weights.head.count * run.tokens
        + 4.5 * 2 * queries * run.tokens * run.seq_len
    )
    linear = sum(any(LINEAR_ATTENTION in w.name for w in layer) for layer in weights.layers)
    return operations / rates.compute + rates.linear_attention * run.tokens * linear
