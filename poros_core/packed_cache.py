"""The packed cache: bases on disk as they stand in host memory, so that a second load only reads.

A folder of entries; an entry is a folder with one safetensors file per unit, one for all that does
not stream, and ``entry.json``, which records every file's SHA-256. Needs no torch.

[Note: Whole or not there]
An entry is written in a folder of another name (``building-...``), every file and folder is synced,
``entry.json`` last, and then the folder is renamed. So whoever finds an entry under its name finds
all of it, however the writer ended. What a killed writer left is removed by the next one, which
can tell by the lock that the dead one no longer holds. Readers hold a shared lock on their entry
while they need it; an entry in use is not evicted.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from poros_core.errors import SettingsError
from poros_core.log import get_logger
from poros_core.packed_file import DamagedFile, PackedFile, Piece, read_packed, write_packed

__all__ = [
    "FOLDER_VARIABLE",
    "LIMIT_VARIABLE",
    "CacheRefusal",
    "Entry",
    "EntryWriter",
    "PackedCache",
    "cache_from",
    "default_folder",
]

_log = get_logger("cache")

FOLDER_VARIABLE = "POROS_CACHE"
"""Environment variable: ``1`` keeps packed bases in the default folder, a path keeps them there;
``0`` or nothing keeps none."""
LIMIT_VARIABLE = "POROS_CACHE_LIMIT"
"""Environment variable: most bytes that a cache may take, as a number or with ``GB`` behind it."""

FORMAT = 1
_DEFAULT_LIMIT = 200_000_000_000
_ENTRY = "entry.json"
_BUILDING = "building-"
_LEAVING = "leaving-"
_LOCK = "lock"


class CacheRefusal(Exception):
    """The cache cannot take an entry; the text says why and what to do."""


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

    def __init__(self, cache: PackedCache, key: Mapping[str, Any], title: str) -> None:
        self._cache = cache
        self._key = key
        self._title = title
        self.folder = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=cache.folder))
        self._lock = _locked(self.folder / _LOCK, exclusive=True)

    def write(
        self,
        file: str,
        pieces: Sequence[Piece],
        chunks: Iterable[memoryview],
        *,
        unit: str,
        nbytes: int,
    ) -> PackedFile:
        """Write one file; see ``write_packed``."""
        return write_packed(self.folder / file, pieces, chunks, unit=unit, nbytes=nbytes)

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
        with (self.folder / _ENTRY).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.folder)
        target = self._cache.folder / entry_name(self._key)
        try:
            self.folder.rename(target)
        except OSError:
            if not (target / _ENTRY).is_file():
                raise
            shutil.rmtree(self.folder, ignore_errors=True)  # another process was first
        else:
            (target / _LOCK).unlink(missing_ok=True)
        _sync(self._cache.folder)
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


class PackedCache:
    """A folder of packed bases, of a bounded size."""

    def __init__(self, folder: Path, *, limit: int | None = None) -> None:
        """Use ``folder``, which is made when something is written.

        Args:
            folder: where the entries lie.
            limit: most bytes that they may take; None means ``POROS_CACHE_LIMIT``, or 200 GB.
        """
        self.folder = folder
        self.limit = _limit() if limit is None else limit

    def find(self, key: Mapping[str, Any]) -> Entry | None:
        """Return the entry with this key, open for reading, or None if there is none.

        Raises:
            DamagedFile: there is one, and its record cannot be read.
        """
        folder = self.folder / entry_name(key)
        if not (folder / _ENTRY).is_file():
            return None
        lock = _locked(folder / _ENTRY, exclusive=False)
        try:
            entry = _read_entry(folder, key)
            with contextlib.suppress(OSError):  # a cache that may only be read
                os.utime(folder / _ENTRY)
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        entry._lock = lock
        return entry

    def begin(self, key: Mapping[str, Any], *, title: str, nbytes: int) -> EntryWriter:
        """Make room for an entry and begin to write it.

        Args:
            key: what decides its bytes.
            title: the checkpoint that it is made from.
            nbytes: what it will take.

        Raises:
            CacheRefusal: it would not fit.
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_left_behind()
        if nbytes > self.limit:
            raise CacheRefusal(
                f"it takes {nbytes / 1e9:.2f} GB and the cache is limited to "
                f"{self.limit / 1e9:.2f} GB; raise {LIMIT_VARIABLE}"
            )
        self._evict(self.limit - nbytes, keep=entry_name(key))
        free = shutil.disk_usage(self.folder).free
        if nbytes > free:
            raise CacheRefusal(
                f"it takes {nbytes / 1e9:.2f} GB and '{self.folder}' has {free / 1e9:.2f} GB free; "
                f"free some, or point {FOLDER_VARIABLE} at another disk"
            )
        return EntryWriter(self, key, title)

    def remove(self, name: str) -> bool:
        """Remove an entry; return False if it is in use or not there."""
        folder = self.folder / name
        with contextlib.suppress(OSError):
            lock = _locked(folder / _ENTRY, exclusive=True, wait=False)
            try:
                self.discard(name)
            finally:
                if lock is not None:
                    os.close(lock)
            return True
        return False

    def discard(self, name: str) -> None:
        """Remove an entry whether it is in use or not: what a reader has open stays readable."""
        leaving = Path(tempfile.mkdtemp(prefix=_LEAVING, dir=self.folder))
        with contextlib.suppress(FileNotFoundError):
            (self.folder / name).rename(leaving / name)
        shutil.rmtree(leaving, ignore_errors=True)

    def entries(self) -> list[EntryInfo]:
        """Return all entries, least recently used first."""
        found = [_info(folder) for folder in self._folders()]
        return sorted(found, key=lambda info: info.used)

    def verify(self) -> Iterator[EntryInfo]:
        """Yield every entry with what is wrong with it, after reading all of its files."""
        for info in self.entries():
            if info.problem is not None:
                yield info
                continue
            try:
                entry = _read_entry(self.folder / info.name, None)
                for record in entry.files():
                    entry.read(record, None)
            except DamagedFile as error:
                yield attrs.evolve(info, problem=str(error))
            else:
                yield info

    def _folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [
            path
            for path in self.folder.iterdir()
            if not path.name.startswith((_BUILDING, _LEAVING)) and (path / _ENTRY).is_file()
        ]

    def _evict(self, room: int, *, keep: str) -> None:
        entries = [info for info in self.entries() if info.name != keep]
        total = sum(info.nbytes for info in entries)
        for info in entries:
            if total <= room:
                return
            if self.remove(info.name):
                total -= info.nbytes
                _log.info("cache_evicted", entry=info.name, title=info.title, bytes=info.nbytes)
        if total > room:
            raise CacheRefusal(
                f"entries that are in use take {total / 1e9:.2f} GB of {self.limit / 1e9:.2f} GB; "
                f"raise {LIMIT_VARIABLE}"
            )

    def _remove_left_behind(self) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith(_LEAVING):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_BUILDING) and _abandoned(path):
                _log.info("cache_left_behind_removed", folder=path.name)
                shutil.rmtree(path, ignore_errors=True)


def cache_from(setting: bool | str | os.PathLike[str] | None) -> PackedCache | None:
    """Return the cache that ``poros.load(cache=...)`` asks for, or None for none.

    Args:
        setting: True is the default folder, False none, a path that folder, and None what
            ``POROS_CACHE`` says.
    """
    if setting is None:
        setting = os.environ.get(FOLDER_VARIABLE, "")
        setting = {"": False, "0": False, "1": True}.get(setting, setting)
    if setting is False:
        return None
    return PackedCache(default_folder() if setting is True else Path(setting).expanduser())


def default_folder() -> Path:
    """Return where packed bases are kept if no folder is named."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "poros" / "packed"


def entry_name(key: Mapping[str, Any]) -> str:
    """Return the name of the folder of the entry with this key."""
    return _digest({"format": FORMAT, "key": key})[:32]


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return _DEFAULT_LIMIT
    number = text.upper().removesuffix("GB")
    try:
        return int(float(number) * (1e9 if number != text.upper() else 1))
    except ValueError as error:
        raise SettingsError(
            f"{LIMIT_VARIABLE}={text!r} is no size. Give a number of bytes, or for example 200GB."
        ) from error


def _locked(path: Path, *, exclusive: bool, wait: bool = True) -> int | None:
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


def _abandoned(building: Path) -> bool:
    try:
        lock = _locked(building / _LOCK, exclusive=True, wait=False)
    except FileNotFoundError:  # made a moment ago
        age = datetime.datetime.now().timestamp() - building.stat().st_mtime
        return age > 3600
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is not None


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_entry(folder: Path, key: Mapping[str, Any] | None) -> Entry:
    content = _content(folder)
    if key is not None and content["key"] != json.loads(json.dumps(key)):
        raise DamagedFile(f"{_ENTRY} is of another base")
    rest = content["rest"]
    return Entry(
        folder,
        tuple(_record(unit) for unit in content["units"]),
        None if rest is None else _record(rest),
        content["described"],
    )


def _content(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / _ENTRY).read_text(encoding="utf-8"))
        noted = content.pop("sha256")
        found = _digest(content)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise DamagedFile(f"{_ENTRY} cannot be read ({error})") from error
    if noted != found:
        raise DamagedFile(f"{_ENTRY} holds something else than was written")
    if content["format"] != FORMAT:
        raise DamagedFile(f"{_ENTRY} is of format {content['format']}, and this is {FORMAT}")
    return content


def _record(content: Mapping[str, Any]) -> PackedFile:
    pieces = tuple(Piece(**{**p, "shape": tuple(p["shape"])}) for p in content["pieces"])
    return PackedFile(**{**content, "pieces": pieces})


def _info(folder: Path) -> EntryInfo:
    nbytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    used = (folder / _ENTRY).stat().st_mtime
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
