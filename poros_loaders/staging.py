"""The streamed NF4 load: Transformers' own load, with each weight staged on the device.

[Note: Staged quantisation]
Transformers loads into host memory (all renaming of keys, tying and checking is its own) and hands
each weight that is to be quantised to the quantizer's operation. That operation is subclassed here:
it copies the weight to the compute device, lets the original quantise it there, and moves packed
data and quantisation state back, so that one unquantised weight at a time is on the device.

The stages overlap. What is quantised is quantised ahead where that can be told
([Note: Quantising ahead] in ``quantise_ahead``). Weights are read ahead
([Note: Reading weights ahead] in ``weight_reader``), memory for the results is made ahead
([Note: Berths] in ``poros_core.berths``), and copies, quantising and copying back are queued on one
stream, which is awaited once, at the end. What Transformers hands over is a view of a mapped file
that nobody has looked at; if it is exactly a tensor of the checkpoint, the bytes that were read
ahead are taken instead.

The quantizer is found by name in Transformers' registry of quantizers. It stands there only while
it is looked up and the load runs, under a name of its own; the config gets its real method back at
once, and the finished model gets an ordinary quantizer, so nothing later can tell.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import QuantizationMethod

from poros_core.finite import FiniteCheck
from poros_core.switching import without_collections
from poros_loaders.code_table import one_table
from poros_loaders.pretrained import load_checked
from poros_loaders.skeleton import empty_weight
from poros_loaders.stage import Stage

if TYPE_CHECKING:
    from torch import nn

    from poros_core.protocols import LoadRequest
    from poros_loaders.checkpoint import Checkpoint

__all__ = ["load_staged"]

_numbers = itertools.count()


def load_staged(
    request: LoadRequest,
    *,
    dtype: torch.dtype | str,
    quantization_config: Any,
    checkpoint: Checkpoint,
    noted: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, dict[str, torch.Size]]:
    """Load with every quantised weight staged on ``request.device``. See the module's note.

    Args:
        request: what is loaded.
        dtype: dtype of what is not quantised, or ``"auto"``.
        quantization_config: a ``BitsAndBytesConfig`` that the model may keep.
        checkpoint: its headers.
        noted: what a packed base notes of its quantised weights: they are then left empty, and
            none is read.

    Returns:
        The model, and the shape of each of its tensors as the config has it, unquantised.

    Raises:
        CheckpointError: keys are missing, unexpected, or of another shape, or a weight that is
            quantised is not finite.
    """
    failures: list[Exception] = []
    finite = FiniteCheck()
    shapes: dict[str, torch.Size] = {}
    stage: Stage | None
    with contextlib.ExitStack() as stack:
        if noted is None:
            stack.enter_context(one_table())
            stage = stack.enter_context(Stage(request, checkpoint, finite))
            stage.foresee(dtype, quantization_config)
            operation = _staged_operation(stage, failures)
        else:
            stage, operation = None, _empty_operation(noted, failures)

        building = stack.enter_context(contextlib.ExitStack())
        building.enter_context(without_collections())

        def begin(skeleton: Any) -> None:
            building.close()
            shapes.update((n, tensor.shape) for n, tensor in skeleton.state_dict().items())
            if stage is not None:
                stage.begin(skeleton)

        name = stack.enter_context(_registered(_quantizer(operation, begin)))
        quantization_config.quant_method = name
        try:
            model = load_checked(
                request,
                device="cpu",
                dtype=dtype,
                quantization_config=quantization_config,
                building=building,
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
    return model, shapes


@contextmanager
def _registered(quantizer: type[Any]) -> Iterator[str]:
    """Register a quantizer class while it is needed, under a name that no other load has."""
    name = f"poros_staged_nf4_{next(_numbers)}"
    register_quantizer(name)(quantizer)
    try:
        yield name
    finally:
        del AUTO_QUANTIZER_MAPPING[name]


def _empty_operation(noted: Mapping[str, Any], failures: list[Exception]) -> type[Any]:
    """Return the operation that touches no weight; see [Note: Nothing is touched]."""

    class LeaveEmpty(Bnb4bitQuantize):  # type: ignore[misc]
        """Touch no weight."""

        def convert(
            self, input_dict: dict[str, Any], *, model: Any = None, **kwargs: Any
        ) -> dict[str, Any]:
            """Return an empty weight for each that would be quantised."""
            try:
                return {name: empty_weight(model, name, noted[name]) for name in input_dict}
            except Exception as error:
                failures.append(error)
                raise

    return LeaveEmpty


def _staged_operation(stage: Stage, failures: list[Exception]) -> type[Any]:
    """Return the operation that stages; it notes what failed."""

    class StagedQuantize(Bnb4bitQuantize):  # type: ignore[misc]
        """Quantise on the device; leave the result in host memory."""

        def convert(
            self, input_dict: dict[str, Any], *, model: Any = None, **kwargs: Any
        ) -> dict[str, Any]:
            """Stage, quantise and bring back one weight, or take what was quantised ahead."""
            patterns: Sequence[str] = kwargs.get("source_patterns") or ()
            source = patterns[0] if len(patterns) == len(input_dict) == 1 else None
            if failures:  # Transformers notes a failure and goes on with the next weight
                raise failures[0]
            try:
                if source is not None:
                    ((name, value),) = input_dict.items()
                    (tensor,) = _listed(value)
                    done = stage.finished(model, name, tensor, source)
                    if done is not None:
                        return {name: done}
                staged = {
                    name: [stage.bring(tensor, source) for tensor in _listed(value)]
                    for name, value in input_dict.items()
                }
                input_dict.clear()
                for name, tensors in staged.items():
                    for tensor in tensors:
                        stage.look_at(name, tensor)
                quantised: dict[str, Any] = super().convert(staged, model=model, **kwargs)
                staged.clear()
                for name, parameter in quantised.items():
                    stage.take_back(name, parameter)
            except Exception as error:
                failures.append(error)
                raise
            return quantised

    return StagedQuantize


def _quantizer(operation: type[Any], begin: Callable[[Any], None]) -> type[Any]:
    """Return a quantizer class with an operation of its own."""

    class StagedQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
        """bitsandbytes' 4-bit quantizer with the staged operation."""

        def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
            super().__init__(quantization_config, **kwargs)
            quantization_config.quant_method = QuantizationMethod.BITS_AND_BYTES

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            super()._process_model_before_weight_loading(model, **kwargs)
            begin(model)

        def get_quantize_ops(self) -> Any:
            """Return the staged operation, or the one that reads nothing."""
            return operation(self)

    return StagedQuantizer


def _listed(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]
