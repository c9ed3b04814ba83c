"""Where the graph of a micro-batch is cut, so that its backward can go block by block.

[Note: Cuts]
What leaves a block is handed on without its graph. A node in its place catches the gradients that
come back, as they are, and that is where the backward of a later block ends. The block's own
backward starts from what was caught. So one run of the autograd engine covers one block and
whatever lies between it and the blocks before; it accumulates into parameters as an ordinary
backward does, and adds up what meets in the same order.

Tensors that were there before the first block, such as embeddings that train, can enter several
blocks. Their graph must be gone through once, at the end, so they are cut where they enter too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from attrs import define, field
from torch.autograd.graph import GradientEdge, get_gradient_edge

from poros_core.errors import StateError

__all__ = ["Below", "Cut", "Entry", "leaves_below"]


class _Catch(torch.autograd.Function):
    """Hands tensors on without their graph, and notes the gradients that come back."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, note: Callable[..., None], tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        # The anchor makes the results want gradients. A leaf of each tensor's own would keep its
        # memory for as long as the graph lives.
        ctx.set_materialize_grads(False)
        ctx.note = note
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.note(gradients)
        return None, None, None


def _handed_on(
    note: Callable[[Sequence[torch.Tensor | None]], None], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
    caught: tuple[torch.Tensor, ...] = _Catch.apply(anchor, note, tensors)  # type: ignore[no-untyped-call]
    return list(caught)


class _Caught:
    """Tensors that were cut, as edges of their graph, and the gradients that came back.

    Edges, not tensors: hidden states may leave the device before their backward.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.edges: list[GradientEdge] = [get_gradient_edge(tensor) for tensor in tensors]
        self.gradients: list[torch.Tensor | None] = [None] * len(tensors)

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what came back. A tensor that several backwards read gets the last reader's first."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                found = self.gradients[index]
                self.gradients[index] = gradient if found is None else found + gradient

    def take(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Return each edge that a gradient came back to, with it, and forget both."""
        pairs = zip(self.edges, self.gradients, strict=True)
        found = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        self.edges, self.gradients = [], []
        return found


@define(eq=False)
class Below:
    """What a backward reaches.

    Attributes:
        nodes: the nodes of the graph.
        leaves: its leaves, parameters among them, by identity.
        cut: whether it reaches a cut.
        known: whether it reaches a node that was known.
    """

    nodes: set[Any] = field(factory=set, repr=False)
    leaves: dict[int, torch.Tensor] = field(factory=dict, repr=False)
    cut: bool = False
    known: bool = False


class Entry:
    """What enters the blocks of one micro-batch from before them, and needs gradients."""

    def __init__(self) -> None:
        self.leaves: dict[int, torch.Tensor] = {}
        """Leaves of its graph, parameters among them, by identity."""
        self._nodes: set[Any] = set()
        self._caught: list[_Caught] = []

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut a tensor if it is from before the blocks; return it as it is if it is not.

        Raises:
            StateError: its graph goes back to a block and to something else that trains.
        """
        edge = get_gradient_edge(tensor)
        if isinstance(edge.node, _catching()):
            return tensor
        below = leaves_below([edge], known=self._nodes)
        if not below.cut:
            self.leaves.update(below.leaves)
            self._nodes |= below.nodes
            self._caught.append(_Caught([tensor]))
            return _handed_on(self._caught[-1].note, [tensor])[0]
        if below.leaves or below.known:
            raise StateError(
                "Between two blocks this model joins the hidden state with something else that "
                "trains, so gradients would not be added in the order of an ordinary loop. Use "
                "the ordinary loop: (model(**batch).loss * scale).backward() for each micro-batch."
            )
        return tensor

    def backward(self) -> None:
        """Go on with all gradients that came back from blocks, the last block's first."""
        found = [pair for caught in reversed(self._caught) for pair in caught.take()]
        self._caught.clear()
        self._nodes.clear()
        _backward(found)


class Cut:
    """The cuts around one block for one micro-batch."""

    def __init__(self, entry: Entry) -> None:
        """Make cuts that nothing has passed yet.

        Args:
            entry: takes what enters from before the blocks.
        """
        self._entry = entry
        self._caught: _Caught | None = None

    def enter(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the block is to be given for these tensors."""
        # last first: the first is the hidden state, whose gradient comes first in a backward
        cut = [self._entry.cut(t) if t.requires_grad else t for t in reversed(tensors)]
        return cut[::-1]

    def leave(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is handed on in place of the block's results."""
        places = [index for index, result in enumerate(results) if result.requires_grad]
        handed = list(results)
        if not places:
            return handed
        carried = [results[index] for index in places]
        self._caught = _Caught(carried)
        for index, tensor in zip(places, _handed_on(self._caught.note, carried), strict=True):
            handed[index] = tensor
        return handed

    @property
    def wanted(self) -> bool:
        """Whether a gradient came back, so that the block must be differentiated."""
        return self._caught is not None and any(g is not None for g in self._caught.gradients)

    def backward(self) -> None:
        """Differentiate the block, and what lies before it up to the next cuts."""
        assert self._caught is not None
        _backward(self._caught.take())


def _backward(found: Sequence[tuple[GradientEdge, torch.Tensor]]) -> None:
    if found:
        edges, gradients = zip(*found, strict=True)
        torch.autograd.backward(edges, gradients)


def leaves_below(edges: Iterable[GradientEdge], *, known: Container[Any] = ()) -> Below:
    """Walk down a graph.

    Args:
        edges: where a backward starts.
        known: nodes at which the walk turns back.
    """
    below = Below()
    nodes: list[Any] = [edge.node for edge in edges]
    while nodes:
        node = nodes.pop()
        if node in below.nodes:
            continue
        if node in known:
            below.known = True
            continue
        if isinstance(node, _catching()):
            below.cut = True
            continue
        below.nodes.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            below.leaves[id(node.variable)] = node.variable
        nodes += [following for following, _ in node.next_functions if following is not None]
    return below


def _catching() -> type:
    backward: type = _Catch._backward_cls
    return backward
