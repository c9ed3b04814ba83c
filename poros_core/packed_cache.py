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
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from poros_core.errors import SettingsError
from poros_core.log import get_logger
from poros_core.packed_entry import (
    BUILDING,
    ENTRY,
    LOCK,
    Entry,
    EntryInfo,
    EntryWriter,
    entry_name,
    info_of,
    locked,
    read_entry,
)
from poros_core.packed_file import DamagedFile
from poros_core.sizes import parse_size

__all__ = [
    "FOLDER_VARIABLE",
    "LIMIT_VARIABLE",
    "CacheRefusal",
    "PackedCache",
    "cache_from",
    "default_folder",
]

_log = get_logger("cache")

FOLDER_VARIABLE = "POROS_CACHE"
"""Environment variable: ``1``, ``true``, ``yes`` or ``on`` keeps packed bases in the default
folder, a path keeps them there; ``0``, ``false``, ``no``, ``off`` or nothing keeps none."""
LIMIT_VARIABLE = "POROS_CACHE_LIMIT"
"""Environment variable: most that a cache may take, in bytes or as ``200GB`` or ``100GiB``."""

_DEFAULT_LIMIT = 200_000_000_000
_LEAVING = "leaving-"
_SWITCHES = {
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
    **dict.fromkeys(("1", "true", "yes", "on"), True),
}


class CacheRefusal(Exception):
    """The cache cannot take an entry; the text says why and what to do."""


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
        if not (folder / ENTRY).is_file():
            return None
        lock = locked(folder / ENTRY, exclusive=False)
        try:
            entry = read_entry(folder, key)
            with contextlib.suppress(OSError):  # a cache that may only be read
                os.utime(folder / ENTRY)
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
        return EntryWriter(self.folder, key, title)

    def remove(self, name: str) -> bool:
        """Remove an entry; return False if it is in use or not there."""
        folder = self.folder / name
        with contextlib.suppress(OSError):
            lock = locked(folder / ENTRY, exclusive=True, wait=False)
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
        found = [info_of(folder) for folder in self._folders()]
        return sorted(found, key=lambda info: info.used)

    def verify(self) -> Iterator[EntryInfo]:
        """Yield every entry with what is wrong with it, after reading all of its files."""
        for info in self.entries():
            if info.problem is not None:
                yield info
                continue
            try:
                entry = read_entry(self.folder / info.name, None)
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
            if not path.name.startswith((BUILDING, _LEAVING)) and (path / ENTRY).is_file()
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
            elif path.name.startswith(BUILDING) and _abandoned(path):
                _log.info("cache_left_behind_removed", folder=path.name)
                shutil.rmtree(path, ignore_errors=True)


def cache_from(setting: bool | str | os.PathLike[str] | None) -> PackedCache | None:
    """Return the cache that ``poros.load(cache=...)`` asks for, or None for none.

    Args:
        setting: True is the default folder, False none, a path that folder, and None what
            ``POROS_CACHE`` says.

    Raises:
        SettingsError: ``POROS_CACHE_LIMIT`` is no size.
    """
    if setting is None:
        text = os.environ.get(FOLDER_VARIABLE, "")
        setting = _SWITCHES.get(text.strip().lower(), text)
    if setting is False:
        return None
    return PackedCache(default_folder() if setting is True else Path(setting).expanduser())


def default_folder() -> Path:
    """Return where packed bases are kept if no folder is named."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "poros" / "packed"


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return _DEFAULT_LIMIT
    limit = parse_size(text, what=LIMIT_VARIABLE)
    if limit < 1:
        raise SettingsError(
            f"{LIMIT_VARIABLE}={text!r} is less than a byte. Give a size such as 200GB; "
            f"{FOLDER_VARIABLE}=0 keeps nothing."
        )
    return limit


def _abandoned(building: Path) -> bool:
    try:
        lock = locked(building / LOCK, exclusive=True, wait=False)
    except FileNotFoundError:  # made a moment ago
        age = datetime.datetime.now().timestamp() - building.stat().st_mtime
        return age > 3600
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is not None
