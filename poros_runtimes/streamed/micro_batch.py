"""One micro-batch of several that go block by block; see [Note: Block-major order]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from attrs import field, frozen

from poros_core.errors import StateError
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.block import Block
from poros_runtimes.streamed.boundary import BlockResult
from poros_runtimes.streamed.cuts import Cut, Entry
from poros_runtimes.streamed.routine import Ambient, Routine

__all__ = ["ORDINARY", "AtBlock", "AtEnd", "MicroBatch"]

ORDINARY = "Use the ordinary loop: (model(**batch).loss * scale).backward() for each micro-batch."
"""What an error tells those to do whose micro-batches cannot go block by block."""


@frozen(eq=False)
class AtBlock:
    """A micro-batch has come to a block, and asks for what leaves it."""

    block: Block
    run: Callable[[Cut], BlockResult] = field(repr=False)
    ambient: Ambient


@frozen(eq=False)
class AtEnd:
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
        self.asked: AtBlock | AtEnd | None = None
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
                f"gradients under torch.no_grad(). {ORDINARY}"
            )
        self.token, self.tokens = token, tokens

    def at_block(self, block: Block, run: Callable[[Cut], BlockResult]) -> BlockResult:
        """Wait until the other micro-batches are there too; return what leaves the block.

        Args:
            block: the block.
            run: runs it for this micro-batch, given its cuts.
        """
        asked = AtBlock(block, run, Ambient.of_this_thread(self._device))
        del run
        return cast(BlockResult, self._routine.ask(asked))

    def at_end(self, *, backward: bool) -> None:
        """Wait until the other micro-batches are through all blocks and the head is bound.

        Args:
            backward: whether a backward will come to the decoder's output.
        """
        assert self.token is not None
        self._routine.ask(AtEnd(self.token, backward, Ambient.of_this_thread(self._device)))

    # -- for the caller ------------------------------------------------------------------------

    def start(self) -> None:
        """Go to the first block."""
        self._go_on()

    def through(self, cuts: list[Cut]) -> None:
        """Compute the block that it has come to, and go on to the next, or the end.

        Args:
            cuts: takes the cuts around the block, unless it raises.
        """
        asked, self.asked = self.asked, None
        assert isinstance(asked, AtBlock)
        cut = Cut(self.entry)
        try:
            with asked.ambient.entered(self._device):
                result = asked.run(cut)
        except Exception as error:
            self._go_on(error=error)  # as if the model had raised it
            return
        del asked
        cuts.append(cut)
        self._go_on(result)

    def finish(self) -> torch.Tensor:
        """Compute the loss, now that the head is bound."""
        if isinstance(self.asked, AtEnd):
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
