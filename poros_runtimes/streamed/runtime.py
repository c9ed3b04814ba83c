"""The streamed runtime: attaches to a model, and follows its forwards and backwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from poros_core.call_state import is_capture_hook
from poros_core.errors import PrepareError, SettingsError, StateError
from poros_core.host_store import HostStore
from poros_core.log import get_logger
from poros_core.plan import BlockPlan
from poros_core.schedule import Regions, upcoming_backward, upcoming_forward
from poros_core.settings import Settings
from poros_core.stats import StepClock, tokens_in
from poros_runtimes.streamed.attach import (
    Attachments,
    checkpointing_off,
    guard_apply,
    guard_root,
)
from poros_runtimes.streamed.block import BackwardToken, Block, LayerCall, isolated
from poros_runtimes.streamed.boundary import EagerExecutor, Executor, run_block
from poros_runtimes.streamed.graphs import GraphExecutor
from poros_runtimes.streamed.lane import make_lane
from poros_runtimes.streamed.model_calls import (
    refuse_filled_cache,
    refuse_merge,
    swapped,
    tuners,
    uncheckpointed,
    uncompiled,
    wants_hidden_states,
)
from poros_runtimes.streamed.window import Window

__all__ = ["StreamedHandle"]

_log = get_logger("runtime")

_START = 2
"""Units that stay in the window between steps: what the next forward starts with. The first
computes while the second waits and the third is on its way."""


class _DecoderCall:
    """One forward of the decoder: how it groups layers, and the group that is being gathered."""

    def __init__(self, blocks: Mapping[int, Block], *, thread: bool) -> None:
        self.blocks = blocks
        self.thread = thread
        self.entered_behind: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.token = BackwardToken()
        self.pending: list[LayerCall] = []
        self.entered: torch.Tensor | None = None


class StreamedHandle:
    """A model whose base streams. Implements ``RuntimeHandle`` and ``UnitAccess``.

    [Note: The head's lifetime]
    The head is bound when the decoder's forward ends, because losses read ``lm_head.weight`` in
    ways of their own, and parked when the backward reaches the decoder's output. Several forwards
    may be waiting for their backward: it stays while any of them is. An evaluation has no
    backward, so the next forward parks it. While parked it still reads true from host memory,
    for whoever comes back to it later (``retain_graph``).
    """

    def __init__(
        self, model: nn.Module, *, plan: BlockPlan, settings: Settings, store: HostStore
    ) -> None:
        self.plan = plan
        self.clock = StepClock()
        self._store = store
        self._layers = [unit.module for unit in plan.layers]
        self._head = len(self._layers) if plan.head is not None else None
        self._head_bound = False
        self._call: _DecoderCall | None = None
        self._tokens: weakref.WeakSet[BackwardToken] = weakref.WeakSet()
        self._lowest = 0
        self._eager = EagerExecutor()
        self._graphs = _make_graphs(self._eager, plan.device, settings)
        self._executor: Executor = self._graphs or self._eager
        self._attachments = Attachments()
        self._put_back: list[Callable[[], None]] = []
        self._streamed = [param for unit in plan.units() for _, _, param in unit.places]
        self.window = self._make_window(settings)
        self._move_the_rest(model)
        self._blocks = self._make_blocks(settings)
        self._singles = self._blocks if settings.block_size == 1 else self._make_blocks(Settings())
        self._attach(model)

    # -- making it ---------------------------------------------------------------------------

    def _make_window(self, settings: Settings) -> Window:
        plan = self.plan
        images = [self._store.adopt(unit.refs) for unit in plan.layers]
        head = self._store.adopt(plan.head.refs) if plan.head is not None else None
        for table in plan.embeddings:
            self._store.adopt(table.refs)
        size = max(len(group) for group in plan.blocks(settings.block_size))
        regions = Regions.lay_out(
            [0 if image is None else image.nbytes for image in images],
            slots=max(2, 2 * size),
            head_bytes=0 if head is None else head.nbytes,
        )
        return Window(
            [*images, head],
            [*regions.layers, regions.head],
            size=regions.size,
            lane=make_lane(plan.device),
            device=plan.device,
            poison=settings.poison,
            readable=frozenset({len(images)}),
        )

    def _move_the_rest(self, model: nn.Module) -> None:
        """Everything that does not stream is small, or trains: it stands on the device."""
        device = self.plan.device
        streamed = {id(param) for param in self._streamed}
        for param in model.parameters():
            if id(param) in streamed:
                continue
            if self._store.holds((id(param), "data")):
                param.data = param.data.clone().to(device)
            elif param.device != device:
                param.data = param.data.to(device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)

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
                units=self,
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
        for tuner in tuners(self._blocks.values()):
            attachments.set(tuner, "merge", refuse_merge)
        dtypes = frozenset(param.dtype for param in self._streamed)
        for root in {id(m): m for m in (model, plan.model)}.values():
            attachments.set(root, "_apply", guard_root(root, dtypes=dtypes, device=plan.device))
        ignored = [n for n, p in model.named_parameters() if id(p) in streamed]
        attachments.set(model, "_ddp_params_and_buffers_to_ignore", ignored)

    # -- following a forward -----------------------------------------------------------------

    def _decoder_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.clock.mark(self.counters(), tokens=tokens_in(args, kwargs))
        self._begin_forward(args, kwargs)
        thread = wants_hidden_states(self.plan.decoder, kwargs)
        single = thread or self._layers_hooked()
        call = _DecoderCall(self._singles if single else self._blocks, thread=thread)
        outer, self._call = self._call, call
        try:
            with checkpointing_off(self._layers):
                output = original(*args, **kwargs)
            if call.pending:
                raise StateError(
                    "The decoder's forward ended inside a block. Prepare the model with "
                    "block_size=1."
                )
        finally:
            self._call = outer
        return self._end_forward(output, call)

    def _layers_hooked(self) -> bool:
        """Whether somebody reads what passes between layers, which grouped layers do not have."""
        return any(
            not is_capture_hook(hook)
            for layer in self._layers
            for hooks in (layer._forward_hooks, layer._forward_pre_hooks)
            if hooks
            for hook in hooks.values()
        )

    def _begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            refuse_filled_cache([*args, *kwargs.values()])
            if any(param.requires_grad for param in self._streamed):
                raise StateError(
                    "A base weight that streams was set to require gradients. Call "
                    "poros.unprepare(model), choose what trains, then prepare it again."
                )
        self._refuse_merged()
        if self._head_bound and not any(token.head for token in self._tokens):
            self._park_head()
        self.window.prefetch(upcoming_forward(-1, layers=len(self._layers), head=self._head))
        if not any(token.outstanding for token in self._tokens):
            self._lowest = len(self._layers)

    def _refuse_merged(self) -> None:
        if any(tuner.merged for tuner in tuners(self._blocks.values())):
            raise StateError(
                "The model's adapters are merged into its base. Call poros.unprepare(model) and "
                "model.unmerge_adapter() before it is prepared."
            )

    def _end_forward(self, output: Any, call: _DecoderCall) -> Any:
        token = call.token
        if self._head is not None and not self._head_bound:
            self.window.acquire(self._head)
            self._head_bound = True
        hidden: torch.Tensor = output[0]
        if token.outstanding:
            self._tokens.add(token)
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return output
        token.head = True
        self._tokens.add(token)
        bounded: torch.Tensor = _DecoderOutput.apply(self, token, hidden)  # type: ignore[no-untyped-call]
        swaps = {id(hidden): bounded}
        swaps.update((id(entered), behind) for entered, behind in call.entered_behind)
        return swapped(output, swaps)

    def _layer_forward(self, index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        this = isolated(LayerCall(index, args, kwargs), training=self._layers[index].training)
        call = self._call
        if call is None:
            return self._run(self._singles[index], hidden, [this], None)
        block = call.blocks[index]
        if call.pending:
            if hidden is not call.entered or index != call.pending[-1].layer + 1:
                call.pending.clear()
                raise StateError(
                    "Something between two layers of a block read or changed the hidden state. "
                    "Prepare the model with block_size=1."
                )
        elif index != block.layers.start:
            return self._run(self._singles[index], hidden, [this], call)
        call.pending.append(this)
        call.entered = hidden
        if index + 1 < block.layers.stop:
            return call.entered
        calls, call.pending, call.entered = call.pending, [], None
        return self._run(block, hidden, calls, call)

    def _run(
        self,
        block: Block,
        hidden: torch.Tensor,
        calls: Sequence[LayerCall],
        call: _DecoderCall | None,
    ) -> torch.Tensor:
        result = run_block(
            block,
            hidden,
            calls,
            executor=self._executor,
            shared=self.plan.shared,
            token=None if call is None else call.token,
            thread=call is not None and call.thread,
        )
        if result.hidden.requires_grad:
            self._lowest = min(self._lowest, block.layers.start)
        if call is not None and result.entered is not None:
            call.entered_behind.append((hidden, result.entered))
        return result.hidden

    # -- units ---------------------------------------------------------------------------------

    def acquire(self, layer: int, *, backward: bool) -> None:
        """Bind a layer's unit."""
        self.window.acquire(layer)

    def release(self, layer: int, *, backward: bool) -> None:
        """Park it, and copy what will be needed next."""
        self.plan.layers[layer].keep_parameters()
        self.window.release(layer)
        count = len(self._layers)
        if backward and layer <= self._lowest:
            self.window.keep_only(range(_START))
        self.window.prefetch(
            upcoming_backward(layer, lowest=self._lowest, layers=count)
            if backward
            else upcoming_forward(layer, layers=count, head=self._head)
        )

    def head_done(self, token: BackwardToken) -> None:
        """The backward of one call has reached the decoder's output."""
        token.head = False
        if self._head_bound and not any(other.head for other in self._tokens):
            self._park_head()
        count = len(self._layers)
        self.window.prefetch(upcoming_backward(count, lowest=self._lowest, layers=count))

    def _park_head(self) -> None:
        assert self._head is not None
        self.window.release(self._head)
        self._head_bound = False

    # -- the handle ----------------------------------------------------------------------------

    def detach(self, device: torch.device | None) -> None:
        """Undo everything; see ``RuntimeHandle``."""
        if any(token.outstanding for token in self._tokens):
            raise PrepareError(
                "A backward is outstanding: a loss of this model has not been backpropagated yet. "
                "Call loss.backward() or drop the loss, then unprepare."
            )
        for unit in self.plan.units():
            unit.keep_parameters()
        if self._head_bound:
            self._park_head()
        if self.plan.device.type == "cuda":
            torch.cuda.synchronize(self.plan.device)
        if self._graphs is not None:
            self._graphs.clear()
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
        return {
            "bytes_streamed": self.window.bytes_streamed,
            "copies": self.window.copies,
            "eager_blocks": self._eager.blocks,
            "graph_replays": 0 if self._graphs is None else self._graphs.replays,
            "resident_units": 0,
        }


def _make_graphs(
    eager: EagerExecutor, device: torch.device, settings: Settings
) -> GraphExecutor | None:
    if settings.graphs == "on" and device.type != "cuda":
        raise SettingsError(
            f"graphs='on' needs a CUDA device, and this model computes on {device}. Use "
            "graphs='auto' or 'off'."
        )
    if settings.graphs == "off" or device.type != "cuda":
        return None
    return GraphExecutor(eager, device)


class _DecoderOutput(torch.autograd.Function):
    """The boundary on the decoder's output; see [Note: The head's lifetime]."""

    @staticmethod
    def forward(
        ctx: Any, handle: StreamedHandle, token: BackwardToken, hidden: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.handle, ctx.token = handle, token
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        ctx.handle.head_done(ctx.token)
        return None, None, gradient
