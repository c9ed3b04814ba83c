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
from typing import Any, cast

import torch
from attrs import define, field, frozen
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from poros_core.call_state import rng_state
from poros_core.errors import StateError
from poros_runtimes.streamed.arena import drop_workspaces
from poros_runtimes.streamed.attach import checkpointing_off
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.block import Block
from poros_runtimes.streamed.boundary import BlockResult
from poros_runtimes.streamed.cuts import Cut, Entry, leaves_below
from poros_runtimes.streamed.routine import Ambient, Routine
from poros_runtimes.streamed.units import Units

__all__ = ["BlockMajor", "MicroBatch"]

_ORDINARY = "Use the ordinary loop: (model(**batch).loss * scale).backward() for each micro-batch."


@frozen(eq=False)
class _AtBlock:
    """A micro-batch has come to a block, and asks for what leaves it."""

    block: Block
    run: Callable[[Cut], BlockResult] = field(repr=False)
    ambient: Ambient


@frozen(eq=False)
class _AtEnd:
    """A micro-batch has been through all blocks, and asks for the head."""

    token: BackwardToken
    backward: bool
    ambient: Ambient


class MicroBatch:
    """One micro-batch: its loss as a routine, and where its graph was cut.

    The first methods are for its routine, in which the model's forward runs; the others for the
    caller, who has all micro-batches.
    """

    def __init__(
        self,
        loss: Callable[[MicroBatch], torch.Tensor],
        *,
        number: int,
        device: torch.device,
    ) -> None:
        """Make a micro-batch whose forward has not started.

        Args:
            loss: computes its loss; called with this micro-batch in its routine.
            number: its place in the step.
            device: the compute device.
        """
        self.tokens = 0
        self.entry = Entry()
        self.asked: _AtBlock | _AtEnd | None = None
        self._loss: torch.Tensor | None = None
        self.token: BackwardToken | None = None
        self._device = device
        name = f"poros micro-batch {number}"
        self._routine = Routine(lambda: loss(self), device=device, name=name)

    # -- in its routine ------------------------------------------------------------------------

    def begin(self, token: BackwardToken, *, tokens: int) -> None:
        """The decoder's forward begins.

        Args:
            token: the call's.
            tokens: of its batch.

        Raises:
            StateError: it is the second.
        """
        if self.token is not None:
            raise StateError(
                "The loss of one micro-batch calls the model twice with gradients, and "
                "poros.accumulate() takes one such call for each. Put calls that need no "
                f"gradients under torch.no_grad(). {_ORDINARY}"
            )
        self.token, self.tokens = token, tokens

    def at_block(self, block: Block, run: Callable[[Cut], BlockResult]) -> BlockResult:
        """Wait until the other micro-batches are there too; return what leaves the block.

        Args:
            block: the block.
            run: runs it for this micro-batch, given its cuts.
        """
        asked = _AtBlock(block, run, Ambient.of_this_thread(self._device))
        del run
        return cast(BlockResult, self._routine.ask(asked))

    def at_end(self, *, backward: bool) -> None:
        """Wait until the other micro-batches are through all blocks and the head is bound.

        Args:
            backward: whether a backward will come to the decoder's output.
        """
        assert self.token is not None
        self._routine.ask(_AtEnd(self.token, backward, Ambient.of_this_thread(self._device)))

    # -- for the caller ------------------------------------------------------------------------

    def start(self) -> None:
        """Go to the first block."""
        self._go_on()

    def through(self, wave: _Wave) -> None:
        """Compute the block that it has come to, and go on to the next, or the end."""
        asked, self.asked = self.asked, None
        assert isinstance(asked, _AtBlock)
        cut = Cut(self.entry)
        try:
            with asked.ambient.entered(self._device):
                result = asked.run(cut)
        except Exception as error:
            self._go_on(error=error)  # as if the model had raised it
            return
        del asked
        wave.cuts.append(cut)
        self._go_on(result)

    def finish(self) -> torch.Tensor:
        """Compute the loss, now that the head is bound."""
        if isinstance(self.asked, _AtEnd):
            self._go_on()
        loss, self._loss = self._loss, None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            said = "nothing" if loss is None else f"a {type(loss).__name__}"
            raise StateError(
                f"The loss of a micro-batch must be a tensor of one element; got {said}. Give "
                "each micro-batch labels, or poros.accumulate() a loss=."
            )
        return loss

    def close(self) -> None:
        """End its routine, wherever it stands; no backward of it will come any more."""
        self._routine.close()
        if self.token is not None:
            self.token.drop()

    def _go_on(self, reply: Any = None, *, error: BaseException | None = None) -> None:
        try:
            said = self._routine.resume(reply, error=error)
        finally:
            del reply, error
        if self._routine.ended:
            self._loss, self.asked = said, None
        else:
            self.asked = said


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
            if isinstance(part.asked, _AtBlock)
        }:
            wave = _Wave(min(blocks.values(), key=lambda block: block.layers.start))
            wave.block.refresh()
            self._claim((param for _, _, param in wave.block.trainable()), place=wave)
            with wave.block.holding(wave.block.layers, backward=False):
                for part in self._parts:
                    if isinstance(part.asked, _AtBlock) and part.asked.block is wave.block:
                        part.through(wave)
            self._waves.append(wave)
        for part in self._parts:
            self._claim(part.entry.leaves.values(), place="before")
            part.entry.leaves.clear()
        for part in self._parts:
            if isinstance(part.asked, _AtEnd):
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
                    f"would not be added in the order of an ordinary loop. {_ORDINARY}"
                )

    def _refuse_random(self) -> None:
        now = rng_state(self._units.device)
        if all(torch.equal(found, state) for found, state in zip(now, self._rng, strict=True)):
            return
        raise StateError(
            "Random numbers were drawn in the forward. Block by block they come to other "
            "micro-batches than in an ordinary loop, so no bits could be promised. Turn off "
            f"whatever draws them, such as dropout or noise on embeddings. {_ORDINARY}"
        )
