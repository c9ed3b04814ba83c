"""One block: its call, its recompute, and the autograd boundary between blocks.

[Note: The first forward runs in grad mode]
Which kernel runs depends on whether gradients are wanted: scaled-dot-product attention, compiled
regions and fused 4-bit products all ask. So the first forward of a block that will be recomputed
runs in grad mode, on inputs that want gradients where the caller's do, and its graph is dropped.
A ``no_grad`` first forward can differ from a resident run in the last bit.

[Note: Parameters are inputs of the boundary]
The block's trainable parameters go into the autograd function as inputs and their gradients come
out of it, so that autograd itself accumulates them: shared parameters, accumulation, hooks and
``torch.autograd.grad`` work as in any model. In the recompute each parameter is replaced by a
detached alias; otherwise hooks that the user set on a parameter would run twice, once inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from attrs import define, field, frozen
from torch import nn
from torch.profiler import record_function
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from poros_core.call_state import BlockModules, CallState, capture, restored

__all__ = ["BackwardToken", "Block", "BlockCall", "LayerCall", "UnitAccess", "run_block"]


class BackwardToken:
    """Counts the backwards that one decoder call has still to come.

    Lives as long as that call's graph: once the graph is dropped, nothing is outstanding.
    """

    def __init__(self) -> None:
        self.head = False
        self._blocks: set[int] = set()

    @property
    def outstanding(self) -> bool:
        """Whether a backward of this call is still to come."""
        return self.head or bool(self._blocks)

    def expect(self, block: int) -> None:
        """A block's first forward is done; its backward is to come."""
        self._blocks.add(block)

    def done(self, block: int) -> None:
        """A block's backward is done."""
        self._blocks.discard(block)


@frozen(eq=False)
class LayerCall:
    """One call of one decoder layer: its number and its arguments after the hidden state."""

    layer: int
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)


class UnitAccess(Protocol):
    """How a block gets at its units."""

    def acquire(self, layer: int, *, backward: bool) -> None:
        """Bind a layer's unit."""
        ...

    def release(self, layer: int, *, backward: bool) -> None:
        """Park it, and copy what will be needed next."""
        ...


class Block:
    """Consecutive layers with one recompute boundary."""

    def __init__(
        self,
        layers: range,
        *,
        modules: Sequence[nn.Module],
        forwards: Sequence[Callable[..., torch.Tensor]],
        streamed: frozenset[int],
        units: UnitAccess,
    ) -> None:
        """Describe a block.

        Args:
            layers: the numbers of its layers.
            modules: its layers' modules, in order.
            forwards: their own forwards, in order.
            streamed: ids of the parameters that the window binds, which can never train.
            units: how it gets at its units.
        """
        self.layers = layers
        self.units = units
        self.forwards = dict(zip(layers, forwards, strict=True))
        self.modules = BlockModules(modules)
        self.name = f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
        self._streamed = streamed
        self._list()

    def _list(self) -> None:
        self.slots = [
            (module, name)
            for module in self.modules.modules
            for name, param in module._parameters.items()
            if param is not None and id(param) not in self._streamed
        ]

    def refresh(self) -> None:
        """Find adapters that came or went since the last call."""
        if self.modules.refresh():
            self._list()

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that want gradients now, each once."""
        found: dict[int, nn.Parameter] = {}
        for module, name in self.slots:
            param = module._parameters.get(name)
            if param is not None and param.requires_grad:
                found[id(param)] = param
        return list(found.values())


@define(eq=False)
class BlockCall:
    """One call of a block, with all that its recompute needs. Belongs to the call that made it.

    Attributes:
        block: the block.
        layers: numbers of the layers that ran, in order.
        leaves: the flattened arguments of all its layer calls, in which the tensors that carry
            gradients are left out and handed to autograd instead.
        spec: how to put them back together.
        carried: positions of those tensors.
        params: the parameters that wanted gradients.
        state: what the first forward saw.
    """

    block: Block
    layers: tuple[int, ...]
    leaves: list[Any] = field(repr=False)
    spec: Any = field(repr=False)
    carried: tuple[int, ...]
    params: list[nn.Parameter] = field(repr=False)
    state: CallState | None = field(repr=False)

    def run(self, tensors: Sequence[torch.Tensor], held: list[int] | None) -> torch.Tensor:
        """Run the layers on a hidden state and the carried tensors.

        Args:
            tensors: the hidden state, then the carried tensors.
            held: None in a forward, where each unit is parked after its layer. In a backward the
                gradient kernels read the units too: their numbers are added here, and the caller
                parks them.
        """
        leaves = list(self.leaves)
        for position, tensor in zip(self.carried, tensors[1:], strict=True):
            leaves[position] = tensor
        calls = pytree.tree_unflatten(leaves, self.spec)
        units = self.block.units
        hidden = tensors[0]
        for layer, (args, kwargs) in zip(self.layers, calls, strict=True):
            units.acquire(layer, backward=held is not None)
            if held is not None:
                held.append(layer)
                hidden = self.block.forwards[layer](hidden, *args, **kwargs)
                continue
            try:
                hidden = self.block.forwards[layer](hidden, *args, **kwargs)
            finally:
                units.release(layer, backward=False)
        return hidden

    def drop_caches(self) -> None:
        """Leave caches out of the recompute: it must not append to them a second time."""
        self.leaves = [None if isinstance(leaf, Cache) else leaf for leaf in self.leaves]


def run_block(
    block: Block, hidden: torch.Tensor, calls: Sequence[LayerCall], token: BackwardToken | None
) -> torch.Tensor:
    """Run one block: through the autograd boundary if anything in it wants gradients.

    Args:
        block: the block.
        hidden: the hidden state that enters it, ``[batch, sequence, hidden]``.
        calls: the calls of its layers, in order.
        token: the decoder call's count of backwards to come, if there is such a call.

    Returns:
        The hidden state that leaves it.
    """
    block.refresh()
    grad = torch.is_grad_enabled()
    params = block.trainable() if grad else []
    leaves, spec = pytree.tree_flatten([(call.args, call.kwargs) for call in calls])
    carried = tuple(
        position
        for position, leaf in enumerate(leaves)
        if grad and isinstance(leaf, torch.Tensor) and leaf.requires_grad
    )
    layers = tuple(call.layer for call in calls)
    with record_function(f"poros forward block {block.name}"):
        if not grad or not (params or carried or hidden.requires_grad):
            call = BlockCall(block, layers, leaves, spec, (), [], None)
            return call.run([hidden], None)
        state = capture(hidden.device, block.modules)
        call = BlockCall(block, layers, leaves, spec, carried, params, state)
        tensors = [hidden, *(leaves[position] for position in carried)]
        for position in carried:
            leaves[position] = None
        output: torch.Tensor = _Boundary.apply(call, token, len(tensors), *tensors, *params)  # type: ignore[no-untyped-call]
        return output


def _leaf(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(wanted)


class _Boundary(torch.autograd.Function):
    """See [Note: Parameters are inputs of the boundary]."""

    @staticmethod
    def forward(
        ctx: Any, call: BlockCall, token: BackwardToken | None, count: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.token, ctx.count = call, token, count
        inputs = tensors[:count]
        ctx.save_for_backward(*inputs)
        wanted = ctx.needs_input_grad[3 : 3 + count]
        with torch.enable_grad():
            leaves = [_leaf(t, w) for t, w in zip(inputs, wanted, strict=True)]
            output = call.run(leaves, None)
        call.drop_caches()
        if token is not None:
            token.expect(call.layers[0])
        return output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: BlockCall = ctx.call
        wanted = ctx.needs_input_grad[3:]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if gradient is not None:
            with record_function(f"poros backward block {call.block.name}"):
                found = _gradients(call, ctx.saved_tensors, wanted, gradient)
        if ctx.token is not None:
            ctx.token.done(call.layers[0])
        return (None, None, None, *found)


def _gradients(
    call: BlockCall,
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    gradient: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Recompute a block and return the gradient of each input and parameter that wants one.

    Only the recompute runs under the forward's state: the gradient kernels see the state that
    the backward was called in, as a resident run's do.
    """
    assert call.state is not None
    held: list[int] = []
    try:
        with torch.enable_grad():
            leaves = [_leaf(t, w) for t, w in zip(inputs, wanted, strict=False)]
            with (
                restored(call.state, call.block.modules),
                _aliased(call.block, call.params) as aliases,
            ):
                output = call.run(leaves, held)
        if not output.requires_grad:
            return [None] * len(wanted)
        sources = [t for t, w in zip([*leaves, *aliases], wanted, strict=True) if w]
        found = iter(torch.autograd.grad(output, sources, gradient, allow_unused=True))
        return [next(found) if w else None for w in wanted]
    finally:
        for layer in reversed(held):
            call.block.units.release(layer, backward=True)


@contextmanager
def _aliased(block: Block, params: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Put detached aliases in the place of the trainable parameters of a block."""
    aliases = {id(param): param.detach().requires_grad_(True) for param in params}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module, name in block.slots:
            param = module._parameters.get(name)
            if param is not None and id(param) in aliases:
                module._parameters[name] = cast(nn.Parameter, aliases[id(param)])
                replaced.append((module, name, param))
        yield [aliases[id(param)] for param in params]
    finally:
        for module, name, param in replaced:
            module._parameters[name] = param
