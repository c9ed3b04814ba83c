"""One call of a block: what enters it, what leaves it, and how it runs.

[Note: What crosses a block]
Besides the hidden state, layers can hand tensors to later layers through a mutable mapping that
the decoder passes to each of them (a family names it in ``shared``). A block gets a mapping of its
own, filled with what it was given, and hands out every entry it ends up with, those that it only
read too: the gradients of a tensor that several blocks read then meet in the order in which a
resident run adds them, from the last reader to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import define, field
from torch.utils import _pytree as pytree

from poros_core.call_state import CallState
from poros_core.errors import StateError
from poros_runtimes.streamed.block import Block, LayerCall, TrainedPlace
from poros_runtimes.streamed.caches import IsolatedCache, filled

__all__ = ["BlockCall", "CallUnits", "make_call"]

CallUnits = Callable[[int], AbstractContextManager[None]]
"""Given a layer's number, a context in which its unit is bound."""


@define(eq=False)
class BlockCall:
    """One call of a block, with all that its recompute needs. Belongs to the call that made it.

    Attributes:
        block: the block.
        layers: numbers of the layers that ran, in order.
        leaves: the flattened arguments of all its layer calls, in which the tensors that carry
            gradients are left out and handed to autograd instead.
        spec: how to put them back together.
        carried: for each of those tensors, its positions in ``leaves``.
        trained: the parameters that wanted gradients, with their places.
        shared: the mappings that layers share, by keyword; see [Note: What crosses a block]. Once
            the call has handed out what is for them, empty ones of the same types.
        shared_spec: how the tensors that entered in them are put back together.
        state: what the first forward saw.
        thread: hand out the hidden state that entered too, for a loss that reads it.
        left_spec: how the tensors that left in the shared mappings are put back together.
        structure: which arguments each layer was given, without their values, and which mappings,
            with their keys.
        replay: what an executor remembers of the forward.
        versions: of the arguments, to see that they are unchanged in the backward.
    """

    block: Block
    layers: tuple[int, ...]
    leaves: list[Any] = field(repr=False)
    spec: Any = field(repr=False)
    carried: list[list[int]]
    trained: list[TrainedPlace] = field(repr=False)
    shared: dict[str, MutableMapping[Any, Any]] = field(repr=False)
    shared_spec: Any = field(repr=False)
    state: CallState | None = field(default=None, repr=False)
    thread: bool = False
    left_spec: Any = field(default=None, repr=False)
    structure: tuple[object, ...] = field(default=(), repr=False)
    replay: Any = field(default=None, repr=False)
    versions: tuple[int, ...] = field(default=(), repr=False)

    def run(self, tensors: Sequence[torch.Tensor], units: CallUnits) -> list[torch.Tensor]:
        """Run the layers.

        Args:
            tensors: the hidden state, the carried tensors, then what the shared mappings hold.
            units: binds each layer's unit around its forward.

        Returns:
            The hidden state, what the shared mappings hold now, and with ``thread`` the hidden
            state that entered.
        """
        leaves = list(self.leaves)
        entered = 1 + len(self.carried)
        for positions, tensor in zip(self.carried, tensors[1:entered], strict=True):
            for position in positions:
                leaves[position] = tensor
        calls = pytree.tree_unflatten(leaves, self.spec)
        held_by_name = pytree.tree_unflatten(list(tensors[entered:]), self.shared_spec)
        shared = {name: _like(m, held_by_name[name]) for name, m in self.shared.items()}
        hidden = tensors[0]
        for layer, (args, kwargs) in zip(self.layers, calls, strict=True):
            args = tuple(filled(value, layer) for value in args)
            kwargs = {name: filled(value, layer) for name, value in kwargs.items()}
            with units(layer):
                hidden = self.block.forwards[layer](hidden, *args, **kwargs, **shared)
        found, self.left_spec = pytree.tree_flatten({n: dict(m) for n, m in shared.items()})
        return [hidden, *found, *([tensors[0]] if self.thread else [])]

    def note_arguments(self) -> None:
        """Remember the version of every argument that carries no gradient."""
        self.versions = tuple(_version(leaf) for leaf in self.leaves)

    def check_arguments(self) -> None:
        """Check that nobody changed an argument since the forward.

        Raises:
            StateError: a mask or a position was changed in place.
        """
        if self.versions != tuple(_version(leaf) for leaf in self.leaves):
            raise StateError(
                "A tensor that was given to the model, such as an attention mask or position ids, "
                "was changed in place between the forward and its backward, which recomputes with "
                "it. Change a copy instead."
            )

    def drop_caches(self) -> None:
        """Forget the caller's caches: the recompute must not append to them a second time."""
        for leaf in self.leaves:
            if isinstance(leaf, IsolatedCache):
                leaf.live = None

    def hand_out(self, found: Sequence[torch.Tensor]) -> None:
        """Put what left the block into the mappings that the decoder goes on with."""
        if not self.shared:
            return
        values = pytree.tree_unflatten(list(found), self.left_spec)
        for name, mapping in self.shared.items():
            mapping.update(values[name])
        self.shared = self.emptied()  # the decoder's own hold outputs, whose graph holds the call

    def emptied(self) -> dict[str, MutableMapping[Any, Any]]:
        """Return empty mappings of the types of those that layers share."""
        return {name: _like(mapping, {}) for name, mapping in self.shared.items()}


def _version(leaf: object) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else -1


def _like(mapping: MutableMapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """Return a new mapping of the same type: its class differs between Transformers releases."""
    make: Any = type(mapping)
    return make(dict(values))


def make_call(
    block: Block,
    calls: Sequence[LayerCall],
    *,
    shared_names: Sequence[str],
    thread: bool,
) -> tuple[BlockCall, list[torch.Tensor]]:
    """Describe a call of a block.

    Args:
        block: the block.
        calls: the calls of its layers, in order.
        shared_names: the family's ``shared``.
        thread: see ``BlockCall``.

    Returns:
        The call, and the tensors that enter it besides the hidden state: those among the
        arguments that carry gradients, each once, then what the shared mappings hold.
    """
    first = calls[0].kwargs
    shared = {
        name: first[name] for name in shared_names if isinstance(first.get(name), MutableMapping)
    }
    arguments = [
        (call.args, {k: v for k, v in call.kwargs.items() if k not in shared}) for call in calls
    ]
    leaves, spec = pytree.tree_flatten(arguments)
    carried: dict[int, tuple[torch.Tensor, list[int]]] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            carried.setdefault(id(leaf), (leaf, []))[1].append(position)
            leaves[position] = None
    entering, shared_spec = pytree.tree_flatten({n: dict(m) for n, m in shared.items()})
    call = BlockCall(
        block,
        tuple(call.layer for call in calls),
        leaves,
        spec,
        [positions for _, positions in carried.values()],
        block.trainable() if torch.is_grad_enabled() else [],
        shared,
        shared_spec,
        thread=thread,
        structure=(
            *(
                (len(args), *((name, type(value)) for name, value in kwargs.items()))
                for args, kwargs in arguments
            ),
            tuple(shared),
            repr(shared_spec) if entering else "",
        ),
    )
    return call, [*(tensor for tensor, _ in carried.values()), *entering]
