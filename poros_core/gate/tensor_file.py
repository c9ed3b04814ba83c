"""Reading and writing the safetensors format: a length, a JSON header, and bytes.

Core needs it for two small things, random weights and tokenised records, and leaves everything
else about checkpoints to the loaders.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from poros_core.errors import GateError

__all__ = ["read_tensors", "write_tensors"]

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_tensors(
    path: Path,
    shapes: Mapping[str, torch.Size],
    *,
    dtype: torch.dtype,
    make: Callable[[str], torch.Tensor],
) -> None:
    """Write a file with one tensor in memory at a time.

    Args:
        path: the file.
        shapes: of all tensors, in the order in which they are written.
        dtype: of all tensors.
        make: called with a name; returns that tensor, of its shape and the dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            flat = make(name).detach().cpu().contiguous().view(-1).view(torch.uint8)
            file.write(flat.numpy().data)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a small file whole.

    Raises:
        GateError: it cannot be read, or is no safetensors file.
    """
    try:
        content = bytearray(path.read_bytes())
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        return {
            name: torch.frombuffer(
                content,
                dtype=_DTYPES[entry["dtype"]],
                count=(entry["data_offsets"][1] - entry["data_offsets"][0])
                // _DTYPES[entry["dtype"]].itemsize,
                offset=8 + length + entry["data_offsets"][0],
            ).view(entry["shape"])
            for name, entry in header.items()
        }
    except OSError as error:
        raise GateError(f"'{path}' cannot be read: {error.strerror}. Check the path.") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise GateError(
            f"'{path}' is no safetensors file of plain tensors ({error}). Write it with "
            "safetensors.torch.save_file."
        ) from error
