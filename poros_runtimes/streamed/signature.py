"""What a captured graph depends on, as a value: the key under which it may be replayed.

[Note: What a graph bakes in]
A captured graph repeats kernels with the addresses, shapes and constants that they had at capture.
Whatever decides those is in the key, and a call whose key differs never meets the graph. Tensor
arguments are copied into buffers of the graph's, so of them only the layout counts. Random numbers
are not baked in: a replay takes them from the generator's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn

from poros_core.call_state import ambient, is_capture_hook
from poros_runtimes.streamed.block import Block
from poros_runtimes.streamed.block_call import BlockCall
from poros_runtimes.streamed.caches import IsolatedCache

__all__ = [
    "BackwardKey",
    "BlockConstants",
    "ForwardKey",
    "Layout",
    "backward_key",
    "backward_kind",
    "forward_key",
    "forward_kind",
    "layout_of",
]

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@frozen
class Layout:
    """How a tensor argument lies in memory.

    Attributes:
        shape: its shape.
        stride: its strides, in elements.
        dtype: its element type.
        wanted: whether it wants a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool = False

    @property
    def compact(self) -> tuple[int, ...]:
        """Its shape with every repeated dimension (stride 0) reduced to one."""
        return tuple(1 if s == 0 else n for n, s in zip(self.shape, self.stride, strict=True))


@frozen(cache_hash=True)
class ForwardKey:
    """Everything that a forward graph depends on; see [Note: What a graph bakes in].

    Attributes:
        layers: numbers of the layers that run.
        inputs: layout of the hidden state, of what else carries gradients, and of what the shared
            mappings hold.
        arguments: each other argument: a layout, a plain value, or a kind of cache.
        structure: which arguments each layer was given, and what the shared mappings hold.
        places: where the block's parameters and buffers are; see ``BlockConstants.places``.
        flags: train/eval modes, autocast, adapters' switches and scaling, kernels allowed.
        constants: dropout rates, merged adapters, attention's implementation and constants, and
            which modules the block has.
    """

    layers: tuple[int, ...]
    inputs: tuple[Layout, ...]
    arguments: tuple[object, ...]
    structure: tuple[object, ...]
    places: tuple[object, ...]
    flags: tuple[object, ...]
    constants: tuple[object, ...]


@frozen
class BackwardKey:
    """What a backward graph depends on besides its forward's key.

    Attributes:
        gradients: layout of each gradient that came back; None where none did.
        wanted: which inputs and parameters want gradients.
        places: where the block's parameters and buffers are by then.
        ambient: the state that the gradient kernels see.
    """

    gradients: tuple[Layout | None, ...]
    wanted: tuple[bool, ...]
    places: tuple[object, ...]
    ambient: tuple[object, ...]


class BlockConstants:
    """The modules of a block whose settings end up in kernels, listed once."""

    def __init__(self, block: Block) -> None:
        modules = block.modules.modules
        self._modules = modules
        roots = set(map(id, block.roots))
        self._dropouts: list[Any] = [m for m in modules if hasattr(m, "p") and _is_dropout(m)]
        self._attentions: list[Any] = [m for m in modules if hasattr(m, "attention_dropout")]
        self._tuners: list[Any] = block.modules.tuners
        self._hooks = [
            hooks
            for module in modules
            if id(module) not in roots
            for hooks in (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            )
        ]
        self._slots = block.slots
        self._buffers = [(module, name) for module in modules for name in module._buffers]
        self._caching = [module for module in modules if hasattr(module, "_dora_cache")]

    def hooked(self) -> bool:
        """Say whether the user hooked a module inside the block."""
        anywhere: Any = torch.nn.modules.module
        return bool(anywhere._has_any_global_hook()) or any(
            not is_capture_hook(hook) for hooks in self._hooks if hooks for hook in hooks.values()
        )

    def unpads(self) -> bool:
        """Say whether attention looks at the mask on the host, which no capture allows."""
        return any("flash" in str(_implementation(a)) for a in self._attentions)

    def keeps_tensors(self) -> bool:
        """Say whether a module keeps tensors of one call for the next, as PEFT's DoRA does if it is
        told to: a replay would go on reading them where they were."""
        if not self._caching:
            return False
        from peft.tuners.lora import dora

        return dora.ENABLE_DORA_CACHING and not all(module.training for module in self._caching)

    def places(self) -> tuple[object, ...]:
        """Return identity, address, dtype and ``requires_grad`` of everything in the block that
        does not stream, and the address of every buffer."""
        parameters = tuple(
            (id(param), param.data_ptr(), param.dtype, param.requires_grad)
            for module, name in self._slots
            if (param := module._parameters.get(name)) is not None
        )
        buffers = tuple(
            -1 if (buffer := module._buffers.get(name)) is None else buffer.data_ptr()
            for module, name in self._buffers
        )
        return (*parameters, *buffers)

    def makeup(self) -> tuple[object, ...]:
        """Return which classes of modules there are, and which parameters each has."""
        return tuple((type(module), tuple(module._parameters)) for module in self._modules)

    def read(self) -> tuple[object, ...]:
        """Return the settings as they are now."""
        return (
            tuple(dropout.p for dropout in self._dropouts),
            tuple(
                (
                    attention.attention_dropout,
                    _implementation(attention),
                    getattr(attention, "scaling", None),
                    getattr(attention, "sliding_window", None),
                )
                for attention in self._attentions
            ),
            tuple(bool(tuner.merged) for tuner in self._tuners),
        )


def _implementation(attention: Any) -> object:
    return getattr(getattr(attention, "config", None), "_attn_implementation", None)


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


_SPARSE = 64
"""How many times its own size a tensor that enters may span: the inputs of one layer among those of
all, as Gemma 4 E2B slices them."""


def layout_of(tensor: torch.Tensor, *, wanted: bool = False, span: int = 1) -> Layout | None:
    """Return a tensor's layout, or None if a buffer cannot take its place.

    A buffer can if the tensor is aligned as fresh memory is, since kernels choose by alignment, and
    dense apart from repeated dimensions.

    Args:
        tensor: the tensor.
        wanted: whether it wants a gradient.
        span: how many times its own size it may span, with gaps between its elements.
    """
    layout = Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, wanted)
    aligned = tensor.data_ptr() % 16 == 0
    return layout if aligned and _spans(layout, most=span) else None


def distinct(tensor: torch.Tensor) -> bool:
    """Whether no two elements of a tensor lie in the same place."""
    layout = Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, False)
    return _spans(layout, most=None)


def _spans(layout: Layout, *, most: int | None) -> bool:
    """Whether no two elements overlap, and all span at most so many times their size, if that is
    asked."""
    end = count = 1
    dims = [
        (stride, size)
        for size, stride in zip(layout.compact, layout.stride, strict=True)
        if size != 1
    ]
    for stride, size in sorted(dims):
        if stride < end:
            return False
        end += (size - 1) * stride
        count *= size
    return most is None or end <= most * count


def forward_key(
    call: BlockCall,
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    constants: BlockConstants,
) -> ForwardKey | None:
    """Return the key of a call's forward, or None if it must run eagerly."""
    assert call.state is not None
    if call.thread or constants.hooked() or torch.is_anomaly_enabled():
        return None
    if constants.unpads() or constants.keeps_tensors():
        return None
    layouts = [layout_of(t, wanted=w, span=_SPARSE) for t, w in zip(inputs, wanted, strict=True)]
    arguments = [_argument(leaf, call.state.device) for leaf in call.leaves]
    if None in layouts or _EAGER in arguments:
        return None
    return ForwardKey(
        call.layers,
        tuple(layout for layout in layouts if layout is not None),
        tuple(arguments),
        call.structure,
        constants.places(),
        call.state.flags,
        (call.block.version, *constants.read()),
    )


def backward_key(
    call: BlockCall,
    wanted: Sequence[bool],
    gradients: Sequence[torch.Tensor | None],
    constants: BlockConstants,
) -> BackwardKey | None:
    """Return the key of a call's backward, or None if it must run eagerly."""
    assert call.state is not None
    layouts = [None if g is None else layout_of(g) for g in gradients]
    if any(g is not None and found is None for g, found in zip(gradients, layouts, strict=True)):
        return None
    return BackwardKey(
        tuple(layouts), tuple(wanted), constants.places(), ambient(call.state.device)
    )


def forward_kind(key: ForwardKey, call: BlockCall, constants: BlockConstants) -> tuple[object, ...]:
    """Return all of a key that blocks of the same kind share: not where things are.

    What such a block hands out is likely to be what another one does; it is no more than likely.
    """
    return (
        len(key.layers),
        key.inputs,
        key.arguments,
        key.structure,
        _without_addresses(key.places),
        key.flags,
        key.constants[1:],  # the first is the block's own count of changes
        constants.makeup(),
        tuple(tuple(param.shape) for _, _, param in call.trained),
    )


def backward_kind(key: BackwardKey) -> tuple[object, ...]:
    """Return all of a key that blocks of the same kind share; see ``forward_kind``."""
    return key.gradients, key.wanted, _without_addresses(key.places), key.ambient


def _without_addresses(places: Sequence[Any]) -> tuple[object, ...]:
    return tuple(place[2:] if isinstance(place, tuple) else place != -1 for place in places)


class _Eager:
    """An argument that no graph can take."""


_EAGER = _Eager()


def _argument(leaf: object, device: torch.device) -> object:
    if isinstance(leaf, torch.Tensor):
        # numbers on the host take part in other ways than a buffer on the device could
        here = leaf.device.type == device.type
        return (layout_of(leaf, span=_SPARSE) if here else None) or _EAGER
    if isinstance(leaf, IsolatedCache):
        return type(leaf.empty) if leaf.live is None else _EAGER
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else _EAGER
