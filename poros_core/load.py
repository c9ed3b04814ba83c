"""``poros.load``: a Transformers model whose base stands in host memory from the start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from poros_core.adapter_folder import adapter_told
from poros_core.configs import read_config
from poros_core.errors import CheckpointError, SettingsError
from poros_core.host_mode import named_mode
from poros_core.load_arguments import asked_cache, checked_name, checked_observer, named_dtype
from poros_core.load_base import LoadJob, load_base
from poros_core.load_progress import LoadObserver
from poros_core.log import get_logger
from poros_core.plugins import plugins
from poros_core.prepare import default_device, named_device
from poros_core.protocols import LoaderStrategy, LoadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load", "local_folder"]

_log = get_logger("load")


def load(
    model_id_or_path: str | os.PathLike[str],
    *,
    precision: str = "nf4",
    load_strategy: str = "auto",
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    quantization_config: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    host: str = "auto",
    cache: bool | str | os.PathLike[str] | None = None,
    verbose: bool = False,
    observer: LoadObserver | None = None,
    nf4_load_strategy: str | None = None,
    **from_pretrained: Any,
) -> PreTrainedModel:
    """Load a model for training with its frozen base in host memory.

    Add adapters with PEFT, then call ``poros.prepare``. On CUDA the base is page-locked and the
    device reads it in place, so adapters are created on the compute device. Every parameter comes
    frozen.

    Args:
        model_id_or_path: a folder, or a hub id.
        precision: ``"nf4"``, ``"bf16"``, or what a plugin offers.
        load_strategy: ``"streamed"`` stages one tensor on the device at a time; ``"standard"``
            is Transformers' own way and holds the whole base there for a moment; ``"auto"`` is
            streamed, and standard only for a named reason, which it reports.
        device: where the model will compute; None means CUDA if there is any.
        dtype: dtype of what is not quantised, or its name as ``"float16"``; None and ``"auto"``
            mean the checkpoint's own for NF4, and bf16 for ``precision="bf16"``.
        quantization_config: a ``BitsAndBytesConfig``; None means NF4 with bf16 compute.
        revision: branch, tag or commit of a hub model.
        token: the hub's access token.
        trust_remote_code: run Python code that the checkpoint brings. Off.
        host: where the layers stand on the host: ``"pinned"`` is page-locked memory, ``"pageable"``
            ordinary memory, ``"mmap"`` the packed cache's files on disk, for machines with less
            memory than the base. All are exact. ``"auto"`` is pinned unless a limit of this
            machine or container forbids it, and reports what it chose and what that costs.
        cache: keep the base on disk as it stands in host memory, so that the next load of it
            only reads: True for the default folder, a path for another, False for no; None does
            what ``POROS_CACHE`` says. See ``poros cache``.
        verbose: show a progress bar, and at the end what the load took, on standard error.
        observer: is told how far the load is, instead.
        nf4_load_strategy: older name of ``load_strategy``.
        **from_pretrained: passed on to Transformers' ``from_pretrained``.

    Returns:
        The Transformers model.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, or its keys do not fit.
        UnsupportedModelError: no family covers it.
        SettingsError: there is no such precision, strategy, device, dtype or ``host``, or an
            argument that nobody knows.
        PrepareError: host memory, or the disk for ``host="mmap"``, does not suffice.
    """
    if nf4_load_strategy is not None:
        if load_strategy not in ("auto", nf4_load_strategy):
            raise SettingsError(
                f"load_strategy={load_strategy!r} and nf4_load_strategy={nf4_load_strategy!r} "
                "disagree. Give only load_strategy."
            )
        load_strategy = nf4_load_strategy
    title = checked_name(model_id_or_path)
    wanted_dtype = named_dtype(dtype)
    observer = checked_observer(observer)
    target = named_device(device) if device is not None else default_device()
    mode = named_mode(host)
    kept = asked_cache(cache, host)
    folder = local_folder(model_id_or_path, revision=revision, token=token)
    request = LoadRequest(
        path=folder,
        family=plugins().family_for(_config(folder)).value,
        device=target,
        dtype=wanted_dtype,
        quantization_config=quantization_config,
        from_pretrained=from_pretrained,
        trust_remote_code=trust_remote_code,
    )
    strategy = choose_strategy(precision, load_strategy, request)
    job = LoadJob(strategy=strategy, request=request, title=title, cache=kept, host=mode)
    model: Any = _observed(job, verbose=verbose, observer=observer)
    if title != str(folder):
        model.config._name_or_path = title
    return model


def _observed(job: LoadJob, *, verbose: bool, observer: LoadObserver | None) -> nn.Module:
    if observer is not None:
        return load_base(attrs.evolve(job, observer=observer))
    if not verbose:
        return load_base(job)
    from poros_core.load_bar import LoadBar

    with LoadBar() as bar:
        return load_base(attrs.evolve(job, observer=bar))


def choose_strategy(precision: str, load_strategy: str, request: LoadRequest) -> LoaderStrategy:
    """Return the loader strategy to use.

    Raises:
        SettingsError: there is no such strategy, or it cannot serve the request.
    """
    if load_strategy != "auto":
        strategy = plugins().loader(precision, load_strategy)
        reason = strategy.cannot(request)
        if reason is not None:
            raise SettingsError(f"load_strategy='{load_strategy}' cannot load this: {reason}")
        return strategy
    streamed = plugins().loader(precision, "streamed")
    reason = streamed.cannot(request)
    if reason is None:
        return streamed
    _log.warning("load_strategy_fallback", asked="auto", used="standard", reason=reason)
    return choose_strategy(precision, "standard", request)


def local_folder(
    model_id_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Return the folder of a checkpoint, fetching a hub model through huggingface_hub.

    Raises:
        CheckpointError: it is no folder and cannot be had from the hub.
        SettingsError: it is neither text nor a path.
    """
    name = checked_name(model_id_or_path)
    path = Path(model_id_or_path)
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError(
            f"There is no folder '{name}'. Pass the folder that holds config.json and the "
            "safetensors files, or a hub id such as 'Qwen/Qwen2.5-7B'."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                token=token,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"'{name}' is neither a folder nor a model that can be had from the hub: "
            f"{str(error).splitlines()[0]} Check the name, the network or HF_HUB_OFFLINE, and "
            "for a private model your token."
        ) from error


def _config(folder: Path) -> Mapping[str, Any]:
    told = adapter_told(folder)
    if told is not None:
        raise CheckpointError(told)
    return read_config(os.path.abspath(folder))
