"""One forward of the decoder: the layers that it has come to, and the boundary on its output."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from poros_core.errors import StateError
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.block import Block, LayerCall
from poros_runtimes.streamed.micro_batch import MicroBatch
from poros_runtimes.streamed.units import Units

__all__ = ["DecoderCall", "Followed", "bounded"]


class DecoderCall:
    """One forward of the decoder: how it groups layers, and the group that is being gathered."""

    def __init__(
        self, blocks: Mapping[int, Block], *, thread: bool, part: MicroBatch | None
    ) -> None:
        self.blocks = blocks
        self.thread = thread
        self.part = part
        self.entered_behind: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.token = BackwardToken()
        self.pending: list[LayerCall] = []
        self.entered: torch.Tensor | None = None

    def gather(self, this: LayerCall, hidden: torch.Tensor) -> list[LayerCall] | None:
        """Add the call of a layer that is not called alone.

        Args:
            this: the call.
            hidden: the hidden state that it was given.

        Returns:
            The calls of its block's layers, once all are there; None before.

        Raises:
            StateError: it does not follow on the layer before.
        """
        if self.pending and (
            hidden is not self.entered or this.layer != self.pending[-1].layer + 1
        ):
            self.pending.clear()
            raise StateError(
                "Something between two layers of a block read or changed the hidden state. "
                "Prepare the model with block_size=1."
            )
        self.pending.append(this)
        self.entered = hidden
        if this.layer + 1 < self.blocks[this.layer].layers.stop:
            return None
        calls, self.pending, self.entered = self.pending, [], None
        return calls

    def refuse_pending(self) -> None:
        """Refuse a forward that ends inside a block.

        Raises:
            StateError: layers of a block were called, and not its last.
        """
        if self.pending:
            raise StateError(
                "The decoder's forward ended inside a block. Prepare the model with block_size=1."
            )


class Followed(threading.local):
    """What the calling thread is in the midst of."""

    call: DecoderCall | None = None
    part: MicroBatch | None = None


def bounded(units: Units, token: BackwardToken, hidden: torch.Tensor) -> torch.Tensor:
    """Return the hidden state that leaves the decoder behind the boundary on its output.

    Args:
        units: told when a backward reaches the boundary.
        token: the call's.
        hidden: the hidden state, ``[batch, sequence, hidden]``.
    """
    found: torch.Tensor = _DecoderOutput.apply(units, token, hidden)  # type: ignore[no-untyped-call]
    return found


class _DecoderOutput(torch.autograd.Function):
    """The boundary on the decoder's output; see [Note: The head's lifetime]."""

    @staticmethod
    def forward(ctx: Any, units: Units, token: BackwardToken, hidden: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.units, ctx.token = units, token
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        ctx.units.head_done(ctx.token)
        return None, None, gradient
