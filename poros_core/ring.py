"""A ring of page-locked buffers that units in other memory are copied through.

[Note: Reading ahead]
One thread fills the buffers. A buffer is filled with the unit that is asked for, and with those
that will be asked for next: which those are is learnt from the order of the step before, and until
there is one, the units follow each other by number in the direction of the last two. A wrong guess
costs time only. The thread makes no CUDA call, which could spoil a graph that is being captured:
whoever asks for a unit finds out whether a buffer can be filled again, and waits if it must.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

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
    """A buffer, the unit that it holds or is being filled with, the read that fills it until
    somebody asks for the unit, and the event after which it can be filled again."""

    buffer: HostBuffer
    unit: int | None = None
    filled: Future[None] | None = None
    event: object | None = None

    @property
    def waiting(self) -> bool:
        """Whether it holds, or will hold, a unit that nobody has asked for yet."""
        return self.filled is not None

    def finish(self) -> None:
        """Let a read that is under way end, and forget it."""
        if self.filled is not None:
            self.filled.exception()
        self.filled = None

    def is_free(self) -> bool:
        """Whether the copy out of it is done."""
        event: Any = self.event
        return not isinstance(event, torch.cuda.Event) or bool(cast(Any, event).query())

    def wait(self) -> None:
        """Wait until the copy out of it is done."""
        if isinstance(self.event, torch.cuda.Event):
            self.event.synchronize()
        self.event = None


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
        self._taken: _Slot | None = None
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
                if slot.unit == number:
                    slot.finish()
                    slot.unit = None

    def staged(self, image: UnitImage) -> torch.Tensor:
        """Return a unit's bytes in a page-locked buffer, flat uint8. Waits until they are there.

        The buffer is the unit's until ``copied``.
        """
        unit = self._numbers[id(image.buffer)]
        slot = next((s for s in self._all() if s.unit == unit), None)
        if slot is None:
            slot = next((s for s in self._slots if not s.waiting), self._slots[-1])
            self._fill(slot, unit)
        else:
            self.hits += 1
        try:
            if slot.filled is not None:
                slot.filled.result()
        except BaseException:
            slot.unit = None
            raise
        finally:
            slot.filled = None
        self._taken = slot
        self.order.seen(unit)
        return slot.buffer.bytes[: image.nbytes]

    def copied(self, image: UnitImage, event: object) -> None:
        """Note when the buffer that was asked for last can be filled again, and read ahead."""
        slot, self._taken = self._taken, None
        if slot is not None:
            assert slot.unit == self._numbers[id(image.buffer)]
            slot.event = event
            self._slots.remove(slot)
            self._slots.append(slot)  # the one that was copied last is filled last
        present = {slot.unit for slot in self._slots}
        for following in self.order.ahead(self._count - 1):
            if following in present or self._memories[following] is None:
                continue
            free = next((s for s in self._slots if not s.waiting and s.is_free()), None)
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
            slot.finish()
            slot.wait()
        self._slots = []

    def _fill(self, slot: _Slot, unit: int) -> None:
        memory = self._memories[unit]
        assert memory is not None
        slot.wait()
        slot.unit = unit
        slot.filled = self._reader.submit(_read, slot.buffer, memory)


def _read(buffer: HostBuffer, memory: HostMemory) -> None:
    """Copy a unit into a buffer."""
    memory.will_need()
    buffer.bytes[: memory.nbytes].copy_(memory.bytes)
