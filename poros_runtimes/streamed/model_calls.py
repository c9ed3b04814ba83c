"""What the runtime asks of a model's calls and modules, apart from any state of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from poros_core.call_state import is_capture_hook
from poros_core.errors import StateError
from poros_runtimes.streamed.attach import checkpointing_off
from poros_runtimes.streamed.block import Block

__all__ = [
    "layers_hooked",
    "refuse_filled_cache",
    "refuse_merge",
    "refuse_merged",
    "refuse_unload",
    "refuse_trained",
    "swapped",
    "tuners",
    "uncheckpointed",
    "uncompiled",
    "wants_hidden_states",
]


def refuse_filled_cache(values: Iterable[Any]) -> None:
    """Refuse a call with gradients that goes on from a cache; see [Note: Caches].

    Raises:
        StateError: one of the values is a cache that is not empty.
    """
    for value in values:
        if isinstance(value, Cache) and value.get_seq_length() > 0:
            raise StateError(
                "A forward with gradients was given a cache that is already filled. The "
                "recompute in the backward would append to it a second time. Wrap the call in "
                "torch.no_grad(), or pass no cache."
            )


def refuse_merge(*args: Any, **kwargs: Any) -> None:
    """Stand in for an adapter layer's ``merge``.

    Raises:
        StateError: always, before a weight is written.
    """
    raise StateError(
        "Adapters cannot be merged into a base that streams. Call poros.unprepare(model) first, "
        "then merge."
    )


def refuse_unload(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``unload`` of what PEFT made of a model.

    Raises:
        StateError: always, before anything is taken away.
    """
    raise StateError(
        "Adapters cannot be taken off a model that is prepared: what is left could be neither "
        "prepared again nor unprepared. Call poros.unprepare(model) first, then unload."
    )


def refuse_merged(blocks: Iterable[Block]) -> None:
    """Refuse a call while adapters are merged.

    Raises:
        StateError: an adapter layer in one of the blocks is merged.
    """
    if any(tuner.merged for tuner in tuners(blocks)):
        raise StateError(
            "The model's adapters are merged into its base. Call poros.unprepare(model) and "
            "model.unmerge_adapter() before it is prepared."
        )


def refuse_trained(streamed: Iterable[nn.Parameter]) -> None:
    """Refuse a call with gradients if a parameter that streams wants them.

    Raises:
        StateError: one does.
    """
    if any(param.requires_grad for param in streamed):
        raise StateError(
            "A base weight that streams was set to require gradients. Call "
            "poros.unprepare(model), choose what trains, then prepare it again."
        )


def layers_hooked(layers: Iterable[nn.Module]) -> bool:
    """Whether somebody reads what passes between layers, which grouped layers do not have."""
    return any(
        not is_capture_hook(hook)
        for layer in layers
        for hooks in (layer._forward_hooks, layer._forward_pre_hooks)
        if hooks
        for hook in hooks.values()
    )


def swapped(output: Any, swaps: Mapping[int, torch.Tensor]) -> Any:
    """Put tensors behind their boundary into a decoder's output, in place of what it collected."""
    if isinstance(output, tuple):
        return tuple(swapped(item, swaps) for item in output)
    if not isinstance(output, MutableMapping):
        return swaps.get(id(output), output)
    for name, value in list(output.items()):
        if isinstance(value, tuple | torch.Tensor):
            output[name] = swapped(value, swaps)
    return output


def tuners(blocks: Iterable[Block]) -> list[Any]:
    """Return every adapter layer in some blocks, each once."""
    each = {id(block): block for block in blocks}.values()
    return [tuner for block in each for tuner in block.modules.tuners]


def uncheckpointed(
    layer: nn.Module, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Call a layer's own forward with Transformers' checkpointing off."""
    off = getattr(layer, "gradient_checkpointing", False)
    with checkpointing_off([layer]) if off else nullcontext():
        return forward(*args, **kwargs)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a compiler from tracing through the runtime."""
    compiler: Any = torch.compiler
    disabled: Callable[..., Any] = compiler.disable(function)
    return disabled


def wants_hidden_states(decoder: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller reads what passes between layers, which grouped layers do not have."""
    config: Any = decoder.config
    return any(
        kwargs.get(name) if kwargs.get(name) is not None else getattr(config, name, False)
        for name in ("output_hidden_states", "output_attentions")
    )
