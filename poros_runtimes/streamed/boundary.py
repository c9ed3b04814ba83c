"""The autograd boundary between blocks, and the recompute behind it.

[Note: Parameters are inputs of the boundary]
The block's trainable parameters go into the autograd function as inputs and their gradients come
out of it, so that autograd itself accumulates them: shared parameters, accumulation, hooks and
``torch.autograd.grad`` work as in any model. In the recompute each parameter is replaced by a
detached alias; otherwise hooks that the user set on a parameter would run twice, once inside.

[Note: The first forward runs in grad mode]
Which kernel runs depends on whether gradients are wanted: scaled-dot-product attention, compiled
regions and fused 4-bit products all ask. So the first forward of a block that will be recomputed
runs in grad mode, on inputs that want gradients where the caller's do, and its graph is dropped.
A ``no_grad`` first forward can differ from a resident run in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from attrs import frozen
from torch import nn
from torch.profiler import record_function

from poros_core.call_state import capture, restored
from poros_core.errors import StateError
from poros_runtimes.streamed.activations import HostActivations, KeptActivation
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.block import Block, LayerCall, TrainedPlace
from poros_runtimes.streamed.block_call import BlockCall, make_call
from poros_runtimes.streamed.cuts import Cut

__all__ = [
    "BlockResult",
    "EagerExecutor",
    "Executor",
    "bound",
    "differentiate",
    "graph_is_retained",
    "leaves_of",
    "nothing_saved",
    "run_block",
]


@frozen(eq=False)
class BlockResult:
    """What a block hands out.

    Attributes:
        hidden: the hidden state that leaves it, ``[batch, sequence, hidden]``.
        entered: the hidden state that entered it, behind the boundary; None if not asked for.
    """

    hidden: torch.Tensor
    entered: torch.Tensor | None


def run_block(
    block: Block,
    hidden: torch.Tensor,
    calls: Sequence[LayerCall],
    *,
    executor: Executor,
    activations: HostActivations | None = None,
    shared: Sequence[str] = (),
    token: BackwardToken | None = None,
    thread: bool = False,
    cut: Cut | None = None,
) -> BlockResult:
    """Run one block: through the autograd boundary if anything in it wants gradients.

    Args:
        block: the block.
        hidden: the hidden state that enters it, ``[batch, sequence, hidden]``.
        calls: the calls of its layers, in order.
        executor: runs it.
        activations: keeps the hidden state until the backward; None leaves it on the device.
        shared: keywords of the mappings through which layers hand tensors to later ones.
        token: the decoder call's count of backwards to come, if there is such a call.
        thread: also return the hidden state that entered, for a loss that reads it: gradients of
            the two uses must meet in the order in which a resident run adds them.
        cut: cuts the graph around the block; None leaves it whole.
    """
    block.refresh()
    call, entering = make_call(block, calls, shared_names=shared, thread=thread)
    tensors = [hidden, *entering]
    del hidden, entering
    if cut is not None:
        tensors = cut.enter(tensors)
    with record_function(f"poros forward block {block.name}"):
        if not torch.is_grad_enabled() or not (
            call.trained or any(tensor.requires_grad for tensor in tensors)
        ):
            call.thread = False
            output, *found = call.run(tensors, block.passing)
            call.hand_out(found)
            return BlockResult(output, None)
        call.state = capture(tensors[0].device, block.modules)
        call.note_arguments()
        results: tuple[torch.Tensor, ...] = _Boundary.apply(  # type: ignore[no-untyped-call]
            call,
            executor,
            activations,
            token,
            len(tensors),
            *tensors,
            *(p for _, _, p in call.trained),
        )
    output, *found = results if cut is None else cut.leave(results)
    entered = found.pop() if thread else None
    call.hand_out(found)
    return BlockResult(output, entered)


class _Boundary(torch.autograd.Function):
    """See [Note: Parameters are inputs of the boundary]."""

    @staticmethod
    def forward(
        ctx: Any,
        call: BlockCall,
        executor: Executor,
        activations: HostActivations | None,
        token: BackwardToken | None,
        count: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.executor, ctx.token = call, executor, token
        inputs = tensors[:count]
        ctx.count = count
        ctx.activations, ctx.kept = activations, None
        if activations is not None:
            ctx.kept = activations.keep(
                tensors[0], stop=call.layers[-1] + 1, token=token, held=call.thread
            )
        entered = tensors[0] if ctx.kept is None else ctx.kept.stand_in
        ctx.save_for_backward(entered, *tensors[1:])
        results, differentiable = executor.forward(
            call, inputs, ctx.needs_input_grad[5 : 5 + count]
        )
        call.drop_caches()
        if token is not None:
            token.expect(call.layers[0])
        ctx.mark_non_differentiable(
            *(r for r, wanted in zip(results, differentiable, strict=True) if not wanted)
        )
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: BlockCall = ctx.call
        kept: KeptActivation | None = ctx.kept
        wanted = ctx.needs_input_grad[5:]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        brought = None
        if any(gradient is not None for gradient in gradients):
            call.check_arguments()
            inputs = ctx.saved_tensors[: ctx.count]
            if kept is not None:
                brought = ctx.activations.bring_back(kept)
                inputs = (brought, *inputs[1:])
            with record_function(f"poros backward block {call.block.name}"):
                found = ctx.executor.backward(call, inputs, wanted, gradients)
        if kept is not None:
            ctx.activations.done(kept, brought, retained=graph_is_retained())
        if ctx.token is not None:
            ctx.token.done(call.layers[0])
        return (None, None, None, None, None, *found)


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


def graph_is_retained() -> bool:
    """Whether the backward that is running was called with ``retain_graph=True``. torch has no
    public way to ask; its own compiled backwards ask in this way."""
    bindings: Any = torch._C._autograd
    return bool(bindings._get_current_graph_task_keep_graph())


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
    """Put detached aliases in the places of the parameters that wanted gradients."""
    aliases = [param.detach().requires_grad_(True) for _, _, param in trained]
    try:
        for (module, name, _), alias in zip(trained, aliases, strict=True):
            module._parameters[name] = cast(nn.Parameter, alias)
        yield aliases
    finally:
        for module, name, param in trained:
            module._parameters[name] = param
