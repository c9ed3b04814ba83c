"""Names and shapes of a checkpoint's tensors from its headers, without a weight and without torch.

A safetensors file begins with eight bytes of length and a JSON text that describes every tensor.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from attrs import frozen
from huggingface_hub import HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HTTPError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    SafetensorsParsingError,
)

from poros_core.errors import CheckpointError

__all__ = ["Headers", "hub_headers", "local_headers"]

_LIMIT = 100_000_000
_METADATA = "__metadata__"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-(?P<number>\d{1,9})-of-(?P<of>\d{1,9})\.safetensors")
_MOST = 100_000
"""Shards that are looked for at most."""


@frozen(kw_only=True)
class Headers:
    """What the headers of a checkpoint say.

    Attributes:
        shapes: every tensor's shape by name.
        nbytes: bytes of its files, as far as they are on this disk.
        missing: bytes that are still to be downloaded; None if that is not known.
    """

    shapes: dict[str, tuple[int, ...]]
    nbytes: int
    missing: int | None


def local_headers(folder: Path) -> Headers | None:
    """Read the headers of a folder; None if it holds no safetensors file.

    Raises:
        CheckpointError: a file is not what its name says, or shards are missing.
    """
    files = _files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= _shapes(file)
    if not files:
        return None
    return Headers(shapes=shapes, nbytes=sum(file.stat().st_size for file in files), missing=0)


def _files(folder: Path) -> list[Path]:
    """Return the files that Transformers would read: the single one, or those of the index."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        return _numbered(folder)
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} has no 'weight_map' that says which shard holds which tensor ({error!r}). "
            "Download the index again."
        ) from error
    missing = sorted(n for n in names if Path(n).name != n or not (folder / n).is_file())
    if missing:
        _lacks(folder, len(missing), len(names), missing[0])
    return [folder / name for name in sorted(names)]


def _numbered(folder: Path) -> list[Path]:
    """Return the shards of a folder without an index, by their names."""
    files = sorted(folder.glob("model*.safetensors"))
    found = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    whole = max((int(match["of"]) for match in found), default=0)
    numbers = {int(match["number"]) for match in found}
    missing = [number for number in range(1, min(whole, _MOST) + 1) if number not in numbers]
    if missing:
        _lacks(folder, len(missing), whole, f"number {missing[0]}")
    return files


def _lacks(folder: Path, count: int, whole: int, first: str) -> None:
    raise CheckpointError(
        f"'{folder}' lacks {count} of its {whole} shards: {first}{' first' * (count > 1)}. "
        "Download the missing files again (huggingface_hub's snapshot_download resumes where it "
        "stopped)."
    )


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LIMIT:
                raise ValueError(f"a header of {length} bytes")
            header: Any = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        return {
            name: _shape(tensor["shape"]) for name, tensor in header.items() if name != _METADATA
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise CheckpointError(
            f"{file} is no safetensors file ({error}). Download or save the model again."
        ) from error


def _shape(extents: Any) -> tuple[int, ...]:
    if not isinstance(extents, list) or not all(type(n) is int and n >= 0 for n in extents):
        raise ValueError(f"a shape of {extents!r}")
    return tuple(extents)


def hub_headers(model: str, *, revision: str | None) -> Headers:
    """Read the headers of a model on the Hub. Downloads nothing else.

    Raises:
        CheckpointError: they cannot be had.
    """
    try:
        metadata = HfApi().get_safetensors_metadata(model, revision=revision)
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise CheckpointError(
            f"'{model}' on the Hub has no safetensors files that can be read. Name a model in "
            "Transformers format."
        ) from error
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise CheckpointError(
            f"The headers of '{model}' cannot be had from the Hub ({type(error).__name__}), and "
            "its config alone does not say all shapes. Name a local folder with the checkpoint."
        ) from error
    tensors = {
        name: tensor
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
    total = sum(t.data_offsets[1] - t.data_offsets[0] for t in tensors.values())
    return Headers(
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        nbytes=0,
        missing=total,
    )
