"""Cross entropy over hidden states in chunks, so that no logits of a whole sequence exist.

[Note: Chunked loss]
At 32k tokens and a vocabulary of 152k, logits in float32 are 20 GB, and a loss needs three tensors
of that size. Here a chunk of tokens goes through the head, is reduced to a sum of losses and is
forgotten; the backward computes its logits again. What remains is one chunk's logits and the
hidden state's gradient. It is a loss of its own: its sums are added in another order than
Transformers', so its value is close to theirs and not the same bits. Two runs that both use it
with the same chunk are comparable bit for bit, whether or not Poros streams one of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from poros_core.errors import PrepareError, SettingsError, UnsupportedModelError
from poros_core.plan import base_model_of

__all__ = ["CHUNK", "ChunkedLoss", "chunked_cross_entropy", "chunked_loss"]

CHUNK = 1024
"""Tokens in a chunk: enough to fill a GPU with the head's product, and 0.6 GB of float32 logits at
a vocabulary of 152k."""

_MARK = "_poros_chunked_loss"
_TILED = "fused_lm_head"
"""What TRL's trainers call a model with whose head they take in tiles."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor | nn.Module,
    labels: torch.Tensor,
    *,
    chunk: int = CHUNK,
    softcap: float | None = None,
    ignore_index: int = -100,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift: bool = True,
) -> torch.Tensor:
    """Return the causal language model loss of hidden states; see [Note: Chunked loss].

    Gradients reach ``hidden`` and whatever of ``head`` trains. Autocast is followed, in the
    recompute too.

    Args:
        hidden: the decoder's output after its last norm, ``(..., tokens, width)``.
        head: the output embedding's weight, ``(vocabulary, width)``, or the module; a module is
            called once for each chunk, so adapters and hooks on it work.
        labels: token numbers, ``(..., tokens)``.
        chunk: tokens that have logits at a time.
        softcap: logits become ``softcap * tanh(logits / softcap)``, as in Gemma.
        ignore_index: the label of tokens without a loss.
        num_items_in_batch: what the sum of losses is divided by; None means the number of labels
            that are not ignored.
        shift: a token's state predicts the next token's label. Off if labels are shifted already.

    Returns:
        A scalar in float32.

    Raises:
        SettingsError: shapes do not fit, or ``chunk`` is no positive number.
    """
    _check(hidden, labels, chunk)
    labels = labels.to(hidden.device)
    if shift:
        labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    states = hidden.reshape(-1, hidden.shape[-1])
    targets = labels.reshape(-1)

    def losses(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(part, head) if isinstance(head, torch.Tensor) else head(part)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return functional.cross_entropy(
            logits.float(), target, ignore_index=ignore_index, reduction="sum"
        )

    # a plain product draws no random numbers; whatever else a head is may have dropout in it
    keep_rng = not isinstance(head, torch.Tensor) and type(head) is not nn.Linear
    parts = zip(torch.split(states, chunk), torch.split(targets, chunk), strict=True)
    sums = [
        checkpoint(losses, part, target, use_reentrant=False, preserve_rng_state=keep_rng)
        for part, target in parts
    ]
    total = torch.stack(sums).sum()
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _check(hidden: torch.Tensor, labels: torch.Tensor, chunk: int) -> None:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise SettingsError(f"chunk must be a whole number of tokens from 1 up; got {chunk!r}.")
    if hidden.shape[:-1] != labels.shape or not labels.numel():
        raise SettingsError(
            f"Hidden states of shape {tuple(hidden.shape)} need labels of shape "
            f"{tuple(hidden.shape[:-1])}, at least one; got {tuple(labels.shape)}."
        )


def chunked_loss(model: nn.Module, *, chunk: int = CHUNK) -> ChunkedLoss:
    """Make a model compute its loss in chunks whenever it is called with labels.

    Works on any Transformers causal language model, wrapped by PEFT or not, prepared by Poros or
    not, before or after it is prepared, and in any loop: ``model(**batch).loss``, ``Trainer``,
    gradient accumulation with ``num_items_in_batch``, autocast. While it is on, outputs of a call
    with labels have no ``logits`` (None); a call without labels is the model's own. TRL's trainers
    take the head in tiles by themselves, and their loss is left to them.

    Use it as a context, or call ``remove()`` on what is returned::

        with poros.chunked_loss(model, chunk=1024):
            trainer.train()

    Args:
        model: the model as it is trained.
        chunk: tokens that have logits at a time.

    Raises:
        SettingsError: ``chunk`` is no positive number, or ``model`` is no model.
        PrepareError: it is on already.
        UnsupportedModelError: the model has no output embedding or a loss of its own.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise SettingsError(f"chunk must be a whole number of tokens from 1 up; got {chunk!r}.")
    if not isinstance(model, nn.Module):
        raise SettingsError(
            f"poros.chunked_loss() takes a model, not {type(model).__name__}. Pass the "
            "Transformers model, or what peft.get_peft_model() returned."
        )
    base: Any = base_model_of(model)
    if _MARK in base.__dict__:
        raise PrepareError(
            "This model computes its loss in chunks already. Call remove() on what "
            "poros.chunked_loss() returned before you change the chunk."
        )
    _refuse(base)
    return ChunkedLoss(base, chunk)


def _refuse(base: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    name = type(base).__name__
    get = getattr(base, "get_output_embeddings", None)
    if get is None or not isinstance(get(), nn.Module):
        raise UnsupportedModelError(
            f"{name} has no output embedding, so there is no loss over a vocabulary to compute in "
            "chunks. Load the model with AutoModelForCausalLM."
        )
    if getattr(base, "loss_function", None) is not ForCausalLMLoss:
        raise UnsupportedModelError(
            f"{name} has a loss of its own, which poros.chunked_loss() would replace by plain "
            "cross entropy. Leave it out, or call poros.chunked_cross_entropy() in the loop."
        )


class ChunkedLoss:
    """The chunked loss of one model, on until ``remove`` is called or the context is left.

    Only attributes of this model's own instances are set: its ``forward``, and during a call with
    labels the ``forward`` of its output embedding, which hands the hidden states over.
    """

    def __init__(self, base: Any, chunk: int) -> None:
        self._base = base
        self._chunk = chunk
        self._found = base.__dict__.get("forward")
        self._signature = inspect.signature(base.forward)
        self._extra = next(
            (
                name
                for name, parameter in self._signature.parameters.items()
                if parameter.kind is inspect.Parameter.VAR_KEYWORD
            ),
            "",
        )
        self._original: Callable[..., Any] = base.forward
        config = base.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

        @functools.wraps(base.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        self._wrapper = forward
        base.__dict__["forward"] = forward
        base.__dict__[_MARK] = self

    def __enter__(self) -> ChunkedLoss:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Put the model's own loss back. Does nothing the second time.

        If somebody has wrapped the model's ``forward`` since, theirs stays, and calls through to
        the model's own.
        """
        if self._base.__dict__.get(_MARK) is not self:
            return
        del self._base.__dict__[_MARK]
        if self._base.__dict__.get("forward") is not self._wrapper:
            return
        if self._found is None:
            del self._base.__dict__["forward"]
        else:
            self._base.__dict__["forward"] = self._found

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._signature.bind(*args, **kwargs)
        extra = given.arguments.get(self._extra, {})
        labels = given.arguments.get("labels")
        removed = self._base.__dict__.get(_MARK) is not self
        if removed or labels is None or kwargs.get(_TILED):
            return self._original(*args, **kwargs)
        if not _is_nothing(given.arguments.get("logits_to_keep")):
            raise SettingsError(
                "logits_to_keep cuts the hidden states, and a chunked loss needs one for each "
                "label. Call the model without logits_to_keep, or without labels."
            )
        given.arguments["labels"] = None
        head = self._base.get_output_embeddings()
        with _Handover(head) as handover:
            output = self._original(*given.args, **given.kwargs)
        hidden = handover.hidden
        if hidden is None or not self._untouched(output, handover):
            raise UnsupportedModelError(
                f"{type(self._base).__name__} changes its logits after the output embedding in a "
                "way that a chunked loss does not repeat. Call poros.chunked_cross_entropy() in "
                "the loop, or leave it out."
            )
        shifted = extra.get("shift_labels")
        loss = chunked_cross_entropy(
            hidden,
            head,
            labels if shifted is None else shifted,
            chunk=self._chunk,
            softcap=self._softcap,
            ignore_index=extra.get("ignore_index", -100),
            num_items_in_batch=extra.get("num_items_in_batch"),
            shift=shifted is None,
        )
        return _with_loss(output, loss)

    def _untouched(self, output: Any, handover: _Handover) -> bool:
        """Say whether nothing but the known soft cap came between the head and the output."""
        logits = output[0] if isinstance(output, tuple) else output.logits
        return self._softcap is not None or logits is handover.instead


def _is_nothing(keep: object) -> bool:
    return keep is None or (isinstance(keep, int) and keep == 0)


def _with_loss(output: Any, loss: torch.Tensor) -> Any:
    if isinstance(output, tuple):
        return (loss, None, *output[1:])
    fields = {name: value for name, value in output.items() if name not in ("loss", "logits")}
    return type(output)(loss=loss, **fields)


class _Handover:
    """For one call, the output embedding takes hidden states and gives logits of no width."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._found = head.__dict__.get("forward")
        self.hidden: torch.Tensor | None = None
        self.instead: torch.Tensor | None = None

    def __enter__(self) -> _Handover:
        self._head.__dict__["forward"] = self._take
        return self

    def __exit__(self, *_: object) -> None:
        if self._found is None:
            del self._head.__dict__["forward"]
        else:
            self._head.__dict__["forward"] = self._found

    def _take(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        self.instead = hidden.detach()[..., :0]
        return self.instead
