"""A model whose weights are still to be bound: what a load gives, without reading a weight.

[Note: Nothing is touched]
The skeleton of a packed base is made by the very load that made it: Transformers'
``from_pretrained`` on the checkpoint. Its tensors are then views of mapped files, of which no page
is read until somebody looks. So nothing must look: a weight that would be quantised is replaced by
an empty one, and no dtype is asked for that would need a cast. The dtype that was asked for is
entered in the config afterwards, and the tensors of the packed base have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import nn

    from poros_loaders.checkpoint import Checkpoint

__all__ = [
    "NoInitOfMeta",
    "described_dtype",
    "empty_weight",
    "noted_weights",
    "quantised_weight",
    "settle_dtype",
    "uncast_dtype",
]

_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class NoInitOfMeta(TorchFunctionMode):
    """While it is entered, this thread initialises no tensor that has no memory. Layers of a model
    that is being built would be drawn at random one by one, and nothing would come of it but time.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, unless it would initialise such a tensor."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def described_dtype(model: nn.Module) -> str:
    """Return the dtype that a loaded model's config says, as text."""
    config: Any = model.config
    return str(config.dtype).removeprefix("torch.")


def uncast_dtype(
    checkpoint: Checkpoint, dtype: torch.dtype | str, *, noted: str
) -> torch.dtype | str:
    """Return the dtype to ask for so that no large tensor is cast.

    Args:
        checkpoint: the checkpoint's headers.
        dtype: what the user asks for, or ``"auto"``.
        noted: what came of it in the first load.
    """
    nbytes: dict[torch.dtype, int] = {}
    for header in checkpoint.tensors.values():
        if header.dtype in _DTYPES:
            found = _DTYPES[header.dtype]
            nbytes[found] = nbytes.get(found, 0) + header.nbytes
    most = max(nbytes, key=lambda found: nbytes[found], default=None)
    return dtype if most is None or most == getattr(torch, noted) else most


def settle_dtype(model: nn.Module, *, noted: str) -> None:
    """Enter the dtype of the first load in the config, as Transformers enters it."""
    config: Any = model.config
    config.dtype = getattr(torch, noted)
    for name in config.sub_configs:
        part = getattr(config, name)
        if part is not None:
            part.dtype = getattr(torch, noted)


def noted_weights(model: nn.Module) -> dict[str, Any]:
    """Return what a model's 4-bit weights are besides their tensors, by parameter name."""
    import bitsandbytes as bnb

    return {
        name: _noted_state(param.quant_state)
        for name, param in model.named_parameters()
        if isinstance(param, bnb.nn.Params4bit)
    }


def empty_weight(model: Any, name: str, noted: Mapping[str, Any]) -> Any:
    """Return a 4-bit parameter as quantising makes it, with empty tensors.

    Args:
        model: the model, whose parameter of that name is not quantised yet.
        name: the parameter's name.
        noted: what ``noted_weights`` says of it.
    """
    storage = model.get_parameter_or_buffer(name).quant_storage
    return quantised_weight(model, name, torch.empty(0, dtype=storage), _empty_state(noted))


def quantised_weight(model: Any, name: str, data: torch.Tensor, state: Any) -> Any:
    """Return a 4-bit parameter as quantising makes it.

    Args:
        model: the model, whose parameter of that name is not quantised yet.
        name: the parameter's name.
        data: its packed elements.
        state: its quantisation state.
    """
    import bitsandbytes as bnb

    before = model.get_parameter_or_buffer(name)
    module = model.get_submodule(name.rpartition(".")[0])
    param = bnb.nn.Params4bit(data, requires_grad=False, **before.__dict__)
    param.quant_state = state
    param.bnb_quantized = True
    if param.module is not None:
        param.module.quant_state = param.quant_state
    module._is_hf_initialized = True
    return param


def _noted_state(state: Any) -> dict[str, Any]:
    return {
        "shape": None if state.shape is None else list(state.shape),
        "dtype": str(state.dtype).removeprefix("torch."),
        "blocksize": state.blocksize,
        "quant_type": state.quant_type,
        "state2": None if state.state2 is None else _noted_state(state.state2),
    }


def _empty_state(noted: Mapping[str, Any]) -> Any:
    from bitsandbytes.functional import QuantState

    nested = noted["state2"]
    return QuantState(
        absmax=torch.empty(0),
        shape=None if noted["shape"] is None else torch.Size(noted["shape"]),
        code=torch.empty(0),
        blocksize=noted["blocksize"],
        quant_type=noted["quant_type"],
        dtype=getattr(torch, noted["dtype"]),
        offset=None if nested is None else torch.empty(()),
        state2=None if nested is None else _empty_state(nested),
    )
