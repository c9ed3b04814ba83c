"""Reading one unit of a packed base to where it will stand, by threads that hash what they read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future

import torch
from attrs import frozen

from poros_core.host_memory import HostBuffer, HostMemory
from poros_core.host_mode import HostMode
from poros_core.mapped_buffer import MappedBuffer
from poros_core.packed_entry import Entry
from poros_core.packed_file import CHUNK, OpenedFile, PackedFile, check_packed, read_chunk
from poros_core.packing_strategy import LAYER

__all__ = ["Reading", "begin_reading"]


@frozen(eq=False)
class Reading:
    """A unit that is being read.

    Attributes:
        staged: copies of it must be staged.
    """

    staged: bool
    _entry: Entry
    _record: PackedFile
    _buffer: HostBuffer | None
    _digests: list[Future[bytes]]

    def memory(self) -> HostMemory:
        """Wait until all is read and right, and return the unit's stretch.

        Raises:
            DamagedFile: the file is not what was written.
            PrepareError: it cannot be mapped.
        """
        path = self._entry.folder / self._record.file
        check_packed(path, self._record, [digest.result() for digest in self._digests])
        if self._buffer is not None:
            return self._buffer
        return MappedBuffer(path, start=self._record.start, nbytes=self._record.nbytes)


def begin_reading(
    entry: Entry,
    record: PackedFile,
    *,
    device: torch.device,
    mode: HostMode,
    readers: Executor,
    advance: Callable[[int], None],
) -> Reading:
    """Make a unit's stretch, and let threads read it.

    Args:
        entry: the entry, open.
        record: the unit's file.
        device: the compute device.
        mode: where layers stand.
        readers: the threads.
        advance: is told the bytes of what was read, from those threads.

    Raises:
        DamagedFile: the file cannot be opened.
        PrepareError: host memory cannot be had or page-locked.
    """
    staged = mode != "pinned" and record.unit.startswith(LAYER)
    buffer = None
    if not (staged and mode == "mmap"):
        buffer = HostBuffer(record.nbytes, device=device, locked=not staged)
    content = None if buffer is None else buffer.view()

    file = OpenedFile(entry.folder / record.file)

    def read(begin: int) -> bytes:
        end = min(begin + CHUNK, record.nbytes)
        part = None if content is None else content[begin:end]
        digest = read_chunk(file, record, begin, part)
        advance(end - begin)
        return digest

    digests = [readers.submit(read, begin) for begin in range(0, record.nbytes, CHUNK)]
    return Reading(staged, entry, record, buffer, digests)
