"""What ``poros.load`` is asked for, checked before anything is read or fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch

from poros_core.errors import CheckpointError, SettingsError
from poros_core.load_progress import LoadObserver
from poros_core.packed_cache import PackedCache, cache_from

__all__ = ["asked_cache", "checked_name", "checked_observer", "named_dtype"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TOLD = ("stage", "advance", "done")


def checked_name(model: object) -> str:
    """Return a folder or hub id as text.

    Raises:
        CheckpointError: it is empty.
        SettingsError: it is neither text nor a path.
    """
    if not isinstance(model, str | os.PathLike):
        raise SettingsError(
            "A model is named by the folder that holds it, or by a hub id such as "
            f"'Qwen/Qwen2.5-7B'; got {_told(model)}."
        )
    name = str(model)
    if not name.strip():
        raise CheckpointError(
            "The name of the model is empty. Pass the folder that holds config.json and the "
            "safetensors files, or a hub id such as 'Qwen/Qwen2.5-7B'."
        )
    return name


def named_dtype(dtype: object) -> torch.dtype | None:
    """Return the dtype of that name. ``"auto"`` is None: the default of the precision.

    Raises:
        SettingsError: it is none that a model can be loaded in.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found in _DTYPES:
        return found
    names = ", ".join(repr(str(known).removeprefix("torch.")) for known in _DTYPES)
    raise SettingsError(
        f"dtype must be one of {names}, the torch dtype of such a name, 'auto' or None; got "
        f"{dtype!r}."
    )


def checked_observer(observer: object) -> LoadObserver | None:
    """Return the observer if it has the methods of one.

    Raises:
        SettingsError: it lacks some.
    """
    if observer is None:
        return None
    lacking = [name for name in _TOLD if not callable(getattr(observer, name, None))]
    if lacking:
        raise SettingsError(
            f"observer must be a LoadObserver, which has the methods {', '.join(_TOLD)}; "
            f"{_told(observer)} lacks {', '.join(lacking)}. For a progress bar pass verbose=True "
            "instead."
        )
    return cast(LoadObserver, observer)


def asked_cache(cache: Any, host: str) -> PackedCache | None:
    """Return the cache to use. ``host="mmap"`` needs one: the default, if none is named.

    A folder that ``cache`` asks for is made at once, so that a base is not read in vain; one that
    ``POROS_CACHE`` names is made when something is written.

    Raises:
        SettingsError: ``cache`` is neither a switch nor a path, or there can be no such folder.
    """
    if cache is not None and not isinstance(cache, bool | str | os.PathLike):
        raise SettingsError(f"{_CACHE}; got {_told(cache)}.")
    if isinstance(cache, str) and not cache.strip():
        raise SettingsError(f"{_CACHE}; got an empty path.")
    found = cache_from(cache)
    if cache is None:
        return cache_from(True) if found is None and host == "mmap" else found
    if found is not None:
        _make(found.folder)
    return found


_CACHE = "cache must be True, False, None or the path of a folder"


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"cache: '{folder}' is a file. Pass the path of a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"cache: there can be no folder '{folder}' ({error}). Pass one that can be written, "
            "or leave cache out."
        ) from error


def _told(value: object) -> str:
    return "None" if value is None else f"{value!r:.60} (a {type(value).__name__})"
