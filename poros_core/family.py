"""What an architecture plugin says: the one value a family is.

A family holds only what differs from one architecture to the next. It is plain data plus a few
functions, and importing the file that defines it needs neither torch nor transformers, so that
``poros list-families`` and ``poros check`` work in a base install.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen, validators

from poros_core.errors import PrepareError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Family", "decoder_layers", "decoder_of"]


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that runs the decoder layers, by Transformers' own ``get_decoder``.

    Args:
        model: the Transformers model, without PEFT's wrapping.

    Raises:
        PrepareError: the model has no ``get_decoder``.
    """
    get: Any = getattr(model, "get_decoder", None)
    if get is None:
        raise PrepareError(
            f"{type(model).__name__} has no get_decoder(), so its decoder must be named: give the "
            "family decoder=lambda model: ..."
        )
    decoder: nn.Module = get()
    return decoder


def decoder_layers(decoder: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder's layers in the order in which its forward calls them.

    Raises:
        PrepareError: the decoder has no ``layers``.
    """
    if not hasattr(decoder, "layers"):
        raise PrepareError(
            f"{type(decoder).__name__} has no layers, so where they are must be named: give the "
            "family layers=lambda decoder: ..., or decoder=lambda model: ... if this is not the "
            "module that calls them."
        )
    layers: Sequence[nn.Module] = decoder.layers  # type: ignore[assignment]
    return layers


def _no_breaks(decoder: nn.Module) -> Collection[int]:
    return ()


def _accept(config: Mapping[str, Any]) -> str | None:
    return None


@frozen(kw_only=True)
class Family:
    """One architecture family.

    Attributes:
        name: what ``--family`` and records call it, for example ``"qwen2"``.
        title: what a person calls it, for example ``"Qwen2.5"``.
        model_types: the ``model_type`` values of a Transformers config that it covers.
        shapes: published and tiny shapes, by name. Each is a Transformers config as a plain
            mapping with ``model_type`` in it; ``"tiny"`` must be there and trains on a CPU in
            seconds.
        refuse: called with the config as a mapping; returns None, or one sentence that says why
            this variant is not covered and what to do instead.
        decoder: called with the Transformers model (PEFT's wrapping removed); returns the module
            whose forward runs the layers and whose output is the last hidden state.
        layers: called with the decoder; returns its layers in the order of their calls. Each
            takes the hidden state ``[batch, sequence, hidden]`` first and returns the next one.
        shared: keywords of a layer's forward whose value is a mutable mapping through which
            layers hand tensors to later layers (shared keys and values, for example).
        breaks: called with the decoder; returns the numbers of the layers that must begin a block
            because the decoder changes the hidden state before them.
        weights: called with the config as a mapping; returns the shapes of the text decoder's
            weights and of its head, if it has one of its own, by their names in a text-only
            model. None: ``poros plan`` needs a checkpoint's headers for this family.
    """

    name: str = field(validator=validators.matches_re(r"[a-z0-9][a-z0-9_.\-]*"))
    title: str
    model_types: tuple[str, ...] = field(validator=validators.min_len(1))
    shapes: Mapping[str, Mapping[str, Any]] = field(repr=False)
    refuse: Callable[[Mapping[str, Any]], str | None] = field(default=_accept, repr=False)
    decoder: Callable[[nn.Module], nn.Module] = field(default=decoder_of, repr=False)
    layers: Callable[[nn.Module], Sequence[nn.Module]] = field(default=decoder_layers, repr=False)
    shared: tuple[str, ...] = ()
    breaks: Callable[[nn.Module], Collection[int]] = field(default=_no_breaks, repr=False)
    weights: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] | None = field(
        default=None, repr=False
    )
