"""NF4 by bitsandbytes: the codec, and the two ways to load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from poros_core.errors import PrepareError
from poros_loaders.pretrained import (
    check_arguments,
    load_checked,
    load_plain,
    mark_device,
    placement,
)
from poros_loaders.refs import StateTensor, SubclassData

if TYPE_CHECKING:
    import torch
    from torch import nn

    from poros_core.packing_strategy import BaseSizes
    from poros_core.protocols import LoadRequest, TensorRef, WeightCodec
    from poros_loaders.checkpoint import Checkpoint

__all__ = ["NF4", "Nf4Codec", "Nf4Standard", "Nf4Streamed"]

_REPACKS = "support_avx512bf16_for_cpu"


@frozen
class Nf4Codec:
    """bitsandbytes' 4-bit parameters: the packed weight and all of its quantisation state."""

    name: str = "nf4"
    title: str = "NF4"

    def claims(self, param: nn.Parameter) -> bool:
        """Claim every ``Params4bit`` of this codec's kind, and leave FP4 to others."""
        bnb: Any = sys.modules.get("bitsandbytes")  # not imported: no such parameter exists
        if bnb is None or not isinstance(param, bnb.nn.Params4bit):
            return False
        kind: Any = param
        return bool(kind.quant_type == self.name)

    def refs(self, module: nn.Module, name: str, param: nn.Parameter) -> Sequence[TensorRef]:
        """Return packed data, ``absmax`` and ``code``, and what double quantisation adds.

        Raises:
            PrepareError: the parameter is FP4, not quantised yet, or repacked for the CPU.
        """
        import torch

        weight: Any = param
        state = weight.quant_state
        self._check(f"{type(module).__name__}.{name}", weight, state)
        refs: list[TensorRef] = [
            SubclassData(param, torch._C.DisableTorchFunctionSubclass),
            StateTensor("absmax", state, "absmax"),
            StateTensor("code", state, "code"),
        ]
        if state.nested:
            refs += [
                StateTensor("offset", state, "offset"),
                StateTensor("state2.absmax", state.state2, "absmax"),
                StateTensor("state2.code", state.state2, "code"),
            ]
        return tuple(refs)

    def keep_layout(self, module: nn.Module) -> Callable[[], None]:
        """Keep bitsandbytes from repacking a module's weight in place.

        On CPUs with AVX512-BF16, ``Linear4bit`` repacks its weight in its first ``eval`` forward
        and rounds ``absmax``; a streamed weight must keep the layout that it was stored in.

        Args:
            module: any module; one that never repacks is left as it is.

        Returns: what puts the module back as it was.
        """
        before = module.__dict__.get(_REPACKS)
        if not before:
            return lambda: None
        setattr(module, _REPACKS, False)
        return lambda: setattr(module, _REPACKS, before)

    def _check(self, where: str, weight: Any, state: Any) -> None:
        if not weight.bnb_quantized or state is None:
            raise PrepareError(
                f"A 4-bit weight ({where}) is not quantised yet. Load the model with "
                "from_pretrained and a BitsAndBytesConfig, or move it to its device once, before "
                "it is prepared."
            )
        if state.quant_type != self.name:
            raise PrepareError(
                f"A 4-bit weight ({where}) has quant_type '{state.quant_type}', and only 'nf4' is "
                "streamed. Load the model with BitsAndBytesConfig(load_in_4bit=True, "
                "bnb_4bit_quant_type='nf4')."
            )
        if getattr(state, "packing_format_for_cpu", False):
            raise PrepareError(
                f"bitsandbytes has repacked a 4-bit weight ({where}) for inference on this CPU, "
                "which rounds its quantisation state for good. Load the model again and prepare "
                "it before its first forward in eval mode."
            )


NF4 = Nf4Codec()


@frozen
class Nf4Streamed:
    """One tensor at a time: staged on the device, quantised there, moved to host memory."""

    precision: str = "nf4"
    strategy: str = "streamed"
    codec: WeightCodec = NF4

    def cannot(self, request: LoadRequest) -> str | None:
        """Return the named reason why weights cannot be staged one by one, or None."""
        from poros_loaders.bnb_config import asked

        if asked(request).llm_int8_enable_fp32_cpu_offload:
            return (
                "quantization_config has llm_int8_enable_fp32_cpu_offload=True, with which "
                "Transformers leaves weights that are loaded into host memory unquantised"
            )
        return None

    def load(self, request: LoadRequest) -> nn.Module:
        """Return the model with packed weights in host memory, byte for byte the standard load's.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit.
            SettingsError: the quantisation asked for is not NF4, or this strategy cannot load it.
        """
        from poros_core.errors import SettingsError
        from poros_loaders.staging import load_staged

        reason = self.cannot(request)
        if reason is not None:
            raise SettingsError(f"Strategy 'streamed' cannot load this: {reason}. Use 'standard'.")
        checkpoint, config = _check(request)
        dtype = _dtype(request)
        if config is None:
            return _finish(request, load_checked(request, device="cpu", dtype=dtype))
        model, shapes = load_staged(
            request, dtype=dtype, quantization_config=config, checkpoint=checkpoint
        )
        return _finish(request, model, shapes=shapes)

    def load_resident(self, request: LoadRequest) -> nn.Module:
        """Return what Transformers' ``from_pretrained`` gives on the device."""
        return _load_resident(request)

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
class Nf4Standard:
    """The ordinary way: Transformers quantises onto the device and all of it stays there."""

    precision: str = "nf4"
    strategy: str = "standard"
    codec: WeightCodec = NF4

    def cannot(self, request: LoadRequest) -> str | None:
        """Return None: this is the ordinary way."""
        return None

    def load(self, request: LoadRequest) -> nn.Module:
        """Return the model with packed weights on the device.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit.
            SettingsError: the quantisation asked for is not NF4.
        """
        _, config = _check(request)
        model = load_checked(
            request,
            device=placement(request.device),
            dtype=_dtype(request),
            quantization_config=config,
        )
        return _finish(request, model)

    def load_resident(self, request: LoadRequest) -> nn.Module:
        """Return what Transformers' ``from_pretrained`` gives on the device."""
        return _load_resident(request)

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


def _dtype(request: LoadRequest) -> torch.dtype | str:
    return "auto" if request.dtype is None else request.dtype


def _check(request: LoadRequest) -> tuple[Checkpoint, Any]:
    """Check everything that can be checked before a weight is read.

    Returns: the headers, and the config to quantise with; None if the checkpoint is quantised
    already.
    """
    from poros_loaders.bnb_config import check_shapes, for_checkpoint
    from poros_loaders.checkpoint import read_checkpoint

    check_arguments(request)
    checkpoint = read_checkpoint(request.path)
    config = for_checkpoint(request, checkpoint)
    check_shapes(request, checkpoint, config)
    return checkpoint, config


def _finish(
    request: LoadRequest, model: Any, *, shapes: Mapping[str, torch.Size] | None = None
) -> nn.Module:
    from poros_loaders.bnb_config import check_quantised

    check_quantised(request, model, shapes=shapes)
    for module in model.modules():
        NF4.keep_layout(module)
    mark_device(model, request.device)
    loaded: nn.Module = model
    return loaded


def _load_resident(request: LoadRequest) -> nn.Module:
    from poros_loaders.bnb_config import for_checkpoint
    from poros_loaders.checkpoint import read_checkpoint

    config = for_checkpoint(request, read_checkpoint(request.path))
    return load_plain(request, dtype=_dtype(request), quantization_config=config)


def _cache_key(request: LoadRequest) -> Mapping[str, Any]:
    from poros_loaders.bnb_config import for_checkpoint
    from poros_loaders.cache_key import request_key
    from poros_loaders.checkpoint import read_checkpoint

    check_arguments(request)
    checkpoint = read_checkpoint(request.path)
    config = for_checkpoint(request, checkpoint)
    return request_key(
        request,
        checkpoint,
        precision=NF4.name,
        dtype=_dtype(request),
        quantization=None if config is None else config.to_dict(),
    )


def _estimate(request: LoadRequest) -> BaseSizes:
    from poros_loaders.bnb_config import for_checkpoint
    from poros_loaders.checkpoint import read_checkpoint
    from poros_loaders.estimate import estimated

    checkpoint = read_checkpoint(request.path)
    config = for_checkpoint(request, checkpoint)
    double = config is not None and config.bnb_4bit_use_double_quant
    return estimated(
        checkpoint, dtype=request.dtype, quantised=config is not None, double=bool(double)
    )


def _describe(model: nn.Module) -> Mapping[str, Any]:
    from poros_loaders.skeleton import described_dtype, noted_weights

    return {"dtype": described_dtype(model), "weights": noted_weights(model)}


def _skeleton(request: LoadRequest, described: Mapping[str, Any]) -> nn.Module:
    from poros_loaders.skeleton import settle_dtype, uncast_dtype
    from poros_loaders.staging import load_staged

    checkpoint, config = _check(request)
    noted = described["dtype"]
    dtype = uncast_dtype(checkpoint, _dtype(request), noted=noted)
    shapes = None
    if config is None:
        model = load_checked(request, device="cpu", dtype=_dtype(request))
    else:
        model, shapes = load_staged(
            request,
            dtype=dtype,
            quantization_config=config,
            checkpoint=checkpoint,
            noted=described["weights"],
        )
    settle_dtype(model, noted=noted)
    return _finish(request, model, shapes=shapes)
