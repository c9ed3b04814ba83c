"""What decides the bytes of a packed base, as a mapping that the cache is keyed by.

[Note: What the fingerprint covers]
Of every shard: its name, its size, its modification time, the SHA-256 of its header, and the
SHA-256 of up to 64 samples of 4 KiB spread over it. Of ``config.json`` and the index: the SHA-256.
Weights are not hashed whole, which would read the checkpoint that the cache exists to spare. So an
edit in place that keeps size and modification time, and misses every sample, is not seen.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros_core.packed_cache import CacheRefusal
from poros_loaders.checkpoint import INDEX, Checkpoint

if TYPE_CHECKING:
    import torch

    from poros_core.protocols import LoadRequest

__all__ = ["request_key"]

_SAMPLES = 64
_SAMPLE = 4096
_PLAIN = (str, int, float, bool, type(None))


def request_key(
    request: LoadRequest,
    checkpoint: Checkpoint,
    *,
    precision: str,
    dtype: torch.dtype | str,
    quantization: Mapping[str, Any] | None,
) -> Mapping[str, Any]:
    """Return everything that decides the bytes of a base. See [Note: What the fingerprint covers].

    Args:
        request: what is loaded.
        checkpoint: its headers.
        precision: of the base.
        dtype: of what is not quantised, or ``"auto"``.
        quantization: the settings to quantise with; None if nothing is quantised now.

    Raises:
        CacheRefusal: something decides them that cannot be put into a key.
    """
    if request.trust_remote_code:
        raise CacheRefusal(
            "trust_remote_code is on, and what such code does cannot be told from the checkpoint; "
            "leave cache= out"
        )
    return {
        "precision": precision,
        "device": _device(request.device),
        "dtype": str(dtype),
        "quantization": None if quantization is None else _plain("", dict(quantization)),
        "from_pretrained": _plain("", dict(request.from_pretrained)),
        "checkpoint": _fingerprint(checkpoint),
        "versions": {
            name: _version(name)
            for name in ("poros-train", "torch", "transformers", "bitsandbytes")
        },
    }


def _fingerprint(checkpoint: Checkpoint) -> dict[str, Any]:
    texts = [path for name in ("config.json", INDEX) if (path := checkpoint.path / name).is_file()]
    return {
        "shards": [_shard(file) for file in checkpoint.files],
        "texts": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in texts},
    }


def _shard(file: Path) -> dict[str, Any]:
    stat = file.stat()
    with file.open("rb", buffering=0) as stream:
        prefix = stream.read(8)
        header = prefix + stream.read(struct.unpack("<Q", prefix)[0])
        sampled = hashlib.sha256()
        room = stat.st_size - len(header)
        step = max(_SAMPLE, room // _SAMPLES)
        for begin in range(len(header), stat.st_size, step):
            stream.seek(begin)
            sampled.update(stream.read(_SAMPLE))
    return {
        "name": file.name,
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "header": hashlib.sha256(header).hexdigest(),
        "samples": sampled.hexdigest(),
    }


def _device(device: torch.device) -> str:
    """Name the kernels that quantise: of a CPU, or of a GPU of one compute capability."""
    if device.type != "cuda":
        return device.type
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {major}.{minor}"


def _plain(name: str, value: Any) -> Any:
    """Return a value as JSON knows it.

    Raises:
        CacheRefusal: it is an object that says nothing of itself.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        listed = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(name, entry) for entry in listed]
    if isinstance(value, _PLAIN):
        return value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    raise CacheRefusal(
        f"the argument '{name.removeprefix('.')}' is a {type(value).__name__}, which cannot be put "
        "into a cache's key; leave it or cache= out"
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
