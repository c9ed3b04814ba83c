"""How much memory a run takes, by arithmetic.

[Note: Where the peak is]
Device memory is highest at one of three moments. *Loss*: the logits exist in bf16 and three times
in float32 (the logits, their softmax, their gradient), the boundaries of all blocks are kept, and
the head is in the arena. *Backward*: a block is recomputed with all that its backward needs, while
boundaries give way to gradients. *Optimizer*: gradients, AdamW's two tensors and, unless it is
fused, one temporary are there, and nothing of the forward. At a few hundred tokens it is the loss.

[Note: What graphs add]
Slots and head take turns in one arena, and while layers compute, graphs keep their temporaries in
what the head has beyond the slots. Only what does not fit there takes memory of its own, and keeps
it, since a graph's addresses are fixed. Before they are captured, in the first step or two, a
block's temporaries lie there too, but in pieces. How much lies between pieces depends on one layer
of a block, not on how many it has. In the first optimizer step the state comes into
being, on the device also where it is to be on the host: that is the peak where nothing else is
large.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs
from attrs import frozen

from poros_core.planner.settings import RunSettings
from poros_core.planner.weights import LINEAR_ATTENTION, Weight, Weights
from poros_core.schedule import Regions

__all__ = [
    "CONTEXT_BYTES",
    "Memory",
    "arena_of",
    "block_workspace",
    "device_memory",
    "host_memory",
    "more_graphs",
    "resident_memory",
]

CONTEXT_BYTES = 800_000_000
"""What the driver takes for a process with a CUDA context, libraries and loaded kernels: its figure
less reserved memory of a plain run without graphs, in the cost records of an H200."""
_GRAPHS_BYTES = 40_000_000
_GRAPH_BYTES = 650_000
"""Driver memory that captured graphs take beside that, all of them and each; a layer has two, alone
or in a larger block. Fitted to the cost records."""
_MORE = 3
_COUNTED_BYTES = 1_200_000
"""Signatures beyond the first whose graphs a budget counts, and what it counts for each graph; as
in ``poros_runtimes.streamed``. A test holds them together."""
_CUBLAS_BYTES = 8 * 4096 * 1024
"""cuBLAS's workspace under ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` (cuBLAS documentation)."""
_SLACK = 0.115
"""What the allocator reserves beyond what is allocated and what a loop holds, as a share of all but
the arena and what a block works in: 2 to 11 % in the cost records."""
_POOL = 0.4
"""What graphs reserve outside of the arena beyond what a block needs there, as a share of one
layer's part of it. Fitted to the cost records at 2048 and 4096 tokens."""
_BLOCK = 1.4
"""The same where the backward of a block is the peak: fitted to the cost records of blocks of 4, 8
and 16 layers."""
_EAGER = 1.45
"""The same for the backward of a block that is not captured yet: 1.3 and 1.4 where all of it was
outside of the arena."""
_RING = 3
"""Buffers of the ring; as in ``poros_core.ring``, which needs torch. A test holds them together."""
_ADAM, _FLOAT, _HALF = 8, 4, 2
_LOGITS = 3 * _FLOAT + _HALF
"""Bytes a logit takes at the loss; see [Note: Where the peak is]."""
_LINEAR_ATTENTION = 10 * _FLOAT
"""Bytes that Transformers' own gated delta rule keeps for each output of its widest projection: ten
tensors in float32, fitted to the record of Qwen3.5 4B."""
_SOFTCAP = 2 * _HALF
"""And with a soft cap on the logits: its argument and its result."""


@frozen(kw_only=True)
class Memory:
    """Device memory of a run at its peak, in bytes.

    Attributes:
        moment: ``"loss"``, ``"backward"`` or ``"optimizer"``; see [Note: Where the peak is].
        components: what is allocated then, by name.
        slots: what layers take of the arena.
        head: what the head takes of it, at another time.
        graph_workspace: what graphs hold outside the arena beside ``components``; see
            [Note: What graphs add].
        graphs: what the driver takes for captured graphs.
        held: logits of the step before, which a loop that keeps its outputs in a variable holds
            until the next forward returns: beside new ones, though not at the peak.
        first: what the allocator holds in the first steps, before graphs are captured.
    """

    moment: str
    components: Mapping[str, int]
    slots: int
    head: int
    graph_workspace: int
    graphs: int
    held: int = 0
    first: int = 0

    @property
    def allocated(self) -> int:
        """The allocator's peak."""
        return sum(self.components.values())

    @property
    def gaps(self) -> int:
        """What the allocator holds beyond what is allocated and what graphs hold."""
        apart = self.components.get("arena", 0) + self.components.get("workspace", 0)
        return round(_SLACK * (self.allocated - apart))

    @property
    def reserved(self) -> int:
        """What the allocator holds at the peak."""
        return max(self.first, self.allocated + self.graph_workspace + self.held + self.gaps)

    @property
    def device(self) -> int:
        """What the card must have: the driver's figure, context and graphs included."""
        return self.reserved + self.graphs + CONTEXT_BYTES


def device_memory(weights: Weights, run: RunSettings, *, softcap: bool = False) -> Memory:
    """Return the device memory of a streamed run.

    Args:
        weights: the model's.
        run: the run.
        softcap: whether the model caps its logits.
    """
    regions = arena_of(weights, run)
    blocks = _blocks(weights, run)
    workspace = block_workspace(weights, run)
    kept = blocks * _boundary(weights, run)
    moments = _moments(weights, run, boundaries=kept, arena=regions.size, softcap=softcap)
    standing = {"arena": regions.size, **_standing(weights, run)}
    # the first step captures nothing yet, and AdamW has no state then
    captured = standing["optimizer"] if run.graphs else 0
    room = regions.size - regions.slot_bytes
    outside = max(0, workspace - room) if run.graphs else 0
    moments["backward"]["workspace"] = max(outside, workspace - captured)
    moment = max(moments, key=lambda name: sum((standing | moments[name]).values()))
    held = _HALF * run.tokens * weights.vocabulary if run.loss_chunk is None else 0
    gradients = _FLOAT * weights.adapter_count(run.rank)
    before = sum(standing.values()) - standing["optimizer"] + gradients + held
    made = round((1 + _SLACK) * _ADAM * weights.adapter_count(run.rank))
    if run.optimizer_state == "host":  # the arena stands aside while the state comes into being
        made -= regions.size
    pieces = min(outside, block_workspace(weights, attrs.evolve(run, block_size=1)))
    pool = outside + _POOL * pieces if moment != "backward" else _BLOCK * pieces
    return Memory(
        moment=moment,
        components={k: v for k, v in (standing | moments[moment]).items() if v},
        slots=regions.slot_bytes,
        head=weights.head_bytes,
        graph_workspace=round(pool),
        graphs=_GRAPHS_BYTES + 2 * len(weights.layers) * _GRAPH_BYTES if run.graphs else 0,
        held=held,
        first=before + max(made, round(outside + _EAGER * pieces)) if run.graphs else 0,
    )


def resident_memory(
    weights: Weights, run: RunSettings, *, checkpointing: bool, softcap: bool = False
) -> Memory:
    """Return the device memory of an ordinary run whose base is on the device.

    Args:
        weights: the model's.
        run: the run; what only streaming has is not looked at.
        checkpointing: whether layers are recomputed in the backward.
        softcap: whether the model caps its logits.
    """
    run = attrs.evolve(run, block_size=1, graphs=False, optimizer_state="device")
    base = sum(weights.layer_bytes(run.precision)) + weights.head_bytes + weights.table_bytes
    count = len(weights.layers)
    kept = sum(_saved(layer, weights, run) for layer in weights.layers)
    boundaries = count * _boundary(weights, run) if checkpointing else kept
    moments = _moments(weights, run, boundaries=boundaries, arena=0, softcap=softcap)
    if checkpointing:
        moments["backward"]["workspace"] = block_workspace(weights, run)
    standing = {"base": base, **_standing(weights, run)}
    standing["cuBLAS"] *= 2  # of forward and backward; a streamed run drops both before the loss
    moment = max(moments, key=lambda name: sum((standing | moments[name]).values()))
    components = {k: v for k, v in (standing | moments[moment]).items() if v}
    if not checkpointing and "boundaries" in components:
        components["activations"] = components.pop("boundaries")
    return Memory(
        moment=moment, components=components, slots=0, head=0, graph_workspace=0, graphs=0
    )


def more_graphs(run: RunSettings, *, layers: int) -> int:
    """Return what a budget sets aside for graphs of lengths beyond the first, in bytes."""
    return _MORE * 2 * layers * _COUNTED_BYTES if run.graphs else 0


def host_memory(weights: Weights, run: RunSettings) -> dict[str, int]:
    """Return what a streamed run takes of host memory, by name, in bytes. Layers that stand in
    files are copied through a ring of page-locked buffers."""
    layers = weights.layer_bytes(run.precision)
    state = _ADAM * weights.adapter_count(run.rank) if run.optimizer_state == "host" else 0
    found = {
        "layers": sum(layers) if run.host != "mmap" else 0,
        "ring": _RING * max(layers) if run.host != "pinned" else 0,
        "head": weights.head_bytes,
        "tables": weights.table_bytes,
        "optimizer": state,
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def block_workspace(weights: Weights, run: RunSettings) -> int:
    """Return what the backward of the largest block needs beside its weights, in bytes.

    That is what its layers save, the dequantised copy of the largest matrix, and the gradients on
    their way through the widest linear layer.
    """
    size = run.block_size
    saved = [_saved(layer, weights, run) for layer in weights.layers]
    blocks = [sum(saved[start : start + size]) for start in range(0, len(saved), size)]
    matrices = [w for layer in weights.layers for w in layer if w.linear]
    widest = max(max(w.shape) for w in matrices)
    dequantised = 0 if run.precision == "bf16" else _HALF * max(w.count for w in matrices)
    return max(blocks) + dequantised + run.tokens * widest * (2 * _FLOAT)


def _saved(layer: Iterable[Weight], weights: Weights, run: RunSettings) -> int:
    """Return what a layer's forward saves for its backward, in bytes.

    Every linear layer's adapter saves its input after dropout in float32, and the mask; outputs
    are saved once in bf16 by what reads them; the MLP's product once more; and each of two norms
    saves its input in float32, as norms of queries and keys do.
    """
    layer = tuple(layer)
    names = {w.name for w in layer}
    matrices = [w for w in layer if w.linear]
    normed = [w.shape[0] for w in matrices if w.name.replace("_proj.", "_norm.") in names]
    inputs = sum(w.shape[1] for w in matrices)
    outputs = sum(w.shape[0] for w in matrices)
    widest = max(max(w.shape) for w in matrices)
    per_token = (_FLOAT + 1) * inputs + _HALF * outputs + _HALF * widest
    per_token += _FLOAT * (2 * weights.hidden + sum(normed))
    linear = [w.shape[0] for w in matrices if LINEAR_ATTENTION in w.name]
    per_token += _LINEAR_ATTENTION * max(linear, default=0)
    return run.tokens * per_token


def _standing(weights: Weights, run: RunSettings) -> dict[str, int]:
    adapters = weights.adapter_count(run.rank)
    return {
        "adapters": _FLOAT * adapters,
        "optimizer": _ADAM * adapters if run.optimizer_state == "device" else 0,
        "on the device": weights.rest_bytes(run.precision),
        "cuBLAS": _CUBLAS_BYTES,
    }


def _moments(
    weights: Weights, run: RunSettings, *, boundaries: int, arena: int, softcap: bool
) -> dict[str, dict[str, int]]:
    """Return what each moment has beside what always stands there. State that comes from the host
    for the optimizer's step is put into the arena, if it fits there."""
    adapters = weights.adapter_count(run.rank)
    gradients = _FLOAT * adapters
    collected = gradients if run.accumulate > 1 else 0
    logit = _LOGITS + (_SOFTCAP if softcap else 0)
    lent = run.optimizer_state == "host" and _ADAM * adapters <= arena
    start = {"boundaries": boundaries, "gradients": collected}
    return {
        "loss": {**start, "logits": run.tokens_with_logits * weights.vocabulary * logit},
        "backward": start if sum(start.values()) > gradients else {"gradients": gradients},
        "optimizer": {
            "optimizer": 0 if lent else _ADAM * adapters,
            "gradients": gradients,
            "AdamW's temporary": 0 if run.fused else gradients,
        },
    }


def _boundary(weights: Weights, run: RunSettings) -> int:
    return _HALF * run.tokens * weights.hidden


def _blocks(weights: Weights, run: RunSettings) -> int:
    return -(-len(weights.layers) // run.block_size)


def arena_of(
    weights: Weights, run: RunSettings, *, resident: Collection[int] = frozenset()
) -> Regions:
    """Return the regions of the arena: slots of the layers that stream, and head."""
    sizes = weights.layer_bytes(run.precision)
    return Regions.lay_out(
        [nbytes for layer, nbytes in enumerate(sizes) if layer not in resident],
        slots=max(2, 2 * run.block_size),
        head_bytes=weights.head_bytes,
    )
