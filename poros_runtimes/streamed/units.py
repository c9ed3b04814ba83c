"""When units are bound and copied: follows a model's forwards and backwards through its window.

[Note: The head's lifetime]
The head is bound when the decoder's forward ends, because losses read ``lm_head.weight`` in ways of
their own, and parked when the backward reaches the decoder's output. Meanwhile it holds the memory
in which layers compute; see [Note: One arena]. A plain loop never notices. If layers must run
while a loss may still read the head, because a second forward comes before the first backward, or
because a graph is retained for another one, the layers move out to slots of their own, and stay
there: what autograd saved of the head goes by its address, so the head cannot move. An evaluation
has no backward, so the next forward parks the head. While parked it still reads true from host
memory.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch

from poros_core.host_store import HostStore
from poros_core.plan import BlockPlan
from poros_core.schedule import upcoming_backward, upcoming_forward
from poros_core.settings import Settings
from poros_core.workspaces import drop_workspaces
from poros_runtimes.streamed.activations import HostActivations
from poros_runtimes.streamed.ahead import Ahead, IdleMemory
from poros_runtimes.streamed.arena import Arena, GraphArena
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.boundary import graph_is_retained
from poros_runtimes.streamed.budget import Budget
from poros_runtimes.streamed.capture import CudaCapturer
from poros_runtimes.streamed.executor import EagerExecutor, Executor
from poros_runtimes.streamed.first_steps import FirstSteps
from poros_runtimes.streamed.graphs import GraphExecutor
from poros_runtimes.streamed.lane import make_lane
from poros_runtimes.streamed.lending import ArenaLender
from poros_runtimes.streamed.residency import Residency
from poros_runtimes.streamed.unit_memory import UnitMemory
from poros_runtimes.streamed.unit_sizes import UnitSizes

__all__ = ["Units"]


class Units:
    """The units of one model, and the executor whose graphs are tied to their addresses.
    Implements ``UnitAccess``."""

    def __init__(self, plan: BlockPlan, *, settings: Settings, store: HostStore) -> None:
        """Move the base into the host store, and make the window.

        Args:
            plan: the units.
            settings: how the model is prepared.
            store: where the base goes.
        """
        self._plan = plan
        self._count = len(plan.layers)
        self._head = self._count if plan.head is not None else None
        self._head_bound = False
        self._tokens: weakref.WeakSet[BackwardToken] = weakref.WeakSet()
        self._lowest = 0
        images = [store.adopt(unit.refs) for unit in plan.layers]
        head = store.adopt(plan.head.refs) if plan.head is not None else None
        for table in plan.embeddings:
            store.adopt(table.refs)
        size = max(len(group) for group in plan.blocks(settings.block_size))
        lane = make_lane(plan.device)
        self.activations: HostActivations | None = None
        if settings.offload_activations:
            self.activations = HostActivations(
                plan.device, layers=self._count, lane=lane, poison=settings.poison
            )
        self._on_cuda = plan.device.type == "cuda"
        self.memory = UnitMemory(
            images,
            head,
            slots=max(2, 2 * size),
            lane=lane,
            device=plan.device,
            graphs=settings.graphs != "off" and self._on_cuda,
            poison=settings.poison,
        )
        self.window = self.memory.window
        self._residency: Residency | None = None
        budget: Budget | None = None
        if settings.vram_budget is not None:
            budget = Budget(settings.vram_budget, plan.device)
            self._residency = Residency(budget, self.memory, layers=self._count)
        steps = None if budget is None else budget.optimizer_steps
        self._first = FirstSteps(plan.model, plan.device, optimizer_steps=steps)
        if settings.copy_ahead:
            self.window.ahead = Ahead(
                IdleMemory(plan.device),
                lane=make_lane(plan.device),
                nbytes=max(self.sizes.layers, default=0),
                poison=settings.poison,
            )
        self.eager = EagerExecutor()
        self.graphs: GraphExecutor | None = None
        self._capturer: CudaCapturer | None = None
        if isinstance(self.memory.arena, GraphArena):
            arena, first = self.memory.arena, self._first
            self._capturer = CudaCapturer(
                arena,
                device=plan.device,
                lends=first.going_on,
                allows=None if budget is None else partial(budget.has_room, graphs=2 * self._count),
            )
            self.graphs = GraphExecutor(
                self.eager,
                plan.device,
                self._capturer,
                first.eager,
                settled=lambda: not first.going_on(),
            )
            if self._residency is not None:
                self._residency.counts(self.graphs)
        self.lender = ArenaLender(
            self.memory,
            plan.model,
            device=plan.device,
            budget=budget,
            unused=self._unused,
            moved=self._capture_in,
        )

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._plan.device

    @property
    def executor(self) -> Executor:
        """What runs blocks."""
        return self.graphs or self.eager

    @property
    def sizes(self) -> UnitSizes:
        """The sizes of the units."""
        return self.memory.sizes

    @property
    def shared(self) -> bool:
        """Whether head and layers share the arena; see [Note: One arena]."""
        return self.memory.shared

    @property
    def resident(self) -> frozenset[int]:
        """Layers that stay on the device."""
        return self.memory.resident

    @property
    def stalled_seconds(self) -> float | None:
        """How long kernels waited for copies so far; see ``Lane``."""
        found = self.window.stalled_seconds
        if found is None or self.activations is None:
            return found
        return found + (self.activations.stalled_seconds or 0.0)

    @property
    def outstanding(self) -> bool:
        """Whether a backward is still to come."""
        return any(token.outstanding for token in self._tokens)

    # -- a forward -----------------------------------------------------------------------------

    def begin_forward(self, *, tokens: int = 0) -> None:
        """A forward of the decoder starts: copy what it starts with.

        Args:
            tokens: how many it takes; 0 if that is not known, and nothing is copied ahead.
        """
        ahead = self.window.ahead
        if ahead is not None:
            ahead.begin_forward(tokens, outstanding=self.outstanding)
        self._make_room()
        if torch.is_grad_enabled():
            measured = self._first.forward()
            residency, outstanding = self._residency, self.outstanding
            if residency and residency.forward(measured=measured, outstanding=outstanding):
                self._capture_in(self.memory.arena)
        self.window.prefetch(self._upcoming_forward(-1))
        if not self.outstanding:
            self._lowest = self._count

    def wants_backward(self, first: int) -> None:
        """The block that starts with layer ``first`` will be differentiated."""
        self._lowest = min(self._lowest, first)

    def end_forward(self, token: BackwardToken, *, backward: bool) -> None:
        """The decoder's forward ended: bind the head.

        Args:
            token: the call's.
            backward: whether a backward will come to the decoder's output.
        """
        self._end_ahead()
        if self._head is not None and not self._head_bound:
            self.lender.have()
            if self.shared and not self.memory.shareable and self._capturer is not None:
                self._capturer.settle()  # what an exception kept alive there may be gone
            if self.shared and not self.memory.shareable:
                self._move_head()
            self.window.acquire(self._head)
            self._head_bound = True
        if self.graphs is not None:
            self.graphs.end_forward()
        token.head = backward
        if token.outstanding:
            self._tokens.add(token)
            self.after_product()
            self._first.turn()

    def after_product(self, *args: object) -> None:
        """Free what cuBLAS worked in. The loss is where the peak is, so it is done at both ends of
        the head's product; a workspace left from its backward would lie, until the next loss, in
        the middle of memory that is as large as logits."""
        if self._on_cuda and not torch.cuda.is_current_stream_capturing():
            drop_workspaces()

    def head_done(self, token: BackwardToken) -> None:
        """The backward of one call has reached the decoder's output."""
        token.head = False
        self.after_product()
        self._first.turn()
        if self.shared and self._head_bound and graph_is_retained():
            self._move_layers("a graph is retained for another backward")
        if self._head_bound and not any(other.head for other in self._tokens):
            self.park_head()
        ahead, more = self.window.ahead, any(other.head for other in self._tokens)
        if ahead is not None and not more and not self._first.going_on():
            ahead.start()
        self.window.prefetch(
            upcoming_backward(self._count, lowest=self._lowest, layers=self._count)
        )

    # -- units ---------------------------------------------------------------------------------

    def acquire(self, layer: int, *, backward: bool) -> None:
        """Bind a layer's unit."""
        self._make_room()
        self.window.acquire(layer)

    def release(self, layer: int, *, backward: bool) -> None:
        """Park it, and copy what will be needed next."""
        try:
            self._plan.layers[layer].keep_parameters()
        finally:
            self.window.release(layer)
        if backward and layer <= self._lowest:
            self.window.keep_only(self.memory.kept)
            self._first.backward()
            self._extend_ahead()
        self.window.prefetch(
            upcoming_backward(layer, lowest=self._lowest, layers=self._count)
            if backward
            else self._upcoming_forward(layer)
        )

    def _upcoming_forward(self, layer: int) -> list[int]:
        # A head that shares the arena would only be vacated for the next layer, a resident too.
        early = not self.shared or (self.memory.shareable and layer + 1 == self._count)
        return upcoming_forward(layer, layers=self._count, head=self._head if early else None)

    def park_head(self) -> None:
        """Park the head, if it is bound."""
        if not self._head_bound:
            return
        assert self._head is not None
        assert self._plan.head is not None
        self.window.release(self._head)
        self._head_bound = False
        if self.shared:
            # Layers will be copied over it. A backward that still reads it would be told so.
            weights = [param for _, _, param in self._plan.head.places]
            torch.autograd.graph.increment_version(weights)

    def _make_room(self) -> None:
        """See that layers can run: the head is not where they compute."""
        self.lender.have()
        if not self.shared:
            if self._head_bound and not any(token.head for token in self._tokens):
                self.park_head()
            return
        if self._head_bound:
            if any(token.head for token in self._tokens):
                self._move_layers("several forwards before a backward")
                return
            self.park_head()
        assert self._head is not None
        self.window.vacate(self._head)

    def _end_ahead(self) -> None:
        """Give back what units that wait for a slot lie in."""
        if self.window.ahead is not None:
            self.window.ahead.end()

    def _extend_ahead(self) -> None:
        """Let more units wait, if the backward that ends is the last one to come. Not under a
        budget: an optimizer that finds too little would have more reserved."""
        ahead = self.window.ahead if self._residency is None else None
        last = sum(token.outstanding for token in self._tokens) <= 1
        if ahead is not None and last and not graph_is_retained():
            ahead.extend()

    # -- the arena -----------------------------------------------------------------------------

    def _capture_in(self, arena: Arena | None) -> None:
        """Drop all graphs, since units move, and capture new ones in ``arena``."""
        if self.graphs is not None:
            self.graphs.clear()
        if self._capturer is not None:
            self._capturer.use(arena if isinstance(arena, GraphArena) else None)

    @torch.inference_mode(False)
    def _move_layers(self, reason: str) -> None:
        self.memory.move_layers(reason)
        self._capture_in(self.memory.arena)

    @torch.inference_mode(False)
    def _move_head(self) -> None:
        self.memory.move_head("a graph left a tensor in the arena")

    def _unused(self) -> bool:
        """Park a head that only an evaluation had, and say whether nothing of the arena is needed
        before the next forward."""
        if self._head_bound and not self.outstanding:
            self.park_head()
        return not self._head_bound and not self.outstanding

    def close(self) -> None:
        """Park everything, and let the device finish."""
        self.lender.reclaim()
        self._end_ahead()
        for unit in self._plan.units():
            unit.keep_parameters()
        self.park_head()
        if self._on_cuda:
            torch.cuda.synchronize(self._plan.device)
        if self.graphs is not None:
            self.graphs.clear()
