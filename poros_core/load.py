"""``poros.load``: a Transformers model whose base stands in host memory from the start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros_core.errors import CheckpointError, SettingsError
from poros_core.host_store import HostStore
from poros_core.log import get_logger
from poros_core.packed_cache import CacheRefusal, PackedCache, cache_from, entry_name
from poros_core.packed_file import DamagedFile
from poros_core.packing import LoadedBase, PackingStrategy, pack, unpack
from poros_core.plan import build_plan
from poros_core.plugins import plugins
from poros_core.prepare import STORE, default_device, named_device
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
    dtype: torch.dtype | None = None,
    quantization_config: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    cache: bool | str | os.PathLike[str] | None = None,
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
        dtype: dtype of what is not quantised; None means the checkpoint's own for NF4, and bf16
            for ``precision="bf16"``.
        quantization_config: a ``BitsAndBytesConfig``; None means NF4 with bf16 compute.
        revision: branch, tag or commit of a hub model.
        token: the hub's access token.
        trust_remote_code: run Python code that the checkpoint brings. Off.
        cache: keep the base on disk as it stands in host memory, so that the next load of it
            only reads: True for the default folder, a path for another, False for no; None does
            what ``POROS_CACHE`` says. See ``poros cache``.
        nf4_load_strategy: older name of ``load_strategy``.
        **from_pretrained: passed on to Transformers' ``from_pretrained``.

    Returns:
        The Transformers model.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, or its keys do not fit.
        UnsupportedModelError: no family covers it.
        SettingsError: there is no such precision or strategy.
    """
    if nf4_load_strategy is not None:
        if load_strategy not in ("auto", nf4_load_strategy):
            raise SettingsError(
                f"load_strategy={load_strategy!r} and nf4_load_strategy={nf4_load_strategy!r} "
                "disagree. Give only load_strategy."
            )
        load_strategy = nf4_load_strategy
    folder = local_folder(model_id_or_path, revision=revision, token=token)
    config = _read_config(folder, trust_remote_code=trust_remote_code)
    family = plugins().family_for(config).value
    request = LoadRequest(
        path=folder,
        family=family,
        device=named_device(device) if device is not None else default_device(),
        dtype=dtype,
        quantization_config=quantization_config,
        from_pretrained=from_pretrained,
        trust_remote_code=trust_remote_code,
    )
    strategy = choose_strategy(precision, load_strategy, request)
    model: Any = load_base(strategy, request, cache=cache_from(cache), title=str(model_id_or_path))
    if str(model_id_or_path) != str(folder):
        model.config._name_or_path = str(model_id_or_path)
    return model


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
    """
    path = Path(model_id_or_path)
    if path.is_dir():
        return path
    name = str(model_id_or_path)
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


def _read_config(folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    import json

    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"'{folder}' has no config.json. Pass the folder of a Transformers checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"'{path}' cannot be read as JSON: {error}. Fetch the checkpoint again."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"'{path}' holds no JSON object. Fetch the checkpoint again.")
    return config


def load_base(
    strategy: LoaderStrategy, request: LoadRequest, *, cache: PackedCache | None, title: str
) -> nn.Module:
    """Return a model with its base in the host store, from the cache if it is there and whole.

    Args:
        strategy: how to load.
        request: what to load.
        cache: where packed bases are kept; None for nowhere.
        title: what the cache calls the base.
    """
    key = None if cache is None else _cache_key(strategy, request)
    if cache is None or key is None:
        return _to_host_store(strategy.load(request), request).model
    assert isinstance(strategy, PackingStrategy)
    base = _from_cache(cache, key, strategy, request)
    if base is None:
        base = _to_host_store(strategy.load(request), request)
        _keep(base, cache=cache, key=key, described=strategy.describe(base.model), title=title)
    return base.model


def _to_host_store(model: nn.Module, request: LoadRequest) -> LoadedBase:
    """Move every unit into the host store, and what does not stream to the device."""
    for param in model.parameters():
        param.requires_grad_(False)
    plan = build_plan(
        model, family=request.family, codecs=plugins().codecs(), device=request.device
    )
    store = HostStore(request.device, home=True)
    for unit in plan.units():
        store.adopt(unit.refs)
    for param in plan.on_device:
        param.data = param.data.to(request.device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(request.device)
    base = LoadedBase(model, plan, store)
    _settle(base, request)
    return base


def _from_cache(
    cache: PackedCache, key: Mapping[str, Any], strategy: PackingStrategy, request: LoadRequest
) -> LoadedBase | None:
    """Return the base from the cache; None if it is not there, or not whole."""
    entry = None
    try:
        entry = cache.find(key)
        if entry is None:
            return None
        base = unpack(entry, request, strategy.skeleton)
    except DamagedFile as error:
        _log.warning("cache_damaged", entry=entry_name(key), reason=str(error), used="checkpoint")
        with contextlib.suppress(OSError):
            cache.discard(entry_name(key))
        return None
    finally:
        if entry is not None:
            entry.close()
    _log.info("cache_read", entry=entry_name(key), bytes=entry.nbytes)
    _settle(base, request)
    return base


def _settle(base: LoadedBase, request: LoadRequest) -> None:
    if request.device.type == "cuda":
        torch.cuda.empty_cache()
    base.model.__dict__[STORE] = base.store
    units = len(base.plan.units())
    _log.info("loaded", path=str(request.path), units=units, host_bytes=base.store.nbytes)


def _keep(
    base: LoadedBase, *, cache: PackedCache, key: Mapping[str, Any], described: Any, title: str
) -> None:
    """Write a base to the cache. If that fails, nothing is left of it, and the load stands."""
    writer = None
    nbytes = base.store.nbytes + sum(base.plan.on_device_bytes().values())
    try:
        writer = cache.begin(key, title=title, nbytes=nbytes)
        pack(base.model, plan=base.plan, store=base.store, writer=writer, described=described)
    except (OSError, CacheRefusal) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _log.warning("cache_not_written", folder=str(cache.folder), reason=reason)
        if writer is not None:
            writer.abandon()
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    else:
        _log.info("cache_written", entry=entry_name(key), bytes=nbytes)


def _cache_key(strategy: LoaderStrategy, request: LoadRequest) -> Mapping[str, Any] | None:
    """Return the key of a base, or None if it cannot be kept, which is reported."""
    if not isinstance(strategy, PackingStrategy):
        reason = f"strategy '{strategy.strategy}' for '{strategy.precision}' cannot be packed"
        _log.warning("cache_unavailable", reason=reason)
        return None
    try:
        return strategy.cache_key(request)
    except CacheRefusal as error:
        _log.warning("cache_unavailable", reason=str(error))
        return None
