"""Seeded random checkpoints at any shape, for gates and benchmarks without a download."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig

from poros_core.configs import auto_class
from poros_core.errors import GateError
from poros_core.gate.tensor_file import write_tensors

if TYPE_CHECKING:
    from torch import nn

__all__ = ["write_random_checkpoint"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STD = 0.02
_NORM_STD = 0.1
_WRITERS = 4


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
    deviation 0.02, norm weights are 1 with deviation 0.1, and the lower bounds of clamps (single
    numbers named ``..._min``) are -1 with deviation 0.1; a tied weight is written once. Tensors go
    to disk one by one, so that memory holds a few of them and never a whole shard.

    Args:
        config: a Transformers config as a mapping, ``model_type`` in it.
        path: the folder; made if it is not there.
        seed: of all values.
        dtype: of all tensors, and the config's: bfloat16, float16 or float32.
        device: where values are drawn; a GPU is much faster.
        max_shard_bytes: largest size of one shard.

    Raises:
        GateError: the disk has no room for it.
    """
    model_config = AutoConfig.for_model(**config)
    model_class = getattr(transformers, auto_class(config))
    with torch.device("meta"):
        model = model_class.from_config(model_config, dtype=dtype)
    shapes = _shapes(model)
    total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    path.mkdir(parents=True, exist_ok=True)
    _check_room(path, total)
    shards = list(_shards(shapes, dtype.itemsize, max_shard_bytes))
    files = [
        _SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]

    def draw(name: str) -> torch.Tensor:
        return _draw(name, shapes[name], seed=seed, dtype=dtype, device=device)

    def write(file: str, names: list[str]) -> None:
        write_tensors(path / file, {name: shapes[name] for name in names}, dtype=dtype, make=draw)

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, files, shards))
    if len(shards) > 1:
        weight_map = {t: file for file, shard in zip(files, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    model_config.architectures = [type(model).__name__]
    model_config.dtype = dtype
    model_config.save_pretrained(path)


def _check_room(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise GateError(
            f"The random checkpoint takes {nbytes / 1e9:.1f} GB, and '{path}' has "
            f"{free / 1e9:.1f} GB free. Point TMPDIR at a disk with room."
        )


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


def _draw(
    name: str, shape: torch.Size, *, seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device=device)
    # the CPU's generator reads 32 bits of a seed only
    generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if not shape and name.endswith("_min"):
        return tensor.normal_(-1.0, _NORM_STD, generator=generator)
    if len(shape) <= 1 and "bias" not in name.rpartition(".")[2]:
        return tensor.normal_(1.0, _NORM_STD, generator=generator)
    return tensor.normal_(0.0, _STD, generator=generator)
