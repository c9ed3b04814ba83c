"""Moving what does not stream to the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from poros_core.protocols import WeightCodec

__all__ = ["move_the_rest"]


def move_the_rest(
    model: nn.Module,
    *,
    codecs: Sequence[WeightCodec],
    streamed: Collection[int],
    device: torch.device,
    held: Callable[[tuple[int, str]], bool] = lambda key: False,
) -> None:
    """Move every parameter that does not stream, and every buffer, to the device.

    A quantised weight is moved with its quantisation state: a kernel that was given one of them in
    host memory would read an address that the device does not know.

    Args:
        model: the model.
        codecs: know what a weight consists of. One that none claims is its data.
        streamed: ids of the parameters that stream.
        device: the compute device.
        held: says of the key of a place whether its bytes belong to the host store. Such a tensor
            gets memory of its own.
    """
    seen = set(streamed)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            codec = next((codec for codec in codecs if codec.claims(param)), None)
            if codec is None:
                key = (id(param), "data")
                param.data = _moved(param.data, device, own=held(key))
                continue
            for ref in codec.refs(module, name, param):
                ref.set(_moved(ref.get(), device, own=held(ref.key)))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _moved(tensor: torch.Tensor, device: torch.device, *, own: bool) -> torch.Tensor:
    return (tensor.clone() if own else tensor).to(device)
