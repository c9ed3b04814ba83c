"""The autograd boundary between blocks.

[Note: Parameters are inputs of the boundary]
The block's trainable parameters go into the autograd function as inputs and their gradients come
out of it, so that autograd itself accumulates them: shared parameters, accumulation, hooks and
``torch.autograd.grad`` work as in any model. In the recompute each parameter is replaced by a
detached alias; otherwise hooks that the user set on a parameter would run twice, once inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch.profiler import record_function

from poros_core.call_state import capture
from poros_runtimes.streamed.activations import HostActivations, KeptActivation
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.block import Block, LayerCall
from poros_runtimes.streamed.block_call import BlockCall, make_call
from poros_runtimes.streamed.cuts import Cut
from poros_runtimes.streamed.executor import Executor

__all__ = ["BlockResult", "graph_is_retained", "run_block"]


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


def graph_is_retained() -> bool:
    """Whether the backward that is running was called with ``retain_graph=True``. torch has no
    public way to ask; its own compiled backwards ask in this way."""
    bindings: Any = torch._C._autograd
    return bool(bindings._get_current_graph_task_keep_graph())
