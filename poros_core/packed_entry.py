"""An entry of the packed cache: its files, its record, and the lock that keeps it."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from poros_core.packed_file import DamagedFile, PackedFile, Piece, read_packed, write_packed

__all__ = [
    "BUILDING",
    "ENTRY",
    "LOCK",
    "Entry",
    "EntryInfo",
    "EntryWriter",
    "entry_name",
    "info_of",
    "locked",
    "read_entry",
]

FORMAT = 2
"""2: files are hashed in chunks."""
ENTRY = "entry.json"
BUILDING = "building-"
LOCK = "lock"


@frozen(kw_only=True)
class EntryInfo:
    """An entry as ``poros cache list`` shows it.

    Attributes:
        name: its folder's name, derived from its key.
        title: the checkpoint that it was made from.
        precision: of the base.
        nbytes: bytes on disk.
        used: when it was last read or written, in seconds since the epoch.
        problem: why it cannot be used, or None.
    """

    name: str
    title: str
    precision: str
    nbytes: int
    used: float
    problem: str | None = None


@define(eq=False)
class Entry:
    """An entry that is open for reading, locked against eviction until ``close``.

    Attributes:
        folder: where it lies.
        units: the units that stream or are read in place, in the order of the block plan.
        rest: everything that stands on the device; None if there is nothing.
        described: what the loader strategy noted of its weights besides their tensors.
    """

    folder: Path
    units: tuple[PackedFile, ...]
    rest: PackedFile | None
    described: Mapping[str, Any] = field(repr=False)
    _lock: int | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, gaps included."""
        return sum(file.nbytes for file in self.files())

    def files(self) -> list[PackedFile]:
        """Return the records of all files."""
        return [*self.units, *([] if self.rest is None else [self.rest])]

    def read(self, record: PackedFile, into: memoryview | None) -> None:
        """Read one file; see ``read_packed``."""
        read_packed(self.folder / record.file, record, into)

    def shared(self) -> Entry:
        """Return the entry open once more, to be closed on its own."""
        return Entry(
            self.folder,
            self.units,
            self.rest,
            self.described,
            None if self._lock is None else os.dup(self._lock),
        )

    def close(self) -> None:
        """Let the entry be evicted."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class EntryWriter:
    """An entry that is being written. See [Note: Whole or not there]."""

    def __init__(self, cache: Path, key: Mapping[str, Any], title: str) -> None:
        """Begin an entry.

        Args:
            cache: the folder of all entries.
            key: what decides its bytes.
            title: the checkpoint that it is made from.
        """
        self._cache = cache
        self._key = key
        self._title = title
        self.folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=cache))
        self._lock = locked(self.folder / LOCK, exclusive=True)

    def write(
        self,
        file: str,
        pieces: Sequence[Piece],
        chunks: Iterable[memoryview],
        *,
        unit: str,
        nbytes: int,
        hashers: Executor | None = None,
    ) -> PackedFile:
        """Write one file; see ``write_packed``."""
        path = self.folder / file
        return write_packed(path, pieces, chunks, unit=unit, nbytes=nbytes, hashers=hashers)

    def finish(
        self, units: Sequence[PackedFile], rest: PackedFile | None, described: Mapping[str, Any]
    ) -> Path:
        """Make the entry findable, and return its folder.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        content = {
            "format": FORMAT,
            "title": self._title,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "key": self._key,
            "units": [attrs.asdict(unit) for unit in units],
            "rest": None if rest is None else attrs.asdict(rest),
            "described": described,
        }
        text = json.dumps({**content, "sha256": _digest(content)}, indent=1)
        with (self.folder / ENTRY).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.folder)
        target = self._cache / entry_name(self._key)
        try:
            self.folder.rename(target)
        except OSError:
            if not (target / ENTRY).is_file():
                raise
            shutil.rmtree(self.folder, ignore_errors=True)  # another process was first
        else:
            (target / LOCK).unlink(missing_ok=True)
        _sync(self._cache)
        self._release()
        return target

    def abandon(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def entry_name(key: Mapping[str, Any]) -> str:
    """Return the name of the folder of the entry with this key."""
    return _digest({"format": FORMAT, "key": key})[:32]


def read_entry(folder: Path, key: Mapping[str, Any] | None) -> Entry:
    """Return an entry, without a lock.

    Args:
        folder: its folder.
        key: what it must be made from; None takes any.

    Raises:
        DamagedFile: its record is damaged, or of another base.
    """
    content = _content(folder)
    if key is not None and content["key"] != json.loads(json.dumps(key)):
        raise DamagedFile(f"{ENTRY} is of another base")
    rest = content["rest"]
    return Entry(
        folder,
        tuple(_record(unit) for unit in content["units"]),
        None if rest is None else _record(rest),
        content["described"],
    )


def _content(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        noted = content.pop("sha256")
        found = _digest(content)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise DamagedFile(f"{ENTRY} cannot be read ({error})") from error
    if noted != found:
        raise DamagedFile(f"{ENTRY} holds something else than was written")
    if content["format"] != FORMAT:
        raise DamagedFile(f"{ENTRY} is of format {content['format']}, and this is {FORMAT}")
    return content


def _record(content: Mapping[str, Any]) -> PackedFile:
    pieces = tuple(Piece(**{**p, "shape": tuple(p["shape"])}) for p in content["pieces"])
    return PackedFile(**{**content, "pieces": pieces})


def info_of(folder: Path) -> EntryInfo:
    """Return what ``poros cache list`` shows of an entry; its files are not read."""
    nbytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    used = (folder / ENTRY).stat().st_mtime
    try:
        content = _content(folder)
    except DamagedFile as error:
        return EntryInfo(
            name=folder.name, title="?", precision="?", nbytes=nbytes, used=used, problem=str(error)
        )
    return EntryInfo(
        name=folder.name,
        title=content["title"],
        precision=str(content["key"].get("precision", "?")),
        nbytes=nbytes,
        used=used,
    )


def locked(path: Path, *, exclusive: bool, wait: bool = True) -> int | None:
    """Open and lock a file; None where the file system knows no locks.

    Raises:
        OSError: it cannot be opened, or is locked and ``wait`` is False.
    """
    flags = os.O_RDWR | os.O_CREAT if exclusive and wait else os.O_RDONLY
    handle = os.open(path, flags | os.O_CLOEXEC, 0o644)
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    return handle


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
