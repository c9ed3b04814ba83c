"""The streamed runtime: attaches to a model, and follows its forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from poros_core.errors import PrepareError, SettingsError, StateError
from poros_core.host_store import HostStore
from poros_core.plan import BlockPlan
from poros_core.rest import move_the_rest
from poros_core.settings import Settings
from poros_core.stats import StepClock, tokens_in
from poros_runtimes.streamed.attach import (
    Attachments,
    checkpointing_off,
    guard_apply,
    guard_root,
)
from poros_runtimes.streamed.block import Block, LayerCall
from poros_runtimes.streamed.block_major import BlockMajor
from poros_runtimes.streamed.boundary import BlockResult, run_block
from poros_runtimes.streamed.caches import isolated
from poros_runtimes.streamed.counts import attach_counts
from poros_runtimes.streamed.cuts import Cut
from poros_runtimes.streamed.decoder_call import DecoderCall, Followed, bounded
from poros_runtimes.streamed.micro_batch import MicroBatch
from poros_runtimes.streamed.model_calls import (
    layers_hooked,
    refuse_filled_cache,
    refuse_merge,
    refuse_merged,
    refuse_trained,
    refuse_unload,
    swapped,
    tuners,
    uncheckpointed,
    uncompiled,
    wants_hidden_states,
)
from poros_runtimes.streamed.units import Units
from poros_runtimes.streamed.walks import attach_walks

__all__ = ["StreamedHandle"]


class StreamedHandle:
    """A model whose base streams. Implements ``RuntimeHandle``."""

    def __init__(
        self, model: nn.Module, *, plan: BlockPlan, settings: Settings, store: HostStore
    ) -> None:
        self.plan = plan
        self.clock = StepClock()
        self._store = store
        self._layers = [unit.module for unit in plan.layers]
        self._followed = Followed()
        self._accumulating = False
        self._attachments = Attachments()
        self._put_back: list[Callable[[], None]] = []
        self._streamed = [param for unit in plan.units() for _, _, param in unit.places]
        _check_graphs(settings, plan.device)
        _check_copy_ahead(settings, store)
        self.units = Units(plan, settings=settings, store=store)
        self._move_the_rest(model)
        self._blocks = self._make_blocks(settings)
        self._singles = self._blocks if settings.block_size == 1 else self._make_blocks(Settings())
        self._attach(model)

    # -- making it ---------------------------------------------------------------------------

    def _move_the_rest(self, model: nn.Module) -> None:
        """Everything that does not stream is small, or trains: it stands on the device."""
        move_the_rest(
            model,
            codecs=self.plan.codecs,
            streamed={id(param) for param in self._streamed},
            device=self.plan.device,
            held=self._store.holds,
        )

    def _make_blocks(self, settings: Settings) -> dict[int, Block]:
        streamed = frozenset(id(param) for param in self._streamed)
        blocks: dict[int, Block] = {}
        for group in self.plan.blocks(settings.block_size):
            modules = [self._layers[index] for index in group]
            block = Block(
                group,
                modules=modules,
                forwards=[partial(uncheckpointed, m, m.forward) for m in modules],
                streamed=streamed,
                units=self.units,
            )
            blocks.update(dict.fromkeys(group, block))
        return blocks

    def _attach(self, model: nn.Module) -> None:
        attachments, plan = self._attachments, self.plan
        streamed = frozenset(id(param) for param in self._streamed)
        for index, layer in enumerate(self._layers):
            attachments.set(layer, "forward", partial(self._layer_forward, index))
        attachments.set(
            plan.decoder,
            "forward",
            uncompiled(partial(self._decoder_forward, plan.decoder.forward)),
        )
        owners = {id(owner): owner for unit in plan.units() for owner, _, _ in unit.places}
        for owner in owners.values():
            guard = guard_apply(owner, streamed=streamed, device=plan.device)
            attachments.set(owner, "_apply", guard)
            self._put_back += [codec.keep_layout(owner) for codec in plan.codecs]
        for owner in {owner for owner, *_ in plan.head.places} if plan.head is not None else ():
            hook = owner.register_forward_hook(uncompiled(self.units.after_product))
            self._put_back.append(hook.remove)
        for tuner in tuners(self._blocks.values()):
            attachments.set(tuner, "merge", refuse_merge)
        for module in model.modules():
            if hasattr(type(module), "unload"):  # what PEFT wraps a model in
                attachments.set(module, "unload", refuse_unload)
        dtypes = frozenset(param.dtype for param in self._streamed)
        for root in {id(m): m for m in (model, plan.model)}.values():
            attachments.set(root, "_apply", guard_root(root, dtypes=dtypes, device=plan.device))
        ignored = [n for n, p in model.named_parameters() if id(p) in streamed]
        attachments.set(model, "_ddp_params_and_buffers_to_ignore", ignored)
        attach_walks(attachments, [model, plan.model], layers=self._layers)
        attach_counts(attachments, [model, plan.model], streamed=streamed)

    # -- following a forward -----------------------------------------------------------------

    def _decoder_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        followed = self._followed
        part = followed.part if torch.is_grad_enabled() else None
        thread = wants_hidden_states(self.plan.decoder, kwargs)
        single = thread or layers_hooked(self._layers)
        blocks = self._singles if single else self._blocks
        call = DecoderCall(blocks, thread=thread, part=part)
        self._begin_forward(call, args, kwargs)
        outer, followed.call = followed.call, call
        try:
            with checkpointing_off(self._layers):
                output = original(*args, **kwargs)
            call.refuse_pending()
        finally:
            followed.call = outer
        return self._end_forward(output, call)

    def _begin_forward(
        self, call: DecoderCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        tokens = tokens_in(args, kwargs)
        if torch.is_grad_enabled():
            refuse_filled_cache([*args, *kwargs.values()])
            refuse_trained(self._streamed)
        refuse_merged(self._blocks.values())
        if torch.is_grad_enabled() and call.part is None:
            self._mark(tokens)
        if call.part is None:
            self.units.begin_forward(tokens=tokens)
        else:
            call.part.begin(call.token, tokens=tokens)

    def _mark(self, tokens: int) -> None:
        """Tell the clock that a step with so many tokens starts."""
        self.clock.mark(self.counters(), tokens=tokens, stalled=self.units.stalled_seconds)

    def _end_forward(self, output: Any, call: DecoderCall) -> Any:
        hidden: torch.Tensor = output[0]
        backward = torch.is_grad_enabled() and hidden.requires_grad
        if call.part is None:
            self.units.end_forward(call.token, backward=backward)
        else:
            call.part.at_end(backward=backward)
        if not backward:
            return output
        swaps = {id(hidden): bounded(self.units, call.token, hidden)}
        swaps.update((id(entered), behind) for entered, behind in call.entered_behind)
        return swapped(output, swaps)

    def _layer_forward(self, index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        this = isolated(
            LayerCall(index, args, kwargs),
            training=self._layers[index].training,
            device=self.plan.device,
        )
        call = self._followed.call
        if call is None:
            return self._run(self._singles[index], hidden, [this], None)
        block = call.blocks[index]
        if not call.pending and index != block.layers.start:
            return self._run(self._singles[index], hidden, [this], call)
        calls = call.gather(this, hidden)
        return hidden if calls is None else self._run(block, hidden, calls, call)

    def _run(
        self,
        block: Block,
        hidden: torch.Tensor,
        calls: Sequence[LayerCall],
        call: DecoderCall | None,
    ) -> torch.Tensor:
        run = partial(self._run_block, block, hidden, calls, call)
        part = None if call is None else call.part
        result = run() if part is None else part.at_block(block, run)
        if call is not None and result.entered is not None:
            call.entered_behind.append((hidden, result.entered))
        return result.hidden

    def _run_block(
        self,
        block: Block,
        hidden: torch.Tensor,
        calls: Sequence[LayerCall],
        call: DecoderCall | None,
        cut: Cut | None = None,
    ) -> BlockResult:
        result = run_block(
            block,
            hidden,
            calls,
            executor=self.units.executor,
            activations=self.units.activations,
            shared=self.plan.shared,
            token=None if call is None else call.token,
            thread=call is not None and call.thread,
            cut=cut,
        )
        if result.hidden.requires_grad:
            self.units.wants_backward(block.layers.start)
        return result

    # -- several micro-batches -----------------------------------------------------------------

    def accumulate(
        self, losses: Sequence[Callable[[], torch.Tensor]], *, scale: float | None
    ) -> list[torch.Tensor]:
        """Accumulate the gradients of some micro-batches; see ``Accumulating``."""
        if self._accumulating:
            raise StateError(
                "poros.accumulate() was called inside of a loss that poros.accumulate() is "
                "computing. Give all micro-batches to one call."
            )

        def follow(loss: Callable[[], torch.Tensor], part: MicroBatch) -> torch.Tensor:
            self._followed.part = part
            return loss()

        self._accumulating = True
        try:
            parts = [
                MicroBatch(partial(follow, loss), number=number, device=self.plan.device)
                for number, loss in enumerate(losses)
            ]
            self.units.begin_forward()
            return BlockMajor(
                parts,
                units=self.units,
                model=self.plan.model,
                layers=self._layers,
                mark=self._mark,
            ).run(scale=scale)
        finally:
            self._accumulating = False

    # -- the handle ----------------------------------------------------------------------------

    def detach(self, device: torch.device | None) -> None:
        """Undo everything; see ``RuntimeHandle``."""
        if self.units.outstanding:
            raise PrepareError(
                "A backward is outstanding: a loss of this model has not been backpropagated yet. "
                "Call loss.backward() or drop the loss, then unprepare."
            )
        self.units.close()
        self._attachments.undo()
        for put_back in self._put_back:
            put_back()
        self._store.restore(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedHandle:
        raise StateError(
            "A prepared model cannot be copied: its base stands in Poros' host store. Copy the "
            "adapters (peft.get_peft_model_state_dict(model)), or call poros.unprepare(model) "
            "first."
        )

    def counters(self) -> Mapping[str, int]:
        """Return running totals; see ``RuntimeHandle``."""
        kept = self.units.activations
        out, back = (0, 0) if kept is None else (kept.bytes_out, kept.bytes_back)
        ahead = self.units.window.ahead
        sooner, copies = (0, 0) if ahead is None else (ahead.bytes_copied, ahead.copies)
        return {
            "activation_bytes": out + back,
            "bytes_streamed": self.units.window.bytes_streamed + sooner + back,
            "copies": self.units.window.copies + copies,
            "eager_blocks": self.units.eager.blocks,
            "graph_replays": 0 if self.units.graphs is None else self.units.graphs.replays,
            "resident_units": len(self.units.resident),
        }


def _check_copy_ahead(settings: Settings, store: HostStore) -> None:
    if settings.copy_ahead and store.ring is not None:
        raise SettingsError(
            "copy_ahead needs a base in page-locked memory, and this one comes through a ring of "
            "buffers, which are as many as its slots need. Load it with host='pinned', or leave "
            "copy_ahead=True out."
        )


def _check_graphs(settings: Settings, device: torch.device) -> None:
    if settings.graphs == "on" and device.type != "cuda":
        raise SettingsError(
            f"graphs='on' needs a CUDA device, and this model computes on {device}. Use "
            "graphs='auto' or 'off'."
        )
