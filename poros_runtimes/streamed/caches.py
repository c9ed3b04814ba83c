"""The key/value caches that a block's recompute can repeat.

[Note: Caches]
A training forward is given an empty key/value cache by default, and what a layer computes with it
differs in memory layout, and so at times in kernel and bits, from what it computes without one. So
a cache is not taken away: each run of a layer gets a copy that is empty for that layer. A cache
that is filled already is refused when gradients are wanted. In training the caller's own cache
stays empty, as under Transformers' checkpointing; in evaluation it is filled as usual.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from attrs import define, field
from transformers.cache_utils import Cache

from poros_runtimes.streamed.block import LayerCall

__all__ = ["IsolatedCache", "filled", "isolated"]


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


def filled(value: Any, layer: int) -> Any:
    """Return the cache that one run of a layer is given, or ``value`` if it is no cache."""
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
            number = torch.full((), value.item(), dtype=value.dtype, device=device)
            setattr(layer, name, number)
