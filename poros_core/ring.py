"""A ring of page-locked buffers that units in other memory are copied through.

[Note: Reading ahead]
One thread fills the buffers. A buffer is filled with the unit that is asked for, and with those
that will be asked for next: which those are is learnt from the order of the step before, and until
there is one, the units follow each other by number in the direction of the last two. A wrong guess
costs time only.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from poros_core.host_memory import HostBuffer

if TYPE_CHECKING:
    from poros_core.host_memory import HostMemory
    from poros_core.host_store import UnitImage

__all__ = ["SLOTS", "Order", "StagingRing"]

SLOTS = 3
"""Buffers of a ring: one is copied to the device, one is filled and waits, one is being filled."""
_BLANK = 0xFF


class Order:
    """Guesses which unit is needed next. See [Note: Reading ahead]."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._last: tuple[int, int] | None = None
        self._current: int | None = None
        self._after: dict[tuple[int, int], int] = {}

    def seen(self, unit: int) -> None:
        """Note that a unit is needed now."""
        if self._current is not None:
            if self._last is not None:
                self._after[self._last] = unit
            self._last = (self._current, unit)
        self._current = unit

    def ahead(self, count: int) -> list[int]:
        """Return up to ``count`` units that will be needed next, in order, each once."""
        found: list[int] = []
        if self._current is None:
            return found
        pair = self._last or (self._current - 1, self._current)
        while len(found) < count:
            unit = self._after.get(pair)
            if unit is None:
                unit = pair[1] + (1 if pair[1] > pair[0] else -1)
            if not 0 <= unit < self.count or unit in found or unit == self._current:
                break
            found.append(unit)
            pair = (pair[1], unit)
        return found


@define(eq=False)
class _Slot:
    """A buffer, the unit that it holds or is being filled with, and the event after which it can
    be filled again."""

    buffer: HostBuffer
    unit: int | None = None
    filled: Future[None] | None = None
    event: object | None = None

    @property
    def waiting(self) -> bool:
        """Whether it holds, or will hold, a unit that nobody has asked for yet."""
        return self.filled is not None


class StagingRing:
    """The ring of one host store; see [Note: Staged units] in ``host_store``."""

    def __init__(self, device: torch.device, *, slots: int = SLOTS) -> None:
        """Make an empty ring; its buffers are allocated when the first unit is asked for.

        Args:
            device: the compute device.
            slots: how many buffers it has.
        """
        self.device = device
        self.order = Order()
        self.hits = 0
        self._count = slots
        self._slots: list[_Slot] = []
        self._numbers: dict[int, int] = {}
        self._memories: list[HostMemory | None] = []
        self._blank: HostBuffer | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="poros-read-ahead")
        weakref.finalize(self, self._reader.shutdown, wait=False)

    @property
    def nbytes(self) -> int:
        """Bytes of page-locked memory that its buffers take."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def join(self, image: UnitImage) -> HostBuffer | None:
        """Let a unit be copied through this ring.

        Returns:
            What its tensors are bound to while it is not on the device: on CUDA bytes that read
            as NaN; None means the unit's own memory.
        """
        key = id(image.buffer)
        if key not in self._numbers:
            self._numbers[key] = len(self._memories)
            self._memories.append(image.buffer)
            self.order.count = len(self._memories)
            if self._slots and image.nbytes > self._slots[0].buffer.nbytes:
                self._drop_slots()
        if self.device.type != "cuda":
            return None
        if self._blank is None or self._blank.nbytes < image.nbytes:
            self._blank = HostBuffer(image.nbytes, device=self.device)
            self._blank.bytes.fill_(_BLANK)
        return self._blank

    def leave(self, image: UnitImage) -> None:
        """Forget a unit that was laid out anew."""
        number = self._numbers.pop(id(image.buffer), None)
        if number is not None:
            self._memories[number] = None
            for slot in self._slots:
                if slot.unit == number and slot.filled is not None:
                    slot.filled.result()
                    slot.filled = None

    def staged(self, image: UnitImage) -> torch.Tensor:
        """Return a unit's bytes in a page-locked buffer, flat uint8. Waits until they are there.

        The buffer is the unit's until ``copied``.
        """
        unit = self._numbers[id(image.buffer)]
        slot = next((s for s in self._all() if s.waiting and s.unit == unit), None)
        if slot is None:
            slot = self._free() or self._spare()
            self._fill(slot, unit)
        else:
            self.hits += 1
        assert slot.filled is not None
        try:
            slot.filled.result()
        finally:
            slot.filled = None
        self.order.seen(unit)
        return slot.buffer.bytes[: image.nbytes]

    def copied(self, image: UnitImage, event: object) -> None:
        """Note when a unit's buffer can be filled again, and read ahead."""
        unit = self._numbers[id(image.buffer)]
        for slot in self._slots:
            if slot.unit == unit and not slot.waiting:
                slot.event = event
                self._slots.remove(slot)
                self._slots.append(slot)  # the one that was copied last comes last
                break
        present = {slot.unit for slot in self._slots if slot.waiting}
        for following in self.order.ahead(self._count - 1):
            if following in present or self._memories[following] is None:
                continue
            free = self._free()
            if free is None:
                return
            self._fill(free, following)

    def _all(self) -> list[_Slot]:
        if not self._slots:
            size = max(memory.nbytes for memory in self._memories if memory is not None)
            self._slots = [_Slot(HostBuffer(size, device=self.device)) for _ in range(self._count)]
        return self._slots

    def _drop_slots(self) -> None:
        for slot in self._slots:
            if slot.filled is not None:
                slot.filled.result()
            if isinstance(slot.event, torch.cuda.Event):
                slot.event.synchronize()
        self._slots = []

    def _free(self) -> _Slot | None:
        """Return the slot whose copy was issued longest ago, or None if all wait to be used."""
        return next((slot for slot in self._slots if not slot.waiting), None)

    def _spare(self) -> _Slot:
        """Return a slot that was filled by a wrong guess: the one that was filled last."""
        return self._slots[-1]

    def _fill(self, slot: _Slot, unit: int) -> None:
        memory = self._memories[unit]
        assert memory is not None
        slot.unit, event, slot.event = unit, slot.event, None
        slot.filled = self._reader.submit(_read, slot.buffer, memory, event)


def _read(buffer: HostBuffer, memory: HostMemory, after: Any) -> None:
    """Copy a unit into a buffer, once the copy out of the buffer is done."""
    if isinstance(after, torch.cuda.Event):
        after.synchronize()
    memory.will_need()
    buffer.bytes[: memory.nbytes].copy_(memory.bytes)
