"""Running a block: its first forward, and the recompute that its backward differentiates.

[Note: The first forward runs in grad mode]
Which kernel runs depends on whether gradients are wanted: scaled-dot-product attention, compiled
regions and fused 4-bit products all ask. So the first forward of a block that will be recomputed
runs in grad mode, on inputs that want gradients where the caller's do, and its graph is dropped.
A ``no_grad`` first forward can differ from a resident run in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch
from torch import nn

from poros_core.call_state import restored
from poros_core.errors import StateError
from poros_runtimes.streamed.block import TrainedPlace
from poros_runtimes.streamed.block_call import BlockCall

__all__ = ["EagerExecutor", "Executor", "bound", "differentiate", "leaves_of", "nothing_saved"]


class Executor(Protocol):
    """Runs a block's forward and backward. The eager one is the reference for all others."""

    def forward(
        self, call: BlockCall, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Run the first forward; see [Note: The first forward runs in grad mode].

        Args:
            call: the call.
            inputs: the hidden state and what else enters.
            wanted: which of them want gradients.

        Returns:
            What leaves, detached, and which of it carries gradients.
        """
        ...

    def backward(
        self,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Recompute, and return the gradient of each input and trained parameter.

        Args:
            call: the call.
            inputs: the tensors that the forward was given.
            wanted: which inputs, then which parameters, want gradients.
            gradients: of what left; None where nothing came back.
        """
        ...


class EagerExecutor:
    """Kernel by kernel, as Transformers would."""

    def __init__(self) -> None:
        self.blocks = 0

    def forward(
        self, call: BlockCall, inputs: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Run the first forward; see ``Executor``."""
        self.blocks += 1
        with torch.enable_grad(), nothing_saved():
            found = call.run(leaves_of(inputs, wanted), call.block.passing)
        return [tensor.detach() for tensor in found], [tensor.requires_grad for tensor in found]

    def backward(
        self,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Recompute and differentiate; see ``Executor``."""
        self.blocks += 1
        with call.block.holding(call.layers, backward=True):
            return differentiate(call, inputs, wanted, gradients, rng=True)


def nothing_saved() -> AbstractContextManager[None]:
    """Return a context for a first forward: its graph is dropped, so that it need not save any
    tensor, and a loss that reaches into it is an error."""
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(_drop, _refuse)
    return hooks


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing: the graph of a first forward is never differentiated."""


def _refuse(packed: None) -> torch.Tensor:
    raise StateError(
        "A loss reads a tensor that a hook, or output_attentions=True, took from inside a decoder "
        "layer. Its gradient cannot be had: layers are recomputed in the backward. Detach it, or "
        "use output_hidden_states=True, whose gradients are exact."
    )


def leaves_of(tensors: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor]:
    """Return detached aliases of the first tensors that want gradients as told."""
    return [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=False)]


def differentiate(
    call: BlockCall,
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[torch.Tensor | None],
    *,
    rng: bool,
) -> list[torch.Tensor | None]:
    """Recompute a block whose units are bound, and return its gradients; see ``Executor``.

    Only the recompute runs under the forward's state: the gradient kernels see the state that
    the backward was called in, as a resident run's do.
    """
    assert call.state is not None
    with torch.enable_grad():
        leaves = leaves_of(inputs, wanted)
        with (
            restored(call.state, call.block.modules, rng=rng),
            _aliased(call.trained) as aliases,
        ):
            found = call.run(leaves, bound)
    used = [
        (tensor, gradient)
        for tensor, gradient in zip(found, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    sources = [t for t, w in zip([*leaves, *aliases], wanted, strict=True) if w]
    if not used or not sources:
        return [None] * len(wanted)
    results = iter(
        torch.autograd.grad(
            [tensor for tensor, _ in used],
            sources,
            [gradient for _, gradient in used],
            allow_unused=True,
        )
    )
    return [next(results) if w else None for w in wanted]


def bound(layer: int) -> AbstractContextManager[None]:
    """Return a context for a layer whose unit is bound already."""
    return nullcontext()


@contextmanager
def _aliased(trained: Sequence[TrainedPlace]) -> Iterator[list[torch.Tensor]]:
    """Put detached aliases in the places of the parameters that wanted gradients; see
    [Note: Parameters are inputs of the boundary]."""
    aliases = [param.detach().requires_grad_(True) for _, _, param in trained]
    try:
        for (module, name, _), alias in zip(trained, aliases, strict=True):
            module._parameters[name] = cast(nn.Parameter, alias)
        yield aliases
    finally:
        for module, name, param in trained:
            module._parameters[name] = param
