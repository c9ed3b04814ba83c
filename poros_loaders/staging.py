"""The streamed NF4 load: Transformers' own load, with each weight staged on the device.

[Note: Staged quantisation]
Transformers loads into host memory (all renaming of keys, tying and checking is its own) and hands
each weight that is to be quantised to the quantizer's operation. That operation is subclassed here:
it copies the weight to the compute device, lets the original quantise it there, and moves packed
data and quantisation state back, so that one unquantised weight at a time is on the device.

The quantizer is found by name in Transformers' registry of quantizers. It stands there only while
it is looked up and the load runs, under a name of its own; the config gets its real method back at
once, and the finished model gets an ordinary quantizer, so nothing later can tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import QuantizationMethod

from poros_core.finite import FiniteCheck
from poros_loaders.pretrained import load_checked
from poros_loaders.read_ahead import ReadAhead
from poros_loaders.skeleton import empty_weight

if TYPE_CHECKING:
    from torch import nn

    from poros_core.protocols import LoadRequest

__all__ = ["load_staged"]

_numbers = itertools.count()


def load_staged(
    request: LoadRequest,
    *,
    dtype: torch.dtype | str,
    quantization_config: Any,
    noted: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Load with every quantised weight staged on ``request.device``. See the module's note.

    Args:
        request: what is loaded.
        dtype: dtype of what is not quantised, or ``"auto"``.
        quantization_config: a ``BitsAndBytesConfig`` that the model may keep.
        noted: what a packed base notes of its quantised weights: they are then left empty, and
            none is read.

    Raises:
        CheckpointError: keys are missing, unexpected, or of another shape, or a weight that is
            quantised is not finite.
    """
    failures: list[Exception] = []
    finite = FiniteCheck()
    files = [] if noted is not None else sorted(request.path.glob("*.safetensors"))
    with (
        ReadAhead(files) as ahead,
        _registered(_quantizer(request, failures, finite, ahead, noted)) as name,
    ):
        quantization_config.quant_method = name
        try:
            model = load_checked(
                request, device="cpu", dtype=dtype, quantization_config=quantization_config
            )
        except RuntimeError:
            if failures:  # Transformers reports a failed conversion without its cause
                raise failures[0] from None
            raise
    finite.refuse(request.path)
    staged: Any = model
    ordinary = Bnb4BitHfQuantizer(staged.hf_quantizer.quantization_config, pre_quantized=False)
    vars(ordinary).update(vars(staged.hf_quantizer))
    staged.hf_quantizer = ordinary
    return model


@contextmanager
def _registered(quantizer: type[Any]) -> Iterator[str]:
    """Register a quantizer class while it is needed, under a name that no other load has."""
    name = f"poros_staged_nf4_{next(_numbers)}"
    register_quantizer(name)(quantizer)
    try:
        yield name
    finally:
        del AUTO_QUANTIZER_MAPPING[name]


def _quantizer(
    request: LoadRequest,
    failures: list[Exception],
    finite: FiniteCheck,
    ahead: ReadAhead,
    noted: Mapping[str, Any] | None,
) -> type[Any]:
    """Return a quantizer class that stages on the request's device and notes what failed."""
    device, land = request.device, request.land or torch.Tensor.cpu
    advance = request.advance or (lambda nbytes: None)

    class LeaveEmpty(Bnb4bitQuantize):  # type: ignore[misc]
        """Touch no weight; see [Note: Nothing is touched]."""

        def convert(
            self, input_dict: dict[str, Any], *, model: Any = None, **kwargs: Any
        ) -> dict[str, Any]:
            """Return an empty weight for each that would be quantised."""
            assert noted is not None
            try:
                return {name: empty_weight(model, name, noted[name]) for name in input_dict}
            except Exception as error:
                failures.append(error)
                raise

    class StagedQuantize(Bnb4bitQuantize):  # type: ignore[misc]
        """Quantise on the device; leave the result in host memory."""

        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            """Stage, quantise and bring back one weight."""
            try:
                staged = {
                    name: [bring(tensor, device) for tensor in _listed(value)]
                    for name, value in input_dict.items()
                }
                input_dict.clear()
                for name, tensors in staged.items():
                    for tensor in tensors:
                        finite.add(name, tensor)
                        advance(tensor.nbytes)
                        ahead.advance(tensor.nbytes)
                quantised: dict[str, Any] = super().convert(staged, **kwargs)
                staged.clear()
                for parameter in quantised.values():
                    state = parameter.quant_state
                    parameter.data = land(parameter.data)
                    state.absmax = land(state.absmax)
                    state.to(torch.device("cpu"))
            except Exception as error:
                failures.append(error)
                raise
            return quantised

    class StagedQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
        """bitsandbytes' 4-bit quantizer with the staged operation."""

        def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
            super().__init__(quantization_config, **kwargs)
            quantization_config.quant_method = QuantizationMethod.BITS_AND_BYTES

        def get_quantize_ops(self) -> Any:
            """Return the staged operation, or the one that reads nothing."""
            return StagedQuantize(self) if noted is None else LeaveEmpty(self)

    return StagedQuantizer


def bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an unquantised weight on the device."""
    return tensor.to(device)


def _listed(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]
