"""Seeded random checkpoints at any shape, for gates and benchmarks without a download.

Imported only when one is written: it needs torch and transformers.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig

from poros_core.configs import auto_class
from poros_loaders.checkpoint import INDEX, SINGLE

if TYPE_CHECKING:
    from torch import nn

__all__ = ["write_random_checkpoint"]

_STD = 0.02
_NORM_STD = 0.1
_WRITERS = 4
_SAFETENSORS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_random_checkpoint(
    config: Mapping[str, Any],
    path: Path,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    max_shard_bytes: float = 4e9,
) -> None:
    """Write a random checkpoint that ``from_pretrained`` loads.

    Every tensor has a generator of its own, seeded by ``seed`` and the tensor's name, so its values
    depend on nothing else but dtype and the kind of device. Matrices and biases are normal with
    deviation 0.02, norm weights are 1 with deviation 0.1; a tied weight is written once. Tensors go
    to disk one by one, so that memory holds a few of them and never a whole shard.

    Args:
        config: a Transformers config as a mapping, ``model_type`` in it.
        path: the folder; made if it is not there.
        seed: of all values.
        dtype: of all tensors, and the config's: bfloat16, float16 or float32.
        device: where values are drawn; a GPU is much faster.
        max_shard_bytes: largest size of one shard.
    """
    model_config = AutoConfig.for_model(**config)
    model_class = getattr(transformers, auto_class(config))
    with torch.device("meta"):
        model = model_class.from_config(model_config, dtype=dtype)
    shapes = _shapes(model)
    path.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(shapes, dtype.itemsize, max_shard_bytes))
    names = [
        SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]

    def write(name: str, tensors: list[str]) -> None:
        entries = {tensor: shapes[tensor] for tensor in tensors}
        with (path / name).open("wb") as stream:
            stream.write(_header(entries, dtype))
            for tensor, shape in entries.items():
                drawn = _draw(tensor, shape, seed=seed, dtype=dtype, device=device)
                stream.write(drawn.cpu().view(-1).view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, names, shards))
    if len(shards) > 1:
        total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
        weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    model_config.architectures = [type(model).__name__]
    model_config.dtype = dtype
    model_config.save_pretrained(path)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of every tensor that a checkpoint holds, tied ones once."""
    seen: set[int] = set()
    shapes: dict[str, torch.Size] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = tensor.shape
    return shapes


def _shards(
    shapes: Mapping[str, torch.Size], itemsize: int, max_shard_bytes: float
) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = shape.numel() * itemsize
        if names and size + nbytes > max_shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _header(shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> bytes:
    """Return the safetensors header of tensors that follow one another in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _draw(
    name: str, shape: torch.Size, *, seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device=device)
    # the CPU's generator reads 32 bits of a seed only
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if len(shape) <= 1 and "bias" not in name.rpartition(".")[2]:
        return tensor.normal_(1.0, _NORM_STD, generator=generator)
    return tensor.normal_(0.0, _STD, generator=generator)
