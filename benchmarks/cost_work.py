"""What one measurement of training's cost works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, evolve, field, frozen
from cost_texts import WEIGHTS, WEIGHTS_CHECKPOINT, WEIGHTS_ROLLED

from poros_core.gate.options import GateOptions, Subject, subject_of

METHODS = ("poros", "peft", "peft-checkpointing", "accelerate-offload", "unsloth")
CARD = "card"
_SHARING = ("poros", "peft", "peft-checkpointing")
_LARGEST_ON_DISK = 16e9


@frozen(kw_only=True)
class Work:
    """What one process measures.

    Attributes:
        method: one of ``METHODS``.
        family: the family of the shape.
        shape: a shape of the family.
        layers: decoder layers, instead of the shape's own number.
        precision: of the base, ``"nf4"`` or ``"bf16"``.
        seq_len: tokens a sequence; None means 32 for a tiny shape, else 512.
        batch: sequences a step; None means 2 for a tiny shape, else 1.
        rank: LoRA rank; None means 4 for a tiny shape, else 16.
        dropout: of LoRA.
        steps: steps that are timed.
        warmup: steps before them, in which graphs are captured.
        seed: of weights, adapters, tokens and dropout.
        optimizer_state: ``"device"``, or ``"host"`` between steps.
        graphs: Poros' setting.
        block_size: Poros' setting.
        vram_budget: Poros' setting: None, bytes, or text such as ``"16GB"`` or ``"auto"``;
            ``"card"`` is what an emulated card leaves to the allocator.
        offload_activations: Poros' setting.
        prepare: further settings of ``poros.prepare``.
        chunk: tokens of a chunk of the loss; None means the model's own loss.
        data: a file of tokenised records, trained on with HF Trainer; None means random tokens in
            a plain loop.
        profiled: steps under a profiler, after those that are timed.
        pad_to: pad a batch of records to a multiple of so many tokens.
        nan_filter: Trainer's ``logging_nan_inf_filter``, which waits for the device after every
            backward to look at the loss.
        direct: draw weights in place, without a checkpoint; None means for shapes whose bf16
            checkpoint is larger than 16 GB.
        weights: of a checkpoint: ``"drawn"`` and stored in bf16, or quantised, most layers a
            ``"rolled"`` copy of a drawn one, for shapes whose bf16 checkpoint fits nowhere.
        cap_bytes: emulate a card of that size.
        cap_reserve_bytes: of it, for graphs and for kernels that are loaded later.
    """

    method: str
    shape: str
    family: str = "qwen2"
    layers: int | None = None
    precision: str = "nf4"
    seq_len: int | None = None
    batch: int | None = None
    rank: int | None = None
    dropout: float = 0.05
    steps: int = 20
    warmup: int = 5
    seed: int = 0
    optimizer_state: Literal["device", "host"] = "device"
    graphs: Literal["auto", "on", "off"] = "auto"
    block_size: int | Literal["all"] = 1
    vram_budget: int | str | None = None
    offload_activations: bool = False
    prepare: Mapping[str, Any] = field(factory=dict)
    chunk: int | None = None
    data: str | None = None
    pad_to: int | None = None
    nan_filter: bool = True
    profiled: int = 0
    direct: bool | None = None
    weights: Literal["drawn", "rolled"] = "drawn"
    cap_bytes: int | None = None
    cap_reserve_bytes: int = 600_000_000

    @property
    def kind(self) -> str:
        """The kind of the record."""
        if self.data is not None:
            return "real-loop"
        return "step-profile" if self.profiled else "training-cost"

    def subject(self) -> Subject:
        """Settle defaults, and the config with ``layers`` in it."""
        asked = GateOptions(
            family=self.family,
            shape=self.shape,
            seq_len=self.seq_len,
            batch=self.batch,
            rank=self.rank,
            dropout=self.dropout,
            precision=self.precision,
        )
        found = subject_of(asked)
        if self.layers is None:
            return found
        return evolve(found, config={**found.config, "num_hidden_layers": self.layers})

    def draws_directly(self) -> bool:
        """Whether weights are drawn in place."""
        if self.weights == "rolled":
            return False
        return bf16_bytes(self.subject()) > _LARGEST_ON_DISK if self.direct is None else self.direct

    def settings(self) -> dict[str, Any]:
        """Return what a record says of how the method was set."""
        common: dict[str, Any] = {"optimizer_state": self.optimizer_state, "loss_chunk": self.chunk}
        if self.data is not None:
            common["pad_to_multiple_of"] = self.pad_to
            common["logging_nan_inf_filter"] = self.nan_filter
        if self.method == "poros":
            common |= {
                "block_size": self.block_size,
                "vram_budget": self.vram_budget,
                "graphs": self.graphs,
                "offload_activations": self.offload_activations,
                **self.prepare,
            }
        if self.cap_bytes is not None:
            common |= {"cap_bytes": self.cap_bytes, "cap_reserve_bytes": self.cap_reserve_bytes}
        return common


def bf16_bytes(subject: Subject) -> int:
    """Return roughly what a checkpoint in bf16 takes."""
    text = subject.text_config
    hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    per_head = text.get("head_dim") or hidden // int(text["num_attention_heads"])
    heads = int(text["num_attention_heads"]) + int(text["num_key_value_heads"])
    attention = 2 * hidden * int(per_head) * heads
    layer = attention + 3 * hidden * int(text["intermediate_size"])
    tables = (1 if text.get("tie_word_embeddings") else 2) * subject.vocabulary * hidden
    return 2 * (layers * layer + tables)


def described(work: Work) -> dict[str, Any]:
    """Return what a record says of the work itself."""
    subject = work.subject()
    return {
        "kind": work.kind,
        "method": work.method,
        "family": subject.family.name,
        "shape": subject.shape,
        "layers": int(subject.text_config["num_hidden_layers"]),
        "precision": work.precision,
        "seq_len": subject.seq_len,
        "batch": subject.batch,
        "rank": subject.rank,
        "dropout": work.dropout,
        "seed": work.seed,
        "steps": work.steps,
        "warmup": work.warmup,
        "settings": work.settings(),
        "data": None if work.data is None else Path(work.data).name,
        "weights": _weights(work),
    }


def _weights(work: Work) -> str:
    if work.draws_directly():
        return WEIGHTS
    return WEIGHTS_ROLLED if work.weights == "rolled" else WEIGHTS_CHECKPOINT


def groups(todo: Sequence[Work], *, shared: bool) -> list[list[Work]]:
    """Return the works that one process measures, one after the other.

    With ``shared``, works whose base is the same go together. A card is emulated in a process of
    its own all the same, a profiler stays in its process, and peers leave a base as they found it
    only where nothing hooks it.
    """
    found: dict[object, list[Work]] = {}
    for number, work in enumerate(todo):
        alone = not shared or work.cap_bytes is not None or work.profiled
        alone = alone or work.method not in _SHARING
        base = (work.method, work.family, work.shape, work.layers, work.precision, work.seed)
        found.setdefault(number if alone else (*base, work.direct, work.weights), []).append(work)
    return list(found.values())


def as_plain(work: Work) -> dict[str, Any]:
    """Return the work as plain data, for the process that measures it."""
    return asdict(work)
