"""From a request to a model whose base stands where it was asked to: read, placed, kept on disk.

``host`` decides where layers stand (see ``host_mode``), ``cache`` whether the base is kept for the
next load (see ``packed_cache``). A base that is kept is read from there, and never when any file of
it is not what was written: then it is discarded, and loaded from the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from attrs import frozen
from torch import nn

from poros_core.errors import PrepareError, SettingsError
from poros_core.host_mode import HostChoice, HostMode, choose_host, read_limits
from poros_core.host_store import HostStore
from poros_core.landing import FileLanding, give_back_free_memory, land_in_memory
from poros_core.log import get_logger
from poros_core.packed_cache import CacheRefusal, Entry, EntryWriter, PackedCache, entry_name
from poros_core.packed_file import DamagedFile
from poros_core.packing import BaseSizes, LoadedBase, PackingStrategy, pack, unpack
from poros_core.plan import build_plan
from poros_core.plugins import plugins
from poros_core.prepare import STORE
from poros_core.protocols import LoaderStrategy, LoadRequest
from poros_core.ring import StagingRing

__all__ = ["LoadJob", "load_base"]

_log = get_logger("load")


@frozen(kw_only=True)
class LoadJob:
    """What is loaded, how, and to where.

    Attributes:
        strategy: reads and quantises.
        request: what it reads.
        title: what the cache calls the base.
        cache: where packed bases are kept; None for nowhere.
        host: where layers stand.
    """

    strategy: LoaderStrategy
    request: LoadRequest
    title: str
    cache: PackedCache | None
    host: HostMode | Literal["auto"]


def load_base(job: LoadJob) -> nn.Module:
    """Return a model with its base in the host store, from the cache if it is there and whole.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit.
        PrepareError: host memory or disk do not suffice.
        SettingsError: the base cannot stand where it was asked to.
    """
    key = _cache_key(job)
    entry = _find(job, key)
    try:
        choice = _choose(job, entry)
        if choice.mode == "mmap" and (job.cache is None or key is None):
            raise SettingsError(
                f"host='mmap' ({choice.reason}) leaves the base in the packed cache on disk, and "
                f"{'there is none' if job.cache is None else 'this base cannot be kept there'}. "
                "Pass cache=True or a folder, or host='pinned' or 'pageable'."
            )
        base = None if entry is None else _from_cache(job, entry, choice)
        if base is None:
            base = _from_checkpoint(job, key, choice)
    finally:
        if entry is not None:
            entry.close()
    return _settled(base, job)


def _from_cache(job: LoadJob, entry: Entry, choice: HostChoice) -> LoadedBase | None:
    """Return the base from the cache; None if it is not whole."""
    assert isinstance(job.strategy, PackingStrategy)
    store = _store(job, choice)
    try:
        base = unpack(entry, job.request, job.strategy.skeleton, store=store, mode=choice.mode)
    except DamagedFile as error:
        _discard(job, entry.folder.name, error)
        return None
    if choice.mode == "mmap":
        store.keep(entry.shared())
    _log.info("cache_read", entry=entry.folder.name, bytes=entry.nbytes)
    return base


def _from_checkpoint(job: LoadJob, key: Mapping[str, Any] | None, choice: HostChoice) -> LoadedBase:
    if choice.mode == "mmap":
        assert job.cache is not None
        assert key is not None
        return _mapped(job, job.cache, key, choice)
    model = _loaded(job.strategy, attrs.evolve(job.request, land=land_in_memory))
    base = _planned(model, job, _store(job, choice))
    for unit in base.plan.units():
        base.store.adopt(unit.refs, staged=choice.mode != "pinned" and unit in base.plan.layers)
    _move_the_rest(base, job.request.device)
    if job.cache is not None and key is not None:
        _keep(base, job, job.cache, key)
    return base


def _mapped(
    job: LoadJob, cache: PackedCache, key: Mapping[str, Any], choice: HostChoice
) -> LoadedBase:
    """Load into files of the cache, with one unit in memory at a time."""
    assert isinstance(job.strategy, PackingStrategy)
    sizes = job.strategy.estimate(job.request)
    writer = None
    try:
        writer = cache.begin(key, title=job.title, nbytes=sizes.layers + sizes.rest)
        landing = FileLanding(writer.folder)
        model = _loaded(job.strategy, attrs.evolve(job.request, land=landing))
        landing.close()
        base = _planned(model, job, _store(job, choice))
        _move_the_rest(base, job.request.device)
        pack(base, writer=writer, described=job.strategy.describe(model), mapped=True)
    except (OSError, CacheRefusal) as error:
        if writer is not None:
            writer.abandon()
        raise PrepareError(
            f"host='mmap' keeps the base on disk in '{cache.folder}', and that failed: "
            f"{_reason(error)}. Free disk space, or name another folder with cache=."
        ) from error
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    entry = _find(job, key)
    if entry is not None:
        base.store.keep(entry)
    _log.info("cache_written", entry=entry_name(key), bytes=base.store.nbytes)
    return base


def _keep(base: LoadedBase, job: LoadJob, cache: PackedCache, key: Mapping[str, Any]) -> None:
    """Write a base to the cache. If that fails, nothing is left of it, and the load stands."""
    assert isinstance(job.strategy, PackingStrategy)
    writer: EntryWriter | None = None
    nbytes = base.store.nbytes + sum(base.plan.on_device_bytes().values())
    try:
        writer = cache.begin(key, title=job.title, nbytes=nbytes)
        pack(base, writer=writer, described=job.strategy.describe(base.model))
    except (OSError, CacheRefusal) as error:
        _log.warning("cache_not_written", folder=str(cache.folder), reason=_reason(error))
        if writer is not None:
            writer.abandon()
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    else:
        _log.info("cache_written", entry=entry_name(key), bytes=nbytes)


def _choose(job: LoadJob, entry: Entry | None) -> HostChoice:
    """Decide where layers stand, before anything is read."""
    strategy, device = job.strategy, job.request.device
    if entry is not None:
        sizes = BaseSizes.of_entry(entry)
    elif isinstance(strategy, PackingStrategy):
        sizes = strategy.estimate(job.request)
    else:
        sizes = BaseSizes(layers=0, rest=0, largest=0)
    limits = read_limits(device, wanted=sizes.layers + sizes.rest)
    choice = choose_host(
        job.host, layers=sizes.layers, rest=sizes.rest, largest=sizes.largest, limits=limits
    )
    if choice.mode != "pinned":
        _log.warning("host_mode", asked=job.host, **attrs.asdict(choice))
    return choice


def _store(job: LoadJob, choice: HostChoice) -> HostStore:
    device = job.request.device
    ring = None if choice.mode == "pinned" else StagingRing(device)
    return HostStore(device, home=True, ring=ring)


def _loaded(strategy: LoaderStrategy, request: LoadRequest) -> nn.Module:
    model = strategy.load(request)
    for param in model.parameters():
        param.requires_grad_(False)
    return model


def _planned(model: nn.Module, job: LoadJob, store: HostStore) -> LoadedBase:
    plan = build_plan(
        model,
        family=job.request.family,
        codecs=plugins().codecs(),
        device=job.request.device,
    )
    return LoadedBase(model, plan, store)


def _move_the_rest(base: LoadedBase, device: torch.device) -> None:
    """Move what does not stream to the device."""
    for param in base.plan.on_device:
        param.data = param.data.to(device)
    for module in base.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _settled(base: LoadedBase, job: LoadJob) -> nn.Module:
    if job.request.device.type == "cuda":
        torch.cuda.empty_cache()
    give_back_free_memory()
    base.store.settle()
    base.model.__dict__[STORE] = base.store
    _log.info(
        "loaded",
        path=str(job.request.path),
        units=len(base.plan.units()),
        host_bytes=base.store.nbytes,
    )
    return base.model


def _find(job: LoadJob, key: Mapping[str, Any] | None) -> Entry | None:
    if job.cache is None or key is None:
        return None
    try:
        return job.cache.find(key)
    except DamagedFile as error:
        _discard(job, entry_name(key), error)
        return None


def _discard(job: LoadJob, name: str, error: DamagedFile) -> None:
    assert job.cache is not None
    _log.warning("cache_damaged", entry=name, reason=str(error), used="checkpoint")
    with contextlib.suppress(OSError):
        job.cache.discard(name)


def _cache_key(job: LoadJob) -> Mapping[str, Any] | None:
    """Return the key of the base, or None if it cannot be kept, which is reported."""
    if job.cache is None:
        return None
    strategy = job.strategy
    if not isinstance(strategy, PackingStrategy):
        reason = f"strategy '{strategy.strategy}' for '{strategy.precision}' cannot be packed"
        _log.warning("cache_unavailable", reason=reason)
        return None
    try:
        return strategy.cache_key(job.request)
    except CacheRefusal as error:
        _log.warning("cache_unavailable", reason=str(error))
        return None


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
