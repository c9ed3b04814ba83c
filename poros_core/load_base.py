"""From a request to a model whose base stands where it was asked to: read, placed, kept on disk.

``host`` decides where layers stand (see ``host_mode``), ``cache`` whether the base is kept for the
next load (see ``packed_cache``). A base that is kept is read from there, and never when any file of
it is not what was written: then it is discarded, and loaded from the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from attrs import field, frozen
from torch import nn

from poros_core.berths import Berths
from poros_core.errors import PrepareError, SettingsError
from poros_core.finite import BaseCheck
from poros_core.host_mode import HostChoice, HostMode, choose_host, read_limits
from poros_core.host_store import HostStore
from poros_core.landing import FileLanding, give_back_free_memory, land_in_memory
from poros_core.load_progress import LoadMeter, LoadObserver, SilentObserver
from poros_core.log import get_logger
from poros_core.packed_cache import CacheRefusal, PackedCache
from poros_core.packed_entry import Entry, EntryWriter, entry_name
from poros_core.packed_file import DamagedFile
from poros_core.packing import LoadedBase, named_refs, pack, unpack
from poros_core.packing_strategy import BaseSizes, PackingStrategy
from poros_core.placing import place_units
from poros_core.plan import build_plan
from poros_core.plugins import plugins
from poros_core.prepare import STORE
from poros_core.protocols import LoaderStrategy, LoadRequest
from poros_core.rest import move_the_rest
from poros_core.ring import StagingRing
from poros_core.switching import short_turns

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
        observer: is told how far it is.
    """

    strategy: LoaderStrategy
    request: LoadRequest
    title: str
    cache: PackedCache | None
    host: HostMode | Literal["auto"]
    observer: LoadObserver = field(factory=SilentObserver)


def load_base(job: LoadJob) -> nn.Module:
    """Return a model with its base in the host store, from the cache if it is there and whole.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit.
        PrepareError: host memory or disk do not suffice.
        SettingsError: the base cannot stand where it was asked to.
    """
    with short_turns(), LoadMeter(job.request.device) as meter:
        return _load(job, meter)


def _load(job: LoadJob, meter: LoadMeter) -> nn.Module:
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
        source = "cache"
        if base is None:
            source = "checkpoint"
            base = _from_checkpoint(job, key, choice)
    finally:
        if entry is not None:
            entry.close()
    _settle(base, job)
    read = entry.nbytes if source == "cache" and entry is not None else _weight_bytes(job)
    report = meter.report(
        source=source,
        host=choice.mode,
        read_bytes=read,
        host_bytes=base.store.nbytes,
        device_bytes=sum(base.plan.on_device_bytes().values()),
    )
    base.store.report = report
    job.observer.done(report)
    units = len(base.plan.units())
    _log.info("loaded", path=str(job.request.path), units=units, **attrs.asdict(report))
    return base.model


def _from_cache(job: LoadJob, entry: Entry, choice: HostChoice) -> LoadedBase | None:
    """Return the base from the cache; None if it is not whole."""
    assert isinstance(job.strategy, PackingStrategy)
    store = _store(job, choice)
    job.observer.stage("reading the cache", entry.nbytes)
    try:
        base = unpack(
            entry,
            job.request,
            job.strategy.skeleton,
            store=store,
            mode=choice.mode,
            advance=job.observer.advance,
        )
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
    staged = choice.mode != "pinned"
    with Berths(job.request.family, job.request.device, locked=not staged) as berths:
        model = _loaded(job, land_in_memory, berths=berths)
        base = _planned(model, job, _store(job, choice))
        nbytes = sum(ref.get().nbytes for unit in base.plan.units() for ref in unit.refs)
        job.observer.stage("placing the base", nbytes)
        check = BaseCheck(model, named_refs(model))
        place_units(
            base.plan,
            base.store,
            berths=berths,
            staged=staged,
            advance=job.observer.advance,
            placed=check.look,
        )
    _move_the_rest(base, job.request.device)
    check.refuse(job.request.path)
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
        model = _loaded(job, landing)
        landing.close()
        base = _planned(model, job, _store(job, choice))
        _move_the_rest(base, job.request.device)
        job.observer.stage("writing the cache", sizes.layers + sizes.rest)
        described = job.strategy.describe(model)
        advance = job.observer.advance
        files = pack(base, writer=writer, mapped=True, advance=advance)
        check = BaseCheck(model, named_refs(model))
        for image in base.store.images():
            check.look(image)
        check.refuse(job.request.path)
        writer.finish(*files, described)
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
        job.observer.stage("writing the cache", nbytes)
        files = pack(base, writer=writer, advance=job.observer.advance)
        writer.finish(*files, job.strategy.describe(base.model))
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
        say = _log.warning if job.host == "auto" else _log.info
        say("host_mode", asked=job.host, **attrs.asdict(choice))
    return choice


def _store(job: LoadJob, choice: HostChoice) -> HostStore:
    device = job.request.device
    ring = None if choice.mode == "pinned" else StagingRing(device)
    return HostStore(device, home=True, ring=ring)


def _loaded(
    job: LoadJob, land: Callable[[torch.Tensor], torch.Tensor], *, berths: Berths | None = None
) -> nn.Module:
    job.observer.stage("reading the checkpoint", _weight_bytes(job))
    request = attrs.evolve(job.request, land=land, berths=berths, advance=job.observer.advance)
    model = job.strategy.load(request)
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
    move_the_rest(
        base.model,
        codecs=[codec for codec, _ in plugins().codecs()],
        streamed={id(param) for unit in base.plan.units() for _, _, param in unit.places},
        device=device,
    )


def _settle(base: LoadedBase, job: LoadJob) -> None:
    if job.request.device.type == "cuda":
        torch.cuda.empty_cache()
    give_back_free_memory()
    base.store.settle()
    base.model.__dict__[STORE] = base.store


def _weight_bytes(job: LoadJob) -> int:
    return sum(file.stat().st_size for file in job.request.path.glob("*.safetensors"))


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
