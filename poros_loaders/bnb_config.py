"""Which bitsandbytes quantisation is asked for, and whether a model got it.

Imported only when something is loaded: it needs torch, transformers and bitsandbytes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import bitsandbytes as bnb
import torch
import transformers
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from poros_core.configs import auto_class
from poros_core.errors import CheckpointError, SettingsError
from poros_loaders.checkpoint import few
from poros_loaders.skeleton import NoInitOfMeta

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from poros_core.protocols import LoadRequest
    from poros_loaders.checkpoint import Checkpoint

__all__ = ["asked", "check_quantised", "check_shapes", "for_checkpoint"]

_CPU_GROUP = 64
_FIELDS = (
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
)


def asked(request: LoadRequest) -> Any:
    """Return the ``BitsAndBytesConfig`` that the request asks for: a copy, or the default.

    The default is NF4 without double quantisation, computing in the request's dtype or bfloat16.

    Raises:
        SettingsError: the user's config is not 4-bit NF4.
    """
    given = request.quantization_config
    if given is None:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=request.dtype or torch.bfloat16,
            bnb_4bit_use_double_quant=False,
        )
    config = BitsAndBytesConfig(**given) if isinstance(given, Mapping) else copy.deepcopy(given)
    if not isinstance(config, BitsAndBytesConfig):
        raise SettingsError(
            f"precision='nf4' takes a transformers.BitsAndBytesConfig as quantization_config, not "
            f"a {type(config).__name__}. Pass BitsAndBytesConfig(load_in_4bit=True, "
            "bnb_4bit_quant_type='nf4'), or leave it out for the defaults."
        )
    if config.quantization_method() != "nf4":
        raise SettingsError(
            f"precision='nf4' was asked for, and quantization_config asks for "
            f"'{config.quantization_method() or 'no quantisation'}' (bitsandbytes' default "
            "bnb_4bit_quant_type is 'fp4'). Set load_in_4bit=True and bnb_4bit_quant_type='nf4'."
        )
    return config


def for_checkpoint(request: LoadRequest, checkpoint: Checkpoint) -> Any:
    """Return the config to quantise this checkpoint with; None if it is quantised already.

    Raises:
        CheckpointError: it is quantised in another way than NF4.
        SettingsError: the user's config is not NF4, or contradicts a quantised checkpoint's own.
    """
    config = asked(request)
    saved = checkpoint.quantization
    if saved is None:
        return config
    own = _saved_config(checkpoint, saved)
    if request.quantization_config is not None:
        for field in _FIELDS:
            if getattr(own, field) != getattr(config, field):
                raise SettingsError(
                    f"Checkpoint '{checkpoint.path}' was quantised with "
                    f"{field}={getattr(own, field)}, and quantization_config asks for "
                    f"{getattr(config, field)}. Leave quantization_config out, or give the "
                    "unquantised checkpoint."
                )
    return None


def _saved_config(checkpoint: Checkpoint, saved: Mapping[str, Any]) -> Any:
    method = saved.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes" and saved.get("load_in_4bit"):
        own = BitsAndBytesConfig.from_dict(dict(saved))
        method = own.quantization_method()
        if method == "nf4":
            return own
    raise CheckpointError(
        f"Checkpoint '{checkpoint.path}' is quantised already, with '{method}', and NF4 cannot be "
        "had from it without rounding twice. Give the unquantised checkpoint, or one that was "
        "saved from a bitsandbytes NF4 model."
    )


def check_shapes(request: LoadRequest, checkpoint: Checkpoint, config: Any) -> None:
    """Refuse shapes that bitsandbytes' CPU kernels do not dequantise exactly. Reads no weight.

    Args:
        request: what is loaded.
        checkpoint: its headers. A skeleton of the model, which takes time to build, is asked which
            weights would be quantised only where one of them may be odd.
        config: the config to quantise with; None (quantised already) is not checked here.

    Raises:
        CheckpointError: a weight's rows are no multiple of 64 and the model computes on a CPU.
    """
    matrices = (t.shape for t in checkpoint.tensors.values() if len(t.shape) > 1)
    if request.device.type != "cpu" or config is None or not any(map(_odd, matrices)):
        return
    model_config = AutoConfig.from_pretrained(
        request.path, trust_remote_code=request.trust_remote_code
    )
    model_class = getattr(transformers, auto_class(model_config.to_dict()))
    quantizer = Bnb4BitHfQuantizer(config, pre_quantized=False)
    with torch.device("meta"), NoInitOfMeta():
        skeleton = model_class.from_config(
            model_config, trust_remote_code=request.trust_remote_code
        )
        quantizer.preprocess_model(skeleton, device_map={"": "cpu"})
    _check_rows(request, skeleton)


def _odd(shape: tuple[int, ...]) -> bool:
    return bool(shape[-1] % _CPU_GROUP)


def _check_rows(request: LoadRequest, model: nn.Module) -> None:
    if request.device.type != "cpu":
        return
    odd = [
        f"{name} ({module.in_features})"
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit) and module.in_features % _CPU_GROUP
    ]
    if odd:
        raise CheckpointError(
            f"Checkpoint '{request.path}' has {len(odd)} weights whose in_features is no multiple "
            f"of {_CPU_GROUP} ({few(odd)}), which bitsandbytes does not dequantise exactly on a "
            "CPU. Use device='cuda', precision='bf16', or name them in "
            "BitsAndBytesConfig(llm_int8_skip_modules=[...])."
        )


def check_quantised(
    request: LoadRequest,
    model: PreTrainedModel,
    *,
    shapes: Mapping[str, torch.Size] | None = None,
) -> None:
    """Insist that every 4-bit layer is quantised and every tensor has the config's shape.

    Transformers leaves out the comparison of shapes for weights that it quantises, and some of its
    releases for all weights of such a model.

    Args:
        request: what was loaded.
        model: what came of it.
        shapes: of every tensor, as the config has it; None makes a skeleton to find out.

    Raises:
        CheckpointError: one does not, or there is no 4-bit layer at all, or one has rows that the
            CPU that the model computes on does not dequantise exactly.
    """
    if not any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules()):
        raise CheckpointError(
            f"Checkpoint '{request.path}': no weight was quantised, so this would not be an NF4 "
            "model. Check llm_int8_skip_modules in quantization_config, or use precision='bf16'."
        )
    _check_rows(request, model)  # Conv1D keeps its weight transposed in the checkpoint
    modules = dict(model.named_modules(remove_duplicate=False))
    wrong = [
        f"{name} {problem}"
        for name, wanted in (_shapes(model) if shapes is None else shapes).items()
        if (problem := _problem(modules, name, wanted))
    ]
    if wrong:
        raise CheckpointError(
            f"Checkpoint '{request.path}' does not fit a {request.family.title} model: "
            f"{len(wrong)} tensors are not as config.json asks for ({few(wrong)}). Its "
            "config.json and its weights belong to different models; download both again from one "
            "place."
        )


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"), NoInitOfMeta():
        skeleton = type(model)(config)
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    for path, module in skeleton.named_modules():
        # Conv1D keeps its weight transposed; the 4-bit layer in its place holds it like a linear's
        if isinstance(module, Conv1D) and isinstance(model.get_submodule(path), bnb.nn.Linear4bit):
            shapes[f"{path}.weight"] = torch.Size(reversed(module.weight.shape))
    return shapes


def _problem(modules: Mapping[str, nn.Module], name: str, wanted: torch.Size) -> str | None:
    path, _, attribute = name.rpartition(".")
    module = modules[path]
    tensor: Any = getattr(module, attribute)
    if isinstance(module, bnb.nn.Linear4bit) and tensor is module.weight:
        if not isinstance(tensor, bnb.nn.Params4bit) or tensor.quant_state is None:
            return "is not quantised"
        found = tuple(tensor.quant_state.shape)
    else:
        found = tuple(tensor.shape)
    return None if found == tuple(wanted) else f"has shape {found} instead of {tuple(wanted)}"
