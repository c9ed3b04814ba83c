"""Reading weights from their shards ahead of the quantiser, into page-locked memory.

[Note: Reading weights ahead]
Threads read the weights that will be quantised, in the order in which they will be asked for, in
pieces, into a ring of page-locked buffers. Whoever asks for a weight gets its pieces one after the
other; each is copied to the device without a wait, and its buffer is filled again once an event
says that the copy is done, or given up if nothing is left to be read. A buffer is taken and its
piece is chosen in one step, so the oldest piece that is missing always has a buffer, and nothing
can wait for ever. A weight that is asked for out of turn is not given, and whoever asks takes it
from where else it stands; weights that were passed over are dropped. So a wrong order costs time
only.

Every piece is a turn of the interpreter taken from the main thread, and so is every thread that
wakes in vain. So one buffer wakes one reader, and only the piece that is waited for wakes whoever
waits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from attrs import define, frozen

from poros_core.errors import CheckpointError, PrepareError
from poros_core.host_memory import HostBuffer
from poros_core.log import get_logger

__all__ = ["Extent", "WeightReader", "read_piece"]

_log = get_logger("load")

_PIECE = 16 << 20
_BUFFERS = 24
_THREADS = 12


@frozen(kw_only=True)
class Extent:
    """Where a weight's bytes stand.

    Attributes:
        name: what the checkpoint calls it.
        file: the shard.
        begin: bytes before it in the shard.
        nbytes: its size.
    """

    name: str
    file: Path
    begin: int
    nbytes: int


@frozen
class _Piece:
    extent: Extent
    at: int
    nbytes: int


@define(eq=False)
class _Buffer:
    """Page-locked memory, made when it is first filled, and the event after which it can be filled
    again."""

    memory: HostBuffer | None = None
    event: torch.cuda.Event | None = None


def read_piece(handle: int, extent: Extent, at: int, into: memoryview) -> None:
    """Read part of a weight.

    Args:
        handle: the shard, open.
        extent: the weight.
        at: where in it the part begins.
        into: what is filled.

    Raises:
        CheckpointError: the shard ends too early.
        OSError: it cannot be read.
    """
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], extent.begin + at + done)
        if not count:
            raise CheckpointError(
                f"Checkpoint file '{extent.file}' ended while '{extent.name}' was read from it. "
                "Something else writes to it, or it is damaged: fetch the checkpoint again."
            )
        done += count


class WeightReader:
    """Reads ahead while it is entered. See [Note: Reading weights ahead].

    Copies that it queued must be done when it is left.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        piece: int = _PIECE,
        buffers: int = _BUFFERS,
        threads: int | None = None,
    ) -> None:
        """Make a reader that has nothing to read yet.

        Args:
            device: where the weights go.
            piece: bytes that are read at once.
            buffers: pieces that are held at once.
            threads: how many read; None means one for each core, twelve at most.
        """
        self.given = 0
        self._device = device
        self._piece = piece
        self._spans: dict[str, range] = {}
        self._pieces: list[_Piece] = []
        self._next = 0  # the first piece that nobody has begun to read
        self._head = 0  # the first piece that was neither given nor dropped
        self._read: dict[int, _Buffer | Exception] = {}
        self._free = deque(_Buffer() for _ in range(buffers))
        self._stopped = False
        self._failure: Exception | None = None
        self._awaited = -1  # the piece that somebody waits for
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # a buffer is free, or all is over
        self._arrived = threading.Condition(self._lock)  # the awaited piece was read
        self._handles: dict[Path, int] = {}
        count = threads or min(_THREADS, os.cpu_count() or 1)
        self._threads = [
            threading.Thread(target=self._run, name=f"poros-read-{number}", daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._stopped = True
            self._room.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        self._free.clear()  # whoever still refers to this must not keep the buffers
        self._read.clear()

    def begin(self, wanted: Sequence[Extent]) -> None:
        """Begin to read.

        Args:
            wanted: the weights, in the order in which they will be asked for.
        """
        assert not self._pieces
        for extent in wanted:
            first = len(self._pieces)
            for at in range(0, extent.nbytes, self._piece):
                self._pieces.append(_Piece(extent, at, min(self._piece, extent.nbytes - at)))
            self._spans[extent.name] = range(first, len(self._pieces))
        for thread in self._threads if self._pieces else ():
            thread.start()

    def give(self, name: str, target: torch.Tensor) -> bool:
        """Copy a weight to where it is to be quantised. On CUDA the copy is queued, not awaited.

        Args:
            name: what the checkpoint calls it.
            target: flat bytes of the weight's size, on the device.

        Returns:
            False if it is not to be had here.

        Raises:
            CheckpointError: its shard is damaged.
            OSError: its shard cannot be read.
            PrepareError: there is no memory to read into.
        """
        if self._failure is not None:  # its piece and its buffer are gone for good
            raise self._failure
        span = self._spans.get(name)
        if span is None or span.start < self._head or self._bytes(span) != target.nbytes:
            return False
        self._drop(span.start)
        for number in span:
            buffer, piece = self._taken(number), self._pieces[number]
            assert buffer.memory is not None
            source = buffer.memory.bytes[: piece.nbytes]
            target[piece.at : piece.at + piece.nbytes].copy_(source, non_blocking=True)
            if target.device.type == "cuda":
                buffer.event = torch.cuda.current_stream(target.device).record_event()
            self._put_back(buffer)
        self._head = span.stop
        self.given += 1
        return True

    def _bytes(self, span: range) -> int:
        return sum(self._pieces[number].nbytes for number in span)

    def _drop(self, until: int) -> None:
        """Pass over the pieces before one."""
        with self._lock:
            begun = min(self._next, until)
            self._next = max(self._next, until)
        for number in range(self._head, begun):
            self._put_back(self._taken(number))
        self._head = until

    def _taken(self, number: int) -> _Buffer:
        """Wait for a piece, and return the buffer that it is in."""
        with self._lock:
            self._awaited = number
            self._arrived.wait_for(lambda: number in self._read)
            found = self._read.pop(number)
        if isinstance(found, Exception):
            self._failure = found
            raise found
        return found

    def _put_back(self, buffer: _Buffer) -> None:
        with self._lock:
            self._free.append(buffer)
            self._room.notify()

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Fill a free buffer, or give it up if nothing is left to be read."""
        with self._lock:
            self._room.wait_for(lambda: self._stopped or self._free)
            if self._stopped:
                return False
            number, buffer = self._next, self._free.popleft()
            if number >= len(self._pieces):
                return True  # the buffer goes with this call: unlocking it takes a while
            self._next += 1
        found: _Buffer | Exception = buffer
        try:
            self._fill(buffer, self._pieces[number])
        except Exception as error:
            found = error
        with self._lock:
            self._read[number] = found
            if number == self._awaited:
                self._arrived.notify()
        return True

    def _fill(self, buffer: _Buffer, piece: _Piece) -> None:
        if buffer.memory is None:
            buffer.memory = self._memory()
        if buffer.event is not None:
            buffer.event.synchronize()
            buffer.event = None
        extent = piece.extent
        read_piece(self._open(extent.file), extent, piece.at, buffer.memory.view()[: piece.nbytes])

    def _memory(self) -> HostBuffer:
        try:
            return HostBuffer(self._piece, device=self._device)
        except PrepareError as error:
            if self._device.type != "cuda":
                raise
            _log.warning("staging_not_locked", reason=str(error), cost="slower copies")
            return HostBuffer(self._piece, device=self._device, locked=False)

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._handles:
                self._handles[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._handles[file]
