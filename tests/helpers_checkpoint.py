"""Tiny checkpoints, written on the fly, and ways to damage them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from poros_core.protocols import LoaderStrategy, LoadRequest
from poros_families.qwen2 import QWEN2
from poros_loaders import poros_loaders

CPU = torch.device("cpu")
TINY: Mapping[str, Any] = QWEN2.shapes["tiny"]


def write_checkpoint(
    path: Path,
    shape: Mapping[str, Any] = TINY,
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a seeded checkpoint with Transformers' ``save_pretrained``; biases are not zero.

    The caller's random state is left alone. Returns ``path``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.05)
            elif parameter.ndim == 1:
                nn.init.normal_(parameter, mean=1.0, std=0.1)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=total if shards == 1 else -(-total // shards))
    return path


def strategy(precision: str, name: str) -> LoaderStrategy:
    (found,) = [s for s in poros_loaders() if (s.precision, s.strategy) == (precision, name)]
    return found


def request(path: Path, **changes: Any) -> LoadRequest:
    return LoadRequest(**{"path": path, "family": QWEN2, "device": CPU, **changes})


def bnb_config(*, double: bool, storage: torch.dtype, compute: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage=storage,
    )


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply ``change`` to the tensors of a checkpoint that has one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to a JSON file."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def write_raw(file: Path, header: bytes, data: bytes = b"") -> None:
    """Write a safetensors file with any header, well-formed or not."""
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
