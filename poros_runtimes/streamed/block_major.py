"""The micro-batches of one optimizer step, block by block: the base streams twice a step.

[Note: Block-major order]
An ordinary loop takes one micro-batch after the other through all blocks. Here each block takes all
micro-batches while its units are bound: first to last block in the forward, last to first in the
backward, and within a block the first micro-batch first. Between the two, with the head bound once,
one micro-batch after the other computes its loss and the gradient of the decoder's output, so that
there are never two of them with logits.

A parameter adds up its gradients in the order of the ordinary loop, one sum per micro-batch, as
long as all its uses are in one place: in one block, after the blocks, or before them. One that has
uses in two is refused, since its sums would be added up in another order. So is everything random:
a generator's numbers would come to other micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from poros_core.call_state import rng_state
from poros_core.errors import StateError
from poros_core.workspaces import drop_workspaces
from poros_runtimes.streamed.attach import checkpointing_off
from poros_runtimes.streamed.block import Block
from poros_runtimes.streamed.cuts import Cut, leaves_below
from poros_runtimes.streamed.micro_batch import ORDINARY, AtBlock, AtEnd, MicroBatch
from poros_runtimes.streamed.units import Units

__all__ = ["BlockMajor"]


@define(eq=False)
class _Wave:
    """One block, with the cuts around it of every micro-batch that went through it."""

    block: Block
    cuts: list[Cut] = field(factory=list, repr=False)

    def backward(self) -> None:
        """Differentiate the block for every micro-batch, the first one first."""
        wanted = [cut for cut in self.cuts if cut.wanted]
        self.cuts.clear()
        if not wanted:
            return
        with self.block.holding(self.block.layers, backward=True):
            for cut in wanted:
                cut.backward()


class BlockMajor:
    """Runs one optimizer step's micro-batches; see [Note: Block-major order]."""

    def __init__(
        self,
        parts: Sequence[MicroBatch],
        *,
        units: Units,
        model: nn.Module,
        layers: Sequence[nn.Module],
        mark: Callable[[int], None],
    ) -> None:
        """Take over micro-batches that have not started.

        Args:
            parts: the micro-batches, in order.
            units: the model's.
            model: the model, to name its parameters.
            layers: its decoder layers.
            mark: called once all have begun, with how many tokens they have.
        """
        self._parts = parts
        self._units = units
        self._model = model
        self._layers = layers
        self._mark = mark
        self._waves: list[_Wave] = []
        self._places: Any = WeakTensorKeyDictionary()
        self._rng = rng_state(units.device)

    def run(self, *, scale: float | None) -> list[torch.Tensor]:
        """Accumulate the gradients; return the losses, unscaled and detached.

        Args:
            scale: of each loss; None divides it by the number of micro-batches.

        Raises:
            StateError: something was random, or cannot be added up in the ordinary order.
        """
        try:
            # for all of them: one that is ahead would turn it on again for the others
            with checkpointing_off(self._layers):
                self._forward()
                losses = [self._loss_of(part, scale) for part in self._parts]
            self._backward()
            return losses
        finally:
            for part in self._parts:
                part.close()

    def _forward(self) -> None:
        """Take all micro-batches to the end of the decoder."""
        for part in self._parts:
            part.start()
            self._drop_workspaces()
        self._mark(sum(part.tokens for part in self._parts))
        while blocks := {
            id(part.asked.block): part.asked.block
            for part in self._parts
            if isinstance(part.asked, AtBlock)
        }:
            wave = _Wave(min(blocks.values(), key=lambda block: block.layers.start))
            wave.block.refresh()
            self._claim((param for _, _, param in wave.block.trainable()), place=wave)
            with wave.block.holding(wave.block.layers, backward=False):
                for part in self._parts:
                    if isinstance(part.asked, AtBlock) and part.asked.block is wave.block:
                        part.through(wave.cuts)
            self._waves.append(wave)
        for part in self._parts:
            self._claim(part.entry.leaves.values(), place="before")
            part.entry.leaves.clear()
        for part in self._parts:
            if isinstance(part.asked, AtEnd):
                with part.asked.ambient.entered(self._units.device):
                    self._units.end_forward(part.asked.token, backward=part.asked.backward)

    def _loss_of(self, part: MicroBatch, scale: float | None) -> torch.Tensor:
        """Compute a micro-batch's loss, and go back from it to the blocks."""
        loss = part.finish()
        found = loss.detach()
        scaled = loss / len(self._parts) if scale is None else loss * scale
        self._refuse_random()
        if scaled.requires_grad:
            below = leaves_below([get_gradient_edge(scaled)])
            self._claim(below.leaves.values(), place="after")
            del below
        scaled.backward()  # type: ignore[no-untyped-call]
        self._drop_workspaces()
        return found

    def _drop_workspaces(self) -> None:
        """Free what cuBLAS took in a routine: it keeps a workspace for each thread."""
        if self._units.device.type == "cuda":
            drop_workspaces()

    def _backward(self) -> None:
        """Go back through the blocks, and on to what was before them."""
        if self._units.activations is not None:
            tokens = [part.token for part in self._parts]
            self._units.activations.interleave([token for token in tokens if token is not None])
        while self._waves:
            self._waves.pop().backward()
        for part in self._parts:
            part.entry.backward()

    def _claim(self, leaves: Iterable[torch.Tensor], *, place: object) -> None:
        """Note where leaves are used.

        Raises:
            StateError: one of them is used elsewhere too.
        """
        for leaf in leaves:
            found: object = self._places.get(leaf)
            self._places[leaf] = place
            if found not in (None, place):
                names = (name for name, p in self._model.named_parameters() if p is leaf)
                raise StateError(
                    f"'{next(names, 'A tensor')}' trains, and is used in more than one of: before "
                    "the decoder's blocks, each block, after them. Block by block its gradients "
                    f"would not be added in the order of an ordinary loop. {ORDINARY}"
                )

    def _refuse_random(self) -> None:
        now = rng_state(self._units.device)
        if all(torch.equal(found, state) for found, state in zip(now, self._rng, strict=True)):
            return
        raise StateError(
            "Random numbers were drawn in the forward. Block by block they come to other "
            "micro-batches than in an ordinary loop, so no bits could be promised. Turn off "
            f"whatever draws them, such as dropout or noise on embeddings. {ORDINARY}"
        )
