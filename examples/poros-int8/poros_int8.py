"""LLM.int8 by bitsandbytes for Poros: a codec, and two ways to load.

Of a base weight, forward and backward of bitsandbytes 0.50 read ``state.CB`` (int8, outputs by
inputs) and ``state.SCB`` (float32, one per output), on a GPU and on a CPU alike. They read them
from the module's state when they run, so what is bound then is what counts: its autograd functions
keep the state and the activations, and no weight. After each forward a module makes ``state.CB``
its weight's data. ``CxB``, ``SB``, ``CBt`` and ``subB`` of older releases are never set;
``state.idx``, the columns with outliers of the last input, belongs to activations. A module
quantises anew only with ``has_fp16_weights`` or without ``state.CB``, which ``refs`` rules out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from poros_core.configs import auto_class, read_config
from poros_core.errors import CheckpointError, PrepareError, SettingsError
from poros_core.hookspecs import hookimpl
from poros_core.protocols import LoaderStrategy, LoadRequest, TensorRef, WeightCodec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["INT8", "Int8Codec", "Int8Standard", "Int8Streamed", "poros_loaders"]


@frozen(eq=False)
class Int8Data:
    """The weight's bytes. ``Linear8bitLt`` reads them as ``state.CB`` and keeps the parameter's
    data equal to that, so both are bound."""

    parameter: Any
    state: Any
    name: str = "data"

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place."""
        return (id(self.parameter), "data")

    def get(self) -> torch.Tensor:
        """Return the tensor bound now."""
        tensor: torch.Tensor = self.parameter.data
        return tensor

    def set(self, value: torch.Tensor) -> None:
        """Bind ``value``."""
        self.parameter.data = value
        self.state.CB = value


@frozen(eq=False)
class Int8Scales:
    """One scale per row of the weight."""

    state: Any
    name: str = "SCB"

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place."""
        return (id(self.state), "SCB")

    def get(self) -> torch.Tensor:
        """Return the tensor bound now."""
        tensor: torch.Tensor = self.state.SCB
        return tensor

    def set(self, value: torch.Tensor) -> None:
        """Bind ``value``."""
        self.state.SCB = value


@frozen
class Int8Codec:
    """bitsandbytes' 8-bit parameters: the weight and its row scales."""

    name: str = "int8"
    title: str = "INT8"

    def claims(self, param: nn.Parameter) -> bool:
        """Claim every ``Int8Params``."""
        bnb: Any = sys.modules.get("bitsandbytes")  # not imported: no such parameter exists
        return bnb is not None and isinstance(param, bnb.nn.Int8Params)

    def refs(self, module: nn.Module, name: str, param: nn.Parameter) -> Sequence[TensorRef]:
        """Return the weight and its scales.

        A module keeps both in its weight until its first forward moves them to its state; they
        are moved now, so that the places stay the same, and nothing else holds device memory.

        Raises:
            PrepareError: the weight is not quantised, or is no linear layer's.
        """
        weight: Any = param
        owner: Any = module
        state: Any = getattr(module, "state", None)  # an 8-bit embedding has none
        if state is None or weight.has_fp16_weights or (weight.CB is None and state.CB is None):
            raise PrepareError(
                f"An 8-bit weight ({type(module).__name__}.{name}) is not that of a quantised "
                "linear layer. Load the model with BitsAndBytesConfig(load_in_8bit=True), without "
                "llm_int8_has_fp16_weight."
            )
        if weight.CB is not None:
            owner.init_8bit_state()
        return (Int8Data(weight, state), Int8Scales(state))

    def keep_layout(self, module: nn.Module) -> Callable[[], None]:
        """Do nothing: these weights are never rearranged."""
        return lambda: None


INT8 = Int8Codec()


@frozen
class Int8Standard:
    """Quantise onto the compute device, as Transformers does."""

    precision: str = "int8"
    strategy: str = "standard"
    codec: WeightCodec = INT8

    def cannot(self, request: LoadRequest) -> str | None:
        """Return None: this is the ordinary way."""
        return None

    def load(self, request: LoadRequest) -> nn.Module:
        """Return the model, and insist that checkpoint and model fit.

        Raises:
            CheckpointError: keys are missing or unexpected, or no weight was quantised.
            SettingsError: ``quantization_config`` asks for something else than LLM.int8.
        """
        return _load(request)

    def load_resident(self, request: LoadRequest) -> nn.Module:
        """Return what Transformers' ``from_pretrained`` gives on the device."""
        model, _ = _from_pretrained(request)
        return model


@frozen
class Int8Streamed:
    """Quantise into host memory, where the model computes on the CPU."""

    precision: str = "int8"
    strategy: str = "streamed"
    codec: WeightCodec = INT8

    def cannot(self, request: LoadRequest) -> str | None:
        """Return why a model for a GPU is not quantised in host memory."""
        if request.device.type == "cpu":
            return None
        return (
            "bitsandbytes quantises to int8 by other kernels on the CPU than on "
            f"{request.device.type}, and their bytes have not been shown to be equal"
        )

    def load(self, request: LoadRequest) -> nn.Module:
        """Return the model; see ``Int8Standard``.

        Raises:
            CheckpointError: keys are missing or unexpected, or no weight was quantised.
            SettingsError: ``quantization_config`` asks for something else than LLM.int8.
        """
        return _load(request)

    def load_resident(self, request: LoadRequest) -> nn.Module:
        """Return what Transformers' ``from_pretrained`` gives on the device."""
        model, _ = _from_pretrained(request)
        return model


@hookimpl
def poros_loaders() -> Sequence[LoaderStrategy]:
    """Offer LLM.int8, ``streamed`` and ``standard``."""
    return (Int8Streamed(), Int8Standard())


def _config(request: LoadRequest) -> Any:
    from transformers import BitsAndBytesConfig

    config = request.quantization_config
    if config is None:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not isinstance(config, BitsAndBytesConfig) or not config.load_in_8bit:
        raise SettingsError(
            "precision='int8' takes BitsAndBytesConfig(load_in_8bit=True) as quantization_config. "
            "Pass that, or leave it out."
        )
    return config


def _from_pretrained(request: LoadRequest) -> tuple[Any, dict[str, Any]]:
    import transformers

    model_class = getattr(transformers, auto_class(read_config(str(request.path))))
    model, info = model_class.from_pretrained(
        request.path,
        dtype="auto" if request.dtype is None else request.dtype,
        device_map={"": request.device},
        quantization_config=_config(request),
        trust_remote_code=request.trust_remote_code,
        output_loading_info=True,
        **request.from_pretrained,
    )
    return model, info


def _load(request: LoadRequest) -> nn.Module:
    model, info = _from_pretrained(request)
    wrong = [
        f"{kind}: {sorted(map(str, info[kind]))[0]}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[kind]
    ]
    if wrong:
        raise CheckpointError(
            f"Checkpoint '{request.path}' does not fit a {request.family.title} model "
            f"({'; '.join(wrong)}). Download it again."
        )
    if not any(INT8.claims(param) for param in model.parameters()):
        raise CheckpointError(
            f"Checkpoint '{request.path}': no weight was quantised to int8. Check "
            "llm_int8_skip_modules, or use precision='bf16'."
        )
    loaded: nn.Module = model
    return loaded
