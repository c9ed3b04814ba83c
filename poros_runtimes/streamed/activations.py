"""The hidden states between blocks, in host memory between a block's forward and its backward.

[Note: Boundary activations on the host]
With ``offload_activations`` the hidden state that enters a block is copied to page-locked host
memory while the block's forward runs, on a stream of its own: units come the other way at the same
time. It is let go when the next block's forward starts, behind a wait of the compute stream for
the copy. Recording the copy stream with the allocator instead would keep the memory until the
device has caught up with the host, which may be a whole step later, and boundaries would pile up
after all. In the backward a hidden state comes back on the stream that units come on, into fresh
memory with the strides that it had, while the two blocks above it are differentiated. So the device
holds at most three of them between blocks, however deep the model.

What stays on the device: the input of the last block, which its backward needs at once; with
``output_hidden_states=True`` every input, since the caller holds them anyway; a tensor with gaps;
a layer that is called outside the decoder; and all that crosses a block beside the hidden state.

In its place autograd saves an empty tensor that shares its version counter. So a change of the
hidden state in place is an error in the backward, as for any saved tensor. The host copy lives
until a backward that does not retain the graph has used it, or the graph is dropped.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from attrs import define, field

from poros_runtimes.streamed.activation_memory import ActivationMemory, HostStretch
from poros_runtimes.streamed.backward_token import BackwardToken
from poros_runtimes.streamed.buffers import span_of
from poros_runtimes.streamed.lane import POISON, Event, Lane, make_lane
from poros_runtimes.streamed.signature import Layout, layout_of

__all__ = ["HostActivations", "KeptActivation"]

_AHEAD = 2
"""Hidden states on their way back while a block is differentiated. They share a stream with units,
so one may have to wait behind a unit that takes longer than a block computes."""


@define(eq=False)
class _Flight:
    """Device memory that a copy reads or writes, and the event that the copy is done."""

    tensor: torch.Tensor = field(repr=False)
    event: Event


class KeptActivation:
    """The hidden state that entered one block, in host memory.

    Attributes:
        stand_in: an empty tensor with the hidden state's version counter, for autograd to save.
    """

    def __init__(
        self,
        stretch: HostStretch,
        layout: Layout,
        *,
        stand_in: torch.Tensor,
        before: KeptActivation | None,
        back: deque[HostStretch],
        poison: bool,
    ) -> None:
        """Describe a hidden state whose copy to ``stretch`` was issued.

        Args:
            stretch: the host memory.
            layout: the hidden state's.
            stand_in: see above.
            before: the one whose backward comes next, if it leaves the device too.
            back: where the host memory goes when nobody needs this any more.
            poison: fill the host memory with 0xFF then.
        """
        self.stretch: HostStretch | None = stretch
        self.layout = layout
        self.stand_in = stand_in
        self.flight: _Flight | None = None
        self._before = None if before is None else weakref.ref(before)
        self._give_back = weakref.finalize(self, _give_back, stretch, back, poison=poison)
        self._give_back.atexit = False

    @property
    def before(self) -> KeptActivation | None:
        """The one whose backward comes next, while it is there."""
        return None if self._before is None else self._before()

    def come_before(self, other: KeptActivation) -> None:
        """The backward of ``other`` comes after this one's, whatever was said when it was kept."""
        self._before = weakref.ref(other)

    def release(self) -> None:
        """Give the host memory back: no backward will ask for it."""
        self.stretch = None
        self._give_back()


class HostActivations:
    """Keeps hidden states in host memory; see [Note: Boundary activations on the host]."""

    def __init__(self, device: torch.device, *, layers: int, lane: Lane, poison: bool) -> None:
        """Make a store that holds nothing yet.

        Args:
            device: the compute device.
            layers: how many decoder layers the model has.
            lane: what units come on, and hidden states come back on.
            poison: fill memory that was let go with 0xFF.
        """
        self.bytes_out = 0
        self.bytes_back = 0
        self._device = device
        self._layers = layers
        self._lane = lane
        self._out = make_lane(device)
        self._poison = poison
        self._memory = ActivationMemory(device)
        self._leaving: deque[_Flight] = deque()
        self._arriving: list[_Flight] = []
        self._last: weakref.WeakKeyDictionary[BackwardToken, weakref.ref[KeptActivation] | None] = (
            weakref.WeakKeyDictionary()
        )
        if device.type == "cuda":
            # copies may still run when the memory is freed
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that were had and not given back to the system."""
        return self._memory.nbytes

    @property
    def stalled_seconds(self) -> float | None:
        """How long kernels waited until a hidden state had left, so far; see ``Lane``."""
        return self._out.stalled_seconds

    # -- a forward -----------------------------------------------------------------------------

    def keep(
        self, hidden: torch.Tensor, *, stop: int, token: BackwardToken | None, held: bool
    ) -> KeptActivation | None:
        """Copy the hidden state that enters a block to the host.

        Args:
            hidden: the hidden state, ``[batch, sequence, hidden]``.
            stop: the layer after the block's last.
            token: the decoder call's, if there is such a call.
            held: whether the caller of the decoder holds it on the device.

        Returns:
            What its backward asks for, or None if it stays on the device.

        Raises:
            StateError: host memory cannot be had.
        """
        if token is None:
            return None
        if token not in self._last:
            self._begin(token)
        layout = layout_of(hidden)
        stays = stop >= self._layers or held or hidden.is_inference()
        if stays or layout is None or not span_of(layout):
            self._let_go(0)
            return None
        last = self._last[token]
        kept = self._copy_out(hidden, layout, before=None if last is None else last())
        self._last[token] = weakref.ref(kept)
        self._let_go(1)
        return kept

    def _begin(self, token: BackwardToken) -> None:
        """Start with a call of the decoder. What an earlier one left half-way is let go."""
        self._let_go(0)
        for flight in self._arriving:
            self._lane.wait(flight.event)
        self._arriving.clear()
        self._last[token] = None

    def _copy_out(
        self, hidden: torch.Tensor, layout: Layout, *, before: KeptActivation | None
    ) -> KeptActivation:
        nbytes = span_of(layout)
        stretch = self._memory.take(nbytes)
        count = nbytes // layout.dtype.itemsize
        flat = hidden.detach().as_strided((count,), (1,)).view(torch.uint8)
        after = [self._out.record(), *([stretch.event] if stretch.event is not None else [])]
        stretch.event = self._out.copy(
            stretch.buffer.bytes[:nbytes], flat, after=after, poison=False
        )
        self._leaving.append(_Flight(flat, stretch.event))
        self.bytes_out += nbytes
        stand_in = hidden.detach()
        stand_in.data = torch.empty(0, dtype=hidden.dtype, device=hidden.device)
        return KeptActivation(
            stretch,
            layout,
            stand_in=stand_in,
            before=before,
            back=self._memory.back,
            poison=self._poison and self._device.type == "cpu",
        )

    def _let_go(self, most: int) -> None:
        """Hold at most so many hidden states that leave: their memory may be written to by what
        is issued on the compute stream from here on."""
        while len(self._leaving) > most:
            flight = self._leaving.popleft()
            self._out.wait(flight.event)

    # -- a backward ----------------------------------------------------------------------------

    def interleave(self, tokens: Sequence[BackwardToken]) -> None:
        """Each block's backwards of some calls will come together, the first call's first; see
        [Note: Block-major order]."""
        chains = [list(self._chain(token)) for token in tokens]
        if len({len(chain) for chain in chains}) > 1:
            return  # the calls differ in their blocks, and bring each other's back out of turn
        order = [kept for level in zip(*chains, strict=True) for kept in level]
        for kept, following in pairwise(order):
            kept.come_before(following)

    def _chain(self, token: BackwardToken) -> Iterator[KeptActivation]:
        """Yield what was kept of a call, last first."""
        last = self._last.get(token)
        kept = None if last is None else last()
        while kept is not None:
            yield kept
            kept = kept.before

    def bring_back(self, kept: KeptActivation) -> torch.Tensor:
        """Return a hidden state in device memory of its own, and start on the next.

        It holds the bytes for kernels issued from here on.
        """
        flight = self._start(kept)
        before = kept.before
        for _ in range(_AHEAD):
            if before is None or before.stretch is None:
                break
            self._start(before)
            before = before.before
        self._lane.wait(flight.event)
        kept.flight = None
        self._arriving.remove(flight)
        return flight.tensor

    def done(self, kept: KeptActivation, tensor: torch.Tensor | None, *, retained: bool) -> None:
        """A block's backward is done.

        Args:
            kept: its hidden state.
            tensor: what ``bring_back`` returned, if it was called.
            retained: whether the graph is kept for another backward.
        """
        if not retained:
            if kept.flight in self._arriving:  # no gradient came, so nobody asked for it
                self._lane.wait(kept.flight.event)
                self._arriving.remove(kept.flight)
            kept.release()
        if self._poison and tensor is not None:
            count = span_of(kept.layout) // kept.layout.dtype.itemsize
            tensor.as_strided((count,), (1,)).view(torch.uint8).fill_(POISON)

    def _start(self, kept: KeptActivation) -> _Flight:
        """Issue the copy of a hidden state, unless it is on its way."""
        if kept.flight in self._arriving:
            return kept.flight
        stretch, layout = kept.stretch, kept.layout
        assert stretch is not None, "a hidden state is asked for after it was given up"
        nbytes = span_of(layout)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # kernels that were issued before may still use what this memory was
        after = [self._lane.record(), *([stretch.event] if stretch.event is not None else [])]
        stretch.event = self._lane.copy(
            memory, stretch.buffer.bytes[:nbytes], after=after, poison=self._poison
        )
        self.bytes_back += nbytes
        tensor = memory.view(layout.dtype).as_strided(layout.shape, layout.stride)
        kept.flight = _Flight(tensor, stretch.event)
        self._arriving.append(kept.flight)
        return kept.flight


def _give_back(stretch: HostStretch, back: deque[HostStretch], *, poison: bool) -> None:
    if poison:
        stretch.buffer.bytes.fill_(POISON)
    back.append(stretch)
