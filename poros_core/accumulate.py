"""Gradient accumulation for which the base streams twice a step, however many micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from poros_core.errors import PrepareError, SettingsError, StateError
from poros_core.prepare import prepared_of

__all__ = ["Accumulating", "accumulate"]

_RATES = ("attention_dropout", "dropout")
"""Attributes in which Transformers' modules keep rates that they pass to functions."""


@runtime_checkable
class Accumulating(Protocol):
    """A runtime's handle that can take several micro-batches block by block."""

    def accumulate(
        self, losses: Sequence[Callable[[], torch.Tensor]], *, scale: float | None
    ) -> list[torch.Tensor]:
        """Accumulate into ``.grad`` what an ordinary loop would.

        Args:
            losses: each computes the loss of one micro-batch, with one forward of the model.
            scale: of each loss before its backward; None divides it by their number.

        Returns:
            The losses in order, detached and not scaled.
        """
        ...


def accumulate(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    scale: float | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Accumulate the gradients of an optimizer step's micro-batches, block by block.

    An ordinary loop copies each layer of the base twice for every micro-batch. Here a layer is
    copied once for the forward of all micro-batches and once for their backward. Gradients are
    bit for bit those of ::

        for batch in batches:
            (model(**batch).loss / len(batches)).backward()

    Clipping, the optimizer's step and zeroing gradients stay the caller's. Each micro-batch keeps
    its hidden states between blocks until its backward; with
    ``poros.prepare(..., offload_activations=True)`` most of them are on the host meanwhile. Logits
    are there of one micro-batch at a time.

    Nothing may be random: dropout in a model that trains is refused, and whatever else draws random
    numbers too. Autocast can be entered around the call, or in ``loss``. Each ``loss`` runs in a
    thread of its own, but never two at the same time; all of them have begun before the first ends,
    so none may hold a lock while it calls the model.

    Args:
        model: the object that was given to ``prepare``.
        batches: the micro-batches: mappings of what the model is called with, labels among it, or
            whatever ``loss`` takes.
        scale: what each loss is multiplied by before its backward; None divides it by the number of
            micro-batches, as ordinary loops do.
        loss: computes a micro-batch's loss, given the model and the micro-batch, with one forward
            that wants gradients; None means ``model(**batch).loss``.

    Returns:
        The losses in order, detached and not scaled.

    Raises:
        PrepareError: the model is not prepared.
        SettingsError: there is no micro-batch, one is not a mapping, or ``loss`` is no function.
        StateError: gradients are off, something is random, or a parameter is used in such a way
            that gradients would be added in another order than in an ordinary loop.
    """
    prepared = prepared_of(model) if isinstance(model, nn.Module) else None
    if prepared is None:
        raise PrepareError(
            "This model is not prepared, so nothing streams that could be spared. Pass the object "
            "that poros.prepare() was given, or use an ordinary loop."
        )
    handle = prepared.handle
    if not isinstance(handle, Accumulating):
        raise PrepareError(
            f"Runtime '{prepared.settings.runtime}' cannot take several micro-batches block by "
            "block. Prepare the model with runtime='streamed', or use an ordinary loop."
        )
    _check(batches, scale, loss)
    refuse_dropout(model)
    compute = _own_loss if loss is None else loss
    return handle.accumulate([partial(compute, model, batch) for batch in batches], scale=scale)


def refuse_dropout(model: nn.Module) -> None:
    """Refuse a model that drops at random as it trains.

    Raises:
        StateError: a module does, which it names.
    """
    for name, rate in dropouts(model):
        raise StateError(
            f"'{name}' has a dropout of {rate}, and the model trains. Block by block the random "
            "numbers come to other micro-batches than in an ordinary loop, so no bits could be "
            "promised. Set dropout to 0 (lora_dropout of the LoraConfig, attention_dropout of the "
            "model's config), or use the ordinary loop: (model(**batch).loss * scale).backward() "
            "for each micro-batch."
        )


def dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield name and rate of every module that drops at random as it is now."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        rates = [getattr(module, attribute, None) for attribute in _RATES]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(module.p)
        yield from ((name, rate) for rate in rates if isinstance(rate, int | float) and rate > 0)


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _check(batches: object, scale: object, loss: object) -> None:
    if not torch.is_grad_enabled():
        raise StateError(
            "poros.accumulate() computes gradients, and they are off. Call it outside of "
            "torch.no_grad()."
        )
    if isinstance(batches, str | Mapping) or not isinstance(batches, Sequence) or not batches:
        raise SettingsError(
            "batches must be a sequence of one micro-batch or more, such as a list of the "
            f"mappings that the model is called with; got {_told(batches)}."
        )
    odd = next((batch for batch in batches if not isinstance(batch, Mapping)), None)
    if odd is not None and loss is None:
        raise SettingsError(
            f"Each micro-batch must be a mapping of what the model is called with; got {_told(odd)}"
            ". Pass loss= for other kinds: it is called with the model and the micro-batch."
        )
    if loss is not None and not callable(loss):
        raise SettingsError(
            "loss must be a function that is called with the model and a micro-batch and returns "
            f"the loss, or None for model(**batch).loss; got {loss!r}."
        )
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise SettingsError(f"scale must be a number, or None; got {scale!r}.")


def _told(value: object) -> str:
    return "an empty sequence" if value in ([], ()) else f"a {type(value).__name__}"
