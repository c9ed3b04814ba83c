"""A checkpoint of which large weights are holes in files, and the weights that stand for them.

[Note: Holes]
Headers, shapes and index are a true checkpoint's, so that the whole of a real load runs;
embeddings, head, norms and biases are drawn and written. The matrices of layers take no room on the
disk. Where the loader reads one of them from its shard, piece by piece, ``generating`` gives it
seeded random bf16 instead: a stretch of a pool of normal values that stands in memory beforehand,
at a place that the seed and the weight's name decide. Nothing else of the load is another.
"""

from __future__ import annotations

import copy
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoConfig

from poros_core.configs import auto_class
from poros_loaders import weight_reader
from poros_loaders.weight_reader import Extent

__all__ = ["Pool", "generating", "write_holes"]

_LAYER = re.compile(r"\.\d+\.")
_SHARD_BYTES = 5_000_000_000
_STD = 0.02
_POOL_BYTES = 1 << 30
_PLACES = 256


class Pool:
    """Seeded random bf16 weights of any size, of which each has bytes of its own."""

    def __init__(self, seed: int, device: torch.device, *, nbytes: int = _POOL_BYTES) -> None:
        """Draw the values.

        Args:
            seed: of all of them.
            device: where they are drawn.
            nbytes: how many bytes differ.
        """
        self._seed = seed
        drawn = _drawn(torch.Size((1, nbytes // 2)), f"{seed}:pool", device).view(-1)
        self._bytes = drawn.cpu().view(torch.uint8)

    def to(self, device: torch.device) -> Pool:
        """Return the same pool on a device."""
        moved = copy.copy(self)
        moved._bytes = self._bytes.to(device)
        return moved

    def fill(self, name: str, at: int, into: torch.Tensor) -> None:
        """Write part of a weight.

        Args:
            name: the weight's.
            at: bytes of it before that part; even.
            into: flat bytes.
        """
        size = self._bytes.numel()
        place = zlib.crc32(f"{self._seed}:{name}".encode()) * _PLACES
        done = 0
        while done < into.numel():
            begin = (place + at + done) % size
            count = min(size - begin, into.numel() - done)
            into[done : done + count].copy_(self._bytes[begin : begin + count])
            done += count

    def weight(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return a weight, where the pool is."""
        made = torch.empty(shape, dtype=torch.bfloat16, device=self._bytes.device)
        self.fill(name, 0, made.view(-1).view(torch.uint8))
        return made


def write_holes(config: Mapping[str, Any], path: Path, *, seed: int, device: torch.device) -> None:
    """Write the checkpoint; see [Note: Holes].

    Args:
        config: a Transformers config as a mapping.
        path: the folder; made if it is not there.
        seed: of all values that are written.
        device: where they are drawn.
    """
    model_config = AutoConfig.for_model(**config)
    model_class = getattr(transformers, auto_class(config))
    with torch.device("meta"):
        model = model_class.from_config(model_config, dtype=torch.bfloat16)
    shapes: dict[str, torch.Size] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = tensor.shape
    path.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(shapes)):
        file = f"model-{number:05}.safetensors"
        _write(path / file, shard, seed=seed, device=device)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    model_config.architectures = [type(model).__name__]
    model_config.dtype = torch.bfloat16
    model_config.save_pretrained(path)


@contextmanager
def generating(pool: Pool) -> Iterator[None]:
    """Let weights that are read ahead come from a pool."""

    def read(handle: int, extent: Extent, at: int, into: memoryview) -> None:
        pool.fill(extent.name, at, torch.frombuffer(into, dtype=torch.uint8))

    with mock.patch.object(weight_reader, "read_piece", read):
        yield


def _shards(shapes: Mapping[str, torch.Size]) -> Iterator[dict[str, torch.Size]]:
    shard: dict[str, torch.Size] = {}
    size = 0
    for name, shape in shapes.items():
        if shard and size + 2 * shape.numel() > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += 2 * shape.numel()
    yield shard


def _write(
    path: Path, shapes: Mapping[str, torch.Size], *, seed: int, device: torch.device
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            if len(shape) > 1 and _LAYER.search(name):
                continue
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            drawn = _drawn(shape, f"{seed}:{name}", device)
            file.write(drawn.cpu().view(torch.uint8).numpy().data)
        file.truncate(8 + len(text) + end)


def _drawn(shape: torch.Size, seed: str, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(seed.encode()))
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return tensor.normal_(float(len(shape) < 2), _STD, generator=generator)
