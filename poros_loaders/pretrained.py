"""Calling Transformers' ``from_pretrained``, and checking what it did."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from poros_core.configs import auto_class
from poros_core.errors import CheckpointError, SettingsError
from poros_loaders.checkpoint import few, read_config

if TYPE_CHECKING:
    import torch
    from torch import nn

    from poros_core.protocols import LoadRequest

__all__ = ["check_arguments", "load_checked", "load_plain", "mark_device", "placement"]

_CONFIGURED = "use quantization_config=BitsAndBytesConfig(...) of poros.load"
_OWNED = {
    "bnb_4bit_compute_dtype": _CONFIGURED,
    "bnb_4bit_quant_storage": _CONFIGURED,
    "bnb_4bit_quant_type": _CONFIGURED,
    "bnb_4bit_use_double_quant": _CONFIGURED,
    "config": "edit config.json in the checkpoint's folder",
    "device_map": "say where the model computes with device=",
    "dtype": "use dtype= of poros.load",
    "torch_dtype": "use dtype= of poros.load",
    "gguf_file": "convert the checkpoint to safetensors",
    "ignore_mismatched_sizes": "give a checkpoint whose shapes fit its config",
    "load_in_4bit": 'use precision="nf4" of poros.load, which is its default',
    "max_memory": "leave it out: the base stays in host memory",
    "offload_folder": "leave it out: the base stays in host memory",
    "output_loading_info": "leave it out: missing and unexpected keys are an error already",
    "quantization_config": "use quantization_config= of poros.load",
    "state_dict": "save it as a checkpoint first",
    "subfolder": "give the path of that folder itself",
    "tp_plan": "leave it out: one device computes",
    "trust_remote_code": "use trust_remote_code= of poros.load",
    "use_safetensors": "leave it out: only safetensors are read",
    "variant": "give a folder whose files have their standard names",
}

_TRANSFORMERS = {
    "adapter_kwargs", "adapter_name", "allow_all_kernels", "attn_implementation", "cache_dir",
    "code_revision", "device_mesh", "disable_mmap", "distributed_config", "experts_implementation",
    "force_download", "from_flax", "from_tf", "fusion_config", "generation_config", "kernel_config",
    "key_mapping", "local_files_only", "low_cpu_mem_usage", "mirror", "offload_buffers",
    "offload_state_dict", "proxies", "tp_size", "tqdm_class", "use_kernels", "weights_only",
}  # fmt: skip
"""What ``from_pretrained`` takes for itself; it tries anything else as an entry of the config."""


def check_arguments(request: LoadRequest) -> None:
    """Refuse arguments for ``from_pretrained`` that the loader itself decides, or nobody knows.

    Raises:
        SettingsError: there is one; the message says what to use instead.
    """
    for name in request.from_pretrained:
        fix = _OWNED.get(name) or (_precisions() if name.startswith("load_in_") else None)
        if fix is not None:
            raise SettingsError(f"'{name}' cannot be passed on to from_pretrained here; {fix}.")
    unknown = sorted(set(request.from_pretrained) - _TRANSFORMERS)
    if unknown:
        _check_entries(request, unknown)


def _precisions() -> str:
    from poros_core.plugins import plugins

    installed = plugins().loaders.keys()
    names = dict.fromkeys(key.partition("/")[0] for key in installed)
    return f"use precision= of poros.load, of which these are installed: {', '.join(names)}"


def _check_entries(request: LoadRequest, names: list[str]) -> None:
    """Refuse names that are no entries of the model's config either."""
    from transformers import AutoConfig

    from poros_core.load import load

    if request.trust_remote_code and "auto_map" in read_config(request.path):
        return  # a checkpoint's own code may take what it likes
    config = AutoConfig.from_pretrained(request.path)
    for name in names:
        if hasattr(config, name):
            continue
        own = [*inspect.signature(load).parameters, *sorted(_TRANSFORMERS)]
        close = get_close_matches(name, [*own, *config.to_dict()], n=1)
        hint = f"Did you mean '{close[0]}'?" if close else "Leave it out."
        raise SettingsError(
            f"'{name}' is no argument of poros.load, of Transformers' from_pretrained, or an entry "
            f"of this model's config. {hint}"
        )


def placement(device: torch.device) -> int | str:
    """Return a device as Transformers' device maps and Accelerate write it."""
    import torch

    if device.type != "cuda":
        return str(device)
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index


def load_plain(
    request: LoadRequest, *, dtype: torch.dtype | str, quantization_config: Any = None
) -> nn.Module:
    """Load as a user writes it: ``from_pretrained`` onto the device, and nothing else."""
    extra = {} if quantization_config is None else {"quantization_config": quantization_config}
    model: nn.Module = _model_class(request).from_pretrained(
        request.path,
        dtype=dtype,
        device_map={"": placement(request.device)},
        trust_remote_code=request.trust_remote_code,
        **extra,
        **request.from_pretrained,
    )
    return model


def load_checked(
    request: LoadRequest,
    *,
    device: int | str,
    dtype: torch.dtype | str,
    quantization_config: Any = None,
    building: contextlib.ExitStack | None = None,
) -> nn.Module:
    """Load with ``from_pretrained`` and insist that checkpoint and model fit key for key.

    Args:
        request: what is loaded.
        device: where weights are put, as a device map's value.
        dtype: dtype of what is not quantised, or ``"auto"``.
        quantization_config: for Transformers, or None for what the checkpoint says.
        building: holds what is needed only until the model is built without its weights; whoever
            learns of that moment may close it then.

    Raises:
        CheckpointError: keys are missing, unexpected, or of another shape.
    """
    from poros_loaders.skeleton import NoInitOfMeta

    extra = {} if quantization_config is None else {"quantization_config": quantization_config}
    with building or contextlib.ExitStack() as stack:
        stack.enter_context(NoInitOfMeta())
        model, info = _model_class(request).from_pretrained(
            request.path,
            dtype=dtype,
            device_map={"": device},
            trust_remote_code=request.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that all of them are listed below, as an error
            output_loading_info=True,
            **extra,
            **request.from_pretrained,
        )
    _check_keys(request, info)
    loaded: nn.Module = model
    return loaded


def _model_class(request: LoadRequest) -> Any:
    import transformers

    return getattr(transformers, auto_class(read_config(request.path)))


def mark_device(model: nn.Module, device: torch.device) -> None:
    """Tell Accelerate and Trainer on which accelerator the model computes.

    Both look at ``hf_device_map`` and would otherwise move the host-side base to the device. On a
    CPU nothing is marked: PEFT takes a map that says ``"cpu"`` for offloading and adds hooks.
    """
    if device.type != "cpu":
        model.hf_device_map = {"": placement(device)}  # type: ignore[assignment]


def _check_keys(request: LoadRequest, info: Mapping[str, Any]) -> None:
    problems = [
        *_listed("missing from the checkpoint", info["missing_keys"]),
        *_listed("unknown to the model", info["unexpected_keys"]),
        *_listed(
            "of another shape than the config asks for",
            (f"{key} {tuple(found)} for {tuple(asked)}" for key, found, asked in
             info["mismatched_keys"]),
        ),
        *info["error_msgs"],
    ]  # fmt: skip
    if problems:
        raise CheckpointError(
            f"Checkpoint '{request.path}' does not fit a {request.family.title} model: "
            f"{'; '.join(problems)}. Its config.json and its weights belong to different models or "
            "model classes; download both again from one place, or load the checkpoint's own "
            "text-only version."
        )


def _listed(what: str, keys: Iterable[str]) -> list[str]:
    names = sorted(keys)
    return [f"{len(names)} tensors are {what} ({few(names)})"] if names else []
