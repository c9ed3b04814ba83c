"""BF16: weights that are computed with as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from poros_core.errors import CheckpointError, SettingsError
from poros_loaders.checkpoint import Checkpoint, read_checkpoint
from poros_loaders.pretrained import (
    check_arguments,
    load_checked,
    load_plain,
    mark_device,
    placement,
)
from poros_loaders.refs import ParameterData

if TYPE_CHECKING:
    import torch
    from torch import nn

    from poros_core.packing_strategy import BaseSizes
    from poros_core.protocols import LoadRequest, TensorRef, WeightCodec

__all__ = ["PLAIN", "Bf16Standard", "Bf16Streamed", "PlainCodec"]


@frozen
class PlainCodec:
    """Ordinary floating-point parameters: one tensor each."""

    name: str = "bf16"
    title: str = "BF16"

    def claims(self, param: nn.Parameter) -> bool:
        """Claim exactly ``torch.nn.Parameter`` with a floating-point dtype, no subclass."""
        from torch import nn

        return type(param) is nn.Parameter and param.is_floating_point()

    def refs(self, module: nn.Module, name: str, param: nn.Parameter) -> Sequence[TensorRef]:
        """Return the parameter's data."""
        return (ParameterData(param),)

    def keep_layout(self, module: nn.Module) -> Callable[[], None]:
        """Do nothing: ordinary modules never rearrange their weights."""
        return lambda: None


PLAIN = PlainCodec()


@frozen
class Bf16Streamed:
    """BF16 straight to host memory; the device is not touched."""

    precision: str = "bf16"
    strategy: str = "streamed"
    codec: WeightCodec = PLAIN

    def cannot(self, request: LoadRequest) -> str | None:
        """Return None: what can be loaded onto a device can be loaded into host memory."""
        return None

    def load(self, request: LoadRequest) -> nn.Module:
        """Return the model with its weights in host memory.

        Raises:
            CheckpointError: the checkpoint is damaged, quantised, or does not fit.
            SettingsError: a quantisation is asked for, or an argument for ``from_pretrained`` is
                the loader's to decide.
        """
        _check(request)
        model = load_checked(request, device="cpu", dtype=_dtype(request))
        mark_device(model, request.device)
        return model

    def load_resident(self, request: LoadRequest) -> nn.Module:
        """Return what Transformers' ``from_pretrained`` gives on the device."""
        return load_plain(request, dtype=_dtype(request))

    def cache_key(self, request: LoadRequest) -> Mapping[str, Any]:
        """Return what decides the bytes of the base; see ``PackingStrategy``."""
        return _cache_key(request)

    def estimate(self, request: LoadRequest) -> BaseSizes:
        """Return about how large the base will be; see ``PackingStrategy``."""
        return _estimate(request)

    def describe(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what a packed base must note besides tensors; see ``PackingStrategy``."""
        return _describe(model)

    def skeleton(self, request: LoadRequest, described: Mapping[str, Any]) -> nn.Module:
        """Return the model without reading a weight; see ``PackingStrategy``."""
        return _skeleton(request, described)


@frozen
class Bf16Standard:
    """BF16 onto the device in the ordinary way."""

    precision: str = "bf16"
    strategy: str = "standard"
    codec: WeightCodec = PLAIN

    def cannot(self, request: LoadRequest) -> str | None:
        """Return None: this is the ordinary way."""
        return None

    def load(self, request: LoadRequest) -> nn.Module:
        """Return the model with its weights on the device.

        Raises:
            CheckpointError: the checkpoint is damaged, quantised, or does not fit.
            SettingsError: a quantisation is asked for, or an argument for ``from_pretrained`` is
                the loader's to decide.
        """
        _check(request)
        model = load_checked(request, device=placement(request.device), dtype=_dtype(request))
        mark_device(model, request.device)
        return model

    def load_resident(self, request: LoadRequest) -> nn.Module:
        """Return what Transformers' ``from_pretrained`` gives on the device."""
        return load_plain(request, dtype=_dtype(request))

    def cache_key(self, request: LoadRequest) -> Mapping[str, Any]:
        """Return what decides the bytes of the base; see ``PackingStrategy``."""
        return _cache_key(request)

    def estimate(self, request: LoadRequest) -> BaseSizes:
        """Return about how large the base will be; see ``PackingStrategy``."""
        return _estimate(request)

    def describe(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what a packed base must note besides tensors; see ``PackingStrategy``."""
        return _describe(model)

    def skeleton(self, request: LoadRequest, described: Mapping[str, Any]) -> nn.Module:
        """Return the model without reading a weight; see ``PackingStrategy``."""
        return _skeleton(request, described)


def _dtype(request: LoadRequest) -> torch.dtype:
    import torch

    return torch.bfloat16 if request.dtype is None else request.dtype


def _check(request: LoadRequest) -> Checkpoint:
    check_arguments(request)
    if request.quantization_config is not None:
        raise SettingsError(
            "precision='bf16' loads weights as they are, and a quantization_config was given too. "
            "Leave quantization_config out, or ask for precision='nf4'."
        )
    checkpoint = read_checkpoint(request.path)
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.get("quant_method", "unknown")
        raise CheckpointError(
            f"Checkpoint '{request.path}' is quantised already (quant_method '{method}'), so "
            "precision='bf16' cannot be had from it. Use precision='nf4' if it is a bitsandbytes "
            "NF4 checkpoint, or give the unquantised checkpoint."
        )
    return checkpoint


def _cache_key(request: LoadRequest) -> Mapping[str, Any]:
    from poros_loaders.cache_key import request_key

    return request_key(
        request,
        _check(request),
        precision=PLAIN.name,
        dtype=_dtype(request),
        quantization=None,
    )


def _estimate(request: LoadRequest) -> BaseSizes:
    from poros_loaders.estimate import estimated

    checkpoint = read_checkpoint(request.path)
    return estimated(checkpoint, dtype=_dtype(request), quantised=False, double=False)


def _describe(model: nn.Module) -> Mapping[str, Any]:
    from poros_loaders.skeleton import described_dtype

    return {"dtype": described_dtype(model)}


def _skeleton(request: LoadRequest, described: Mapping[str, Any]) -> nn.Module:
    from poros_loaders.skeleton import settle_dtype, uncast_dtype

    checkpoint = _check(request)
    noted = described["dtype"]
    dtype = uncast_dtype(checkpoint, _dtype(request), noted=noted)
    model = load_checked(request, device="cpu", dtype=dtype)
    settle_dtype(model, noted=noted)
    mark_device(model, request.device)
    return model
