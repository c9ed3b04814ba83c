"""One block: its modules, its call, and how a call runs.

[Note: The first forward runs in grad mode]
Which kernel runs depends on whether gradients are wanted: scaled-dot-product attention, compiled
regions and fused 4-bit products all ask. So the first forward of a block that will be recomputed
runs in grad mode, on inputs that want gradients where the caller's do, and its graph is dropped.
A ``no_grad`` first forward can differ from a resident run in the last bit.

[Note: Caches]
A training forward is given an empty key/value cache by default, and what a layer computes with it
differs in memory layout, and so at times in kernel and bits, from what it computes without one. So
a cache is not taken away: each run of a layer gets a copy that is empty for that layer. A cache
that is filled already is refused when gradients are wanted. In training the caller's own cache
stays empty, as under Transformers' checkpointing; in evaluation it is filled as usual.

[Note: What crosses a block]
Besides the hidden state, layers can hand tensors to later layers through a mutable mapping that
the decoder passes to each of them (a family names it in ``shared``). A block gets a mapping of its
own, filled with what it was given, and hands out every entry it ends up with, those that it only
read too: the gradients of a tensor that several blocks read then meet in the order in which a
resident run adds them, from the last reader to the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from poros_core.call_state import BlockModules, CallState
from poros_core.errors import StateError

__all__ = [
    "BackwardToken",
    "Block",
    "BlockCall",
    "CallUnits",
    "IsolatedCache",
    "LayerCall",
    "TrainedPlace",
    "UnitAccess",
    "isolated",
    "make_call",
]

TrainedPlace = tuple[nn.Module, str, nn.Parameter]
"""The module that owns a parameter, its name there, and the parameter."""


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

    def drop(self) -> None:
        """No backward of this call will come any more."""
        self.head = False
        self._blocks.clear()


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
        self.roots = tuple(modules)
        self.units = units
        self.forwards = dict(zip(layers, forwards, strict=True))
        self.modules = BlockModules(modules)
        self.name = f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
        self.version = 0
        self._held = False
        self._streamed = streamed
        self._list()

    def _list(self) -> None:
        self.version += 1
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

    @contextmanager
    def passing(self, layer: int) -> Iterator[None]:
        """Bind a layer's unit for its forward only."""
        if self._held:
            yield
            return
        self.units.acquire(layer, backward=False)
        try:
            yield
        finally:
            self.units.release(layer, backward=False)

    @contextmanager
    def holding(self, layers: Sequence[int], *, backward: bool) -> Iterator[None]:
        """Bind all of these units until the end: gradient kernels and graphs read them too. What
        binds them again meanwhile finds them bound."""
        if self._held:
            yield
            return
        held: list[int] = []
        self._held = True
        try:
            for layer in layers:
                self.units.acquire(layer, backward=backward)
                held.append(layer)
            yield
        finally:
            self._held = False
            for layer in reversed(held):
                self.units.release(layer, backward=backward)

    def trainable(self) -> list[TrainedPlace]:
        """Return the places of parameters that want gradients now, last first.

        A parameter that several modules share is there once for each: autograd adds what a
        boundary hands out in this order, which is the order of a resident backward.
        """
        return [
            (module, name, param)
            for module, name in reversed(self.slots)
            if (param := module._parameters.get(name)) is not None and param.requires_grad
        ]


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
        shared: the mappings that layers share, by keyword; see [Note: What crosses a block].
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
            args = tuple(_filled(value, layer) for value in args)
            kwargs = {name: _filled(value, layer) for name, value in kwargs.items()}
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


@define(eq=False)
class IsolatedCache:
    """See [Note: Caches]. ``live`` is the caller's, while this call may still fill it."""

    empty: Cache = field(repr=False)
    live: Cache | None = field(repr=False)


def isolated(call: LayerCall, *, training: bool, device: torch.device) -> LayerCall:
    """Put caches that a recompute can repeat in place of a call's own; see [Note: Caches].

    Args:
        call: the call of a layer.
        training: whether the layer trains; then its caller's cache stays empty.
        device: where it computes.
    """
    if not torch.is_grad_enabled():
        return call

    def isolate(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        empty = _copy_for(value, call.layer)
        if call.layer < len(empty.layers):
            _put_numbers_on(device, empty.layers[call.layer])
        return IsolatedCache(empty, None if training else value)

    return LayerCall(
        call.layer,
        tuple(isolate(value) for value in call.args),
        {name: isolate(value) for name, value in call.kwargs.items()},
    )


def _filled(value: Any, layer: int) -> Any:
    if not isinstance(value, IsolatedCache):
        return value
    return _copy_for(value.empty, layer) if value.live is None else value.live


def _copy_for(cache: Cache, layer: int) -> Cache:
    """Return a cache in which ``layer`` has an entry of its own and all else is shared."""
    fresh = copy.copy(cache)
    fresh.layers = list(cache.layers)
    if layer < len(fresh.layers):
        fresh.layers[layer] = copy.deepcopy(cache.layers[layer])
    return fresh


def _put_numbers_on(device: torch.device, layer: Any) -> None:
    """Put the single numbers that a cache's layer holds as CPU tensors, such as the width of its
    window, where the layer would put them. It does so at its first update, by a copy that waits for
    the device and that no graph can take; filling a tensor does neither."""
    if device.type == "cpu":
        return
    for name, value in list(vars(layer).items()):
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0:
            filled = torch.full((), value.item(), dtype=value.dtype, device=device)
            setattr(layer, name, filled)


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
