"""Every tensor that decides a model's numbers, by its bytes."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from poros_core.plugins import plugins

__all__ = ["tensor_manifest"]

_THREADS = 8
"""Hashing releases the interpreter; one thread would take longer than the loads it compares."""


def tensor_manifest(model: nn.Module, *, frozen: bool = False) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of every tensor that decides a model's numbers.

    Args:
        model: the model.
        frozen: leave out parameters that train.
    """
    tensors = _tensors(model, frozen=frozen)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(tensors, pool.map(_described, tensors.values()), strict=True))


def _tensors(model: nn.Module, *, frozen: bool) -> dict[str, torch.Tensor]:
    codecs = [codec for codec, _ in plugins().codecs()]
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None or (frozen and param.requires_grad):
                continue
            codec = next((codec for codec in codecs if codec.claims(param)), None)
            if codec is None:
                found[f"{path}.{name}"] = param
                continue
            for ref in codec.refs(module, name, param):
                found[f"{path}.{name}:{ref.name}"] = ref.get()
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found[f"{path}.{name}"] = buffer
    return found


def _described(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(content.numpy().data).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} sha256 {digest}"
