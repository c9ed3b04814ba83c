"""Units that wait on the device for a slot, in memory that nobody else needs at the moment.

[Note: Copies ahead]
With two slots the link stands still whenever layers compute for longer than they are copied, and
from the end of a backward to the next forward, while the loop does what it does between steps. What
a loss took, logits above all, lies idle in the allocator all that time. With ``copy_ahead`` it is
borrowed: from the start of a backward to the end of the next forward it holds the units that will
be needed next, as they arrive on a stream of their own, and a unit that gets its slot is copied
there from the device. Nothing else changes: a unit's address is that of its slot, and one that is
not ahead comes from the host as ever.

Memory is only taken if the allocator has it already, and could reserve as much again: the peak is
at the loss, and by then all of it has been given back, behind a wait of the compute stream for the
copies. How much that is depends on the length, and is looked up anew whenever the allocator holds
more or less than before. If the allocator has to reserve more because of it all the same, less is
borrowed from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from attrs import define, field

from poros_core.host_store import UnitImage
from poros_core.log import get_logger
from poros_runtimes.streamed.arena import not_filled
from poros_runtimes.streamed.lane import Event, Lane

__all__ = ["Ahead", "IdleMemory", "Memory"]

_log = get_logger("runtime")

_SHARE = 0.6
"""Of the blocks of idle memory that units fit in, how many are borrowed as a backward starts: the
rest is for what it needs and a forward does not, such as gradients."""
_SHARE_AFTER = 0.9
"""The same when the backward is behind: the rest is for what an optimizer computes with."""
_LESS = 0.75
"""What the number of units is multiplied by when it was too much."""
_MOST = 16
"""Units that are borrowed for at most."""
_SMALL = 1 << 20
"""Bytes up to which the CUDA caching allocator keeps tensors in a pool of their own
(``kSmallSize`` in torch's CUDACachingAllocator)."""


class Memory(Protocol):
    """Where memory is borrowed."""

    def borrow(self, nbytes: int, *, tokens: int, after: bool = False) -> list[torch.Tensor]:
        """Return flat uint8 tensors of so many bytes each, as many as can be spared.

        Args:
            nbytes: of each.
            tokens: of the forward whose backward starts.
            after: whether that backward is behind.
        """
        ...

    def returned(self) -> None:
        """What was borrowed has been given back."""
        ...


class IdleMemory:
    """What the CUDA caching allocator has reserved and not given out; see [Note: Copies ahead]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cap = _MOST
        self._most: dict[tuple[bool, int], int] = {}
        self._reserved = self._pool = self._lent = 0

    def borrow(self, nbytes: int, *, tokens: int, after: bool = False) -> list[torch.Tensor]:
        """Borrow what is idle; see ``Memory``. A CPU's memory is nobody's to lend, and what is
        small is not kept with what is large."""
        if self._device.type != "cuda" or nbytes <= _SMALL:
            return []
        reserved = self._reserved_now()
        if self._lent and reserved > self._reserved:
            return []  # what is out may be why: ``returned`` looks
        if reserved != self._reserved:
            self._most.clear()
            self._reserved = reserved
        if (after, tokens) not in self._most:
            segments = self._segments()
            self._pool = sum(segment["total_size"] for segment in segments)
            share = _SHARE_AFTER if after else _SHARE
            self._most[after, tokens] = int(share * self._fitting(segments, nbytes))
        # a longer forward may come before it is given back, and has less to spare
        most = min(fit for (when, n), fit in self._most.items() if when == after and n >= tokens)
        most = min(most, self._cap - self._lent, self._room(reserved) // nbytes - self._lent)
        borrowed: list[torch.Tensor] = []
        for _ in range(most):
            with not_filled():
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            if self._reserved_now() > reserved:
                del memory
                self._borrow_less(than=self._lent + len(borrowed) + 1)
                break
            borrowed.append(memory)
        self._lent += len(borrowed)
        return borrowed

    def _reserved_now(self) -> int:
        """Return the bytes that the allocator has reserved, without the flattening and sorting of
        all figures that ``torch.cuda.memory_reserved`` does."""
        cuda: Any = torch.cuda
        figures = cuda.memory_stats_as_nested_dict(self._device)
        return int(figures["reserved_bytes"]["all"]["current"]) if figures else 0

    def returned(self) -> None:
        """Borrow less in future if others had to reserve memory like that meanwhile. Small tensors
        and graphs have memory of their own, which does not count."""
        lent, self._lent = self._lent, 0
        if not lent or self._reserved_now() <= self._reserved:
            return
        if sum(segment["total_size"] for segment in self._segments()) > self._pool:
            self._borrow_less(than=lent)

    def _borrow_less(self, *, than: int) -> None:
        self._cap = int(_LESS * than)
        self._most.clear()
        _log.info("copies_ahead_reduced", units=self._cap)
        torch.cuda.empty_cache()

    def _room(self, reserved: int) -> int:
        """Return what the allocator may still reserve, should others want what is lent."""
        cuda: Any = torch.cuda
        free, total = cuda.mem_get_info(self._device)
        allowed = int(cuda.get_per_process_memory_fraction(self._device) * total)
        return min(int(free), allowed - reserved)

    def _segments(self) -> list[dict[str, Any]]:
        """Return what the allocator has reserved for large tensors that are not a graph's."""
        cuda: Any = torch.cuda
        found: list[dict[str, Any]] = cuda.memory_snapshot()
        return [
            segment
            for segment in found
            if segment["device"] == self._device.index
            and segment["segment_type"] == "large"
            and tuple(segment["segment_pool_id"]) == (0, 0)
        ]

    def _fitting(self, segments: Iterable[dict[str, Any]], nbytes: int) -> int:
        """Return how many tensors of a size fit in free blocks that this stream may use."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        return sum(
            block["size"] // nbytes
            for segment in segments
            if segment["stream"] == stream
            for block in segment["blocks"]
            if block["state"] == "inactive"
        )


@define(eq=False)
class _Berth:
    """Borrowed memory for one unit, which unit is there, and two events: that its bytes are there,
    and that they may be overwritten."""

    memory: torch.Tensor = field(repr=False)
    free: Event
    unit: int | None = None
    there: Event | None = None


class Ahead:
    """The units that wait; see [Note: Copies ahead].

    Attributes:
        bytes_copied: from the host so far.
        copies: how many units these were.
    """

    def __init__(self, memory: Memory, *, lane: Lane, nbytes: int, poison: bool) -> None:
        """Borrow nothing yet.

        Args:
            memory: where to borrow.
            lane: brings units from the host; its own, so that they need not wait behind slots.
            nbytes: of the largest unit.
            poison: fill memory with 0xFF before each copy.
        """
        self.bytes_copied = 0
        self.copies = 0
        self._memory = memory
        self._lane = lane
        self._nbytes = nbytes
        self._poison = poison
        self._length = self._longest = 0
        self._started = False
        self._behind = self._in_vain = 0
        self._berths: list[_Berth] = []
        self._drained = weakref.finalize(self, _drain, self._berths, lane)
        self._drained.atexit = False

    @property
    def open(self) -> bool:
        """Whether there is memory."""
        return bool(self._berths)

    def begin_forward(self, tokens: int, *, outstanding: bool) -> None:
        """A forward starts. One without gradients, or longer than any that trained, may need memory
        that no step before did.

        Args:
            tokens: how many it takes; 0 if that is not known, and nothing is borrowed after it.
            outstanding: whether the backward of an earlier one is still to come.
        """
        if torch.is_grad_enabled():
            self._length = max(tokens, self._length if outstanding else 0)
        if not torch.is_grad_enabled() or tokens > self._longest:
            self.end()

    def start(self) -> None:
        """The last loss is behind: borrow memory, if there is none yet. Kernels issued so far may
        still use it."""
        self._longest = max(self._longest, self._length)
        if not self._berths:
            self._borrow(after=False)
        self._started = True

    def extend(self) -> None:
        """The backward is behind: borrow more, unless after as many backwards others needed the
        memory last time."""
        self._behind += self._started
        if self._started and self._behind != self._in_vain:
            self._borrow(after=True)
        self._started = False

    def _borrow(self, *, after: bool) -> None:
        if self._nbytes and self._length:
            memory = self._memory.borrow(self._nbytes, tokens=self._length, after=after)
            now = self._lane.record()
            self._berths.extend(_Berth(each, now) for each in memory)

    def cut_short(self) -> None:
        """Give the memory back although no forward came: others need it."""
        self._in_vain, self._behind = self._behind, 0
        self.end()

    def end(self) -> None:
        """Give the memory back: kernels issued from here on may use it."""
        self._started = False
        if self._berths:
            _drain(self._berths, self._lane)
            self._memory.returned()

    def fetch(
        self,
        upcoming: Iterable[int],
        *,
        present: Iterable[int],
        conflicts: Callable[[int], Sequence[int]],
        image: Callable[[int], UnitImage | None],
    ) -> None:
        """Issue the copies of units that will be needed next and have no slot.

        Args:
            upcoming: units in the order in which they will be needed.
            present: units in their slots, or on their way there.
            conflicts: the units that share a slot with one.
            image: where a unit comes from; None if it does not stream.
        """
        wanted = self._wanted(upcoming, set(present), conflicts, image)
        held = {berth.unit for berth in self._berths}
        spare = [berth for berth in self._berths if berth.unit not in wanted]
        for unit in wanted:
            if unit in held:
                continue
            if not spare:
                break
            source = image(unit)
            assert source is not None
            self._copy(spare.pop(), unit, source)

    def _wanted(
        self,
        upcoming: Iterable[int],
        there: set[int],
        conflicts: Callable[[int], Sequence[int]],
        image: Callable[[int], UnitImage | None],
    ) -> list[int]:
        """Return the units that will be missing in their slots first, as many as there is room for,
        if each is copied there when it is needed."""
        missing: list[int] = []
        for unit in upcoming:
            if unit in there or image(unit) is None:
                continue
            there.difference_update(conflicts(unit))
            there.add(unit)
            if unit not in missing:
                if len(missing) == len(self._berths):
                    break
                missing.append(unit)
        return missing

    def _copy(self, berth: _Berth, unit: int, image: UnitImage) -> None:
        events = [berth.free, *([] if berth.there is None else [berth.there])]
        berth.unit = None
        source = image.bytes_for_copy()
        target = berth.memory[: source.nbytes]
        berth.there = self._lane.copy(target, source, after=events, poison=self._poison)
        image.copied(berth.there)
        berth.unit = unit
        self.copies += 1
        self.bytes_copied += source.nbytes

    def take(self, unit: int) -> tuple[torch.Tensor, Event] | None:
        """Return a unit's bytes and the event that they are there; None if it does not wait.
        ``taken`` must follow."""
        for berth in self._berths:
            if berth.unit == unit:
                assert berth.there is not None
                return berth.memory, berth.there
        return None

    def taken(self, unit: int, event: Event) -> None:
        """What ``take`` returned is read until ``event``. The unit stays until another comes."""
        for berth in self._berths:
            if berth.unit == unit:
                berth.free = event


def _drain(berths: list[_Berth], lane: Lane) -> None:
    """Let go of berths, behind a wait of the compute stream for what is copied to or from them."""
    for berth in berths:
        lane.wait(berth.free)
        if berth.there is not None:
            lane.wait(berth.there)
    berths.clear()
