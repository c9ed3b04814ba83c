"""Names and shapes of a checkpoint's tensors from its headers, without a weight and without torch.

A safetensors file begins with eight bytes of length and a JSON text that describes every tensor.
"""

from __future__ import annotations

import json
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
        CheckpointError: a file is not what its name says.
    """
    files = sorted(folder.glob("model*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= _shapes(file)
    if not files:
        return None
    return Headers(shapes=shapes, nbytes=sum(file.stat().st_size for file in files), missing=0)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LIMIT:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        return {
            name: tuple(tensor["shape"]) for name, tensor in header.items() if name != _METADATA
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{file} is no safetensors file ({error}). Download or save the model again."
        ) from error


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
