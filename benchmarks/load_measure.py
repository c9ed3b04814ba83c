"""One measurement of a load in one process: load, and say what that cost and could cost."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import asdict, evolve
from device_figures import DeviceMemory, used_before
from load_floors import (
    Rates,
    copy_rates,
    drop_from_page_cache,
    generate_rate,
    hash_rate,
    lock_rate,
    quantise_rate,
    read_rate,
    write_rate,
)
from load_generated import Pool, generating, write_holes
from load_memory import HostMemoryWatch, memory_disk, touch_memory
from load_verify import checkpoint_source, verify
from load_work import LoadWork, Way

import poros
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.stack import stack_of
from poros_core.host_store import HostStore
from poros_core.packed_cache import PackedCache
from poros_core.prepare import STORE
from poros_loaders.checkpoint import read_checkpoint
from poros_loaders.estimate import estimated
from poros_loaders.nf4 import NF4

__all__ = ["outcome", "write_checkpoint"]

_BESIDES = 1 << 30
"""Bytes that a load is given besides its base when memory is touched before it."""


def compute_device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def write_checkpoint(work: LoadWork) -> None:
    """Write the checkpoint that the work loads."""
    path, config = Path(work.checkpoint), work.subject().config
    if work.way.generated:
        write_holes(config, path, seed=work.seed, device=compute_device())
        return
    write_random_checkpoint(
        config, path, seed=work.seed, dtype=torch.bfloat16, device=compute_device()
    )


def outcome(work: LoadWork) -> dict[str, Any]:
    """Measure, and say how it went: loaded, refused, or out of memory."""
    device = compute_device()
    try:
        return {"outcome": "loaded", "error": None, **measure(work, device)}
    except poros.PorosError as error:
        found = {"outcome": "refused", "error": str(error)}
    except torch.OutOfMemoryError as error:
        found = {"outcome": "out of memory", "error": str(error).splitlines()[0]}
    return {**found, "stack": stack_of(device)}


def measure(work: LoadWork, device: torch.device) -> dict[str, Any]:
    """Load, and return every figure of the record."""
    cuda = device.type == "cuda"
    files = _files(work)
    before = used_before(device)
    pool = Pool(work.seed, device) if work.way.generated else None
    _warm_up(work, device, pool=pool)
    touched = touch_memory(_needed(work) + _BESIDES)
    if work.cold:
        drop_from_page_cache(files)
    host = HostMemoryWatch(Path(work.checkpoint), Path(work.cache))
    memory = DeviceMemory(device)
    memory.restart()
    driver_before, level = memory.now(), 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        level = torch.cuda.memory_allocated()
    with memory.watching(), host:
        start = time.perf_counter()
        model = _load(work, pool=pool)
        seconds = time.perf_counter() - start
    memory.look()
    peak = torch.cuda.max_memory_allocated() - level if cuda else None
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    steady = host.now() - host.before
    store: HostStore = model.__dict__[STORE]
    report = store.report
    assert report is not None
    sizes = base_bytes(model)
    if work.way.cache == "read" and report.source != "cache":
        raise poros.SettingsError("The cache has no such base: measure cache-write before it.")
    rates = _rates(work, files, sizes, device, pool=pool, locked=_locked(store))
    stages = _stages(work, files, sizes, rates, locked=sum(_locked(store)))
    return {
        "seconds": seconds,
        "device_peak_bytes": peak,
        "device_driver_peak_bytes": memory.peak,
        "device_driver_level_bytes": driver_before,
        "device_bytes_before": before,
        "host_touched_before_bytes": touched,
        "driver_sampled": memory.sampled,
        "host_peak_bytes": host.peak,
        "host_steady_bytes": steady,
        "packed_bytes": sizes["packed"],
        "unquantised_bytes": sizes["unquantised"],
        "host_store_bytes": store.nbytes,
        "device_base_bytes": report.device_bytes,
        "source": report.source,
        "host": report.host,
        "read_bytes": report.read_bytes,
        "disk_bytes_per_second": rates.read,
        "rates": asdict(rates),
        "stage_seconds": stages,
        "floor_seconds": max(stages.values(), default=None),
        "page_cache": _page_cache(work, files),
        "report": asdict(report),
        "bytes": _verified(work, model, device, pool=pool) if work.verify else None,
        "stack": stack_of(device),
    }


def _verified(
    work: LoadWork, model: Any, device: torch.device, *, pool: Pool | None
) -> dict[str, Any]:
    """Compare every tensor with what a standard load makes of the same weights."""
    rest = checkpoint_source(Path(work.checkpoint))
    weights = rest if pool is None else pool.to(device).weight
    config = work.subject().config
    return verify(model, config, double=work.double, weights=weights, rest=rest, device=device)


def base_bytes(model: Any) -> dict[str, int]:
    """Return the bytes of a loaded base: packed, unquantised, what packed ones were, the most
    elements of one; each parameter once."""
    packed = unquantised = elements = largest = 0
    seen: set[int] = set()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            if not NF4.claims(param):
                unquantised += param.nbytes
                continue
            packed += sum(ref.get().nbytes for ref in NF4.refs(module, name, param))
            count = int(torch.Size(param.quant_state.shape).numel())
            elements, largest = elements + count, max(largest, count)
    return {
        "packed": packed,
        "unquantised": unquantised,
        "quantised_from": 2 * elements,
        "largest": largest,
    }


def _cache(work: LoadWork) -> PackedCache:
    return PackedCache(Path(work.cache), limit=10**13)


def _files(work: LoadWork) -> list[Path]:
    """Return the files that the load reads."""
    if work.way.cache == "read":
        return sorted(Path(work.cache).glob("*/*.safetensors"))
    return sorted(Path(work.checkpoint).glob("*.safetensors"))


def _warm_up(work: LoadWork, device: torch.device, *, pool: Pool | None) -> None:
    """Load a tiny model in the same way: it imports what a load imports, makes the context, and
    launches the quantiser once."""
    with tempfile.TemporaryDirectory(prefix="poros-warm-") as folder:
        tiny = evolve(
            work, shape="tiny", layers=1, checkpoint=f"{folder}/tiny", cache=f"{folder}/cache"
        )
        write_checkpoint(tiny)
        if tiny.way.cache == "read":
            _load(tiny, way=evolve(tiny.way, cache="write", host="pinned"))
        _load(tiny, pool=pool)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _load(work: LoadWork, *, way: Way | None = None, pool: Pool | None = None) -> Any:
    way = way or work.way
    if way.cache == "write":
        cache = _cache(work)
        for info in cache.entries():
            cache.remove(info.name)
    config = None
    if way.precision == "nf4":
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=work.double,
        )
    source: Any = contextlib.nullcontext() if pool is None else generating(pool)
    with source:
        return poros.load(
            work.checkpoint,
            precision=way.precision,
            load_strategy=way.strategy,
            device=compute_device(),
            quantization_config=config,
            host=way.host,
            cache=work.cache if way.cache else False,
        )


def _locked(store: HostStore) -> list[int]:
    """Return the bytes of each stretch that was page-locked."""
    buffers = {id(image.buffer): image.buffer for image in store.images()}
    return [b.nbytes for b in buffers.values() if getattr(b, "locked", False)]


def _needed(work: LoadWork) -> int:
    """Return about how many bytes the base takes on the host; 0 without a checkpoint."""
    if not (Path(work.checkpoint) / "config.json").is_file():
        return 0
    sizes = estimated(
        read_checkpoint(Path(work.checkpoint)),
        dtype=torch.bfloat16,
        quantised=work.way.precision == "nf4",
        double=work.double,
    )
    return sizes.layers + sizes.rest


def _rates(
    work: LoadWork,
    files: list[Path],
    sizes: Mapping[str, int],
    device: torch.device,
    *,
    pool: Pool | None,
    locked: Sequence[int],
) -> Rates:
    cuda, way = device.type == "cuda", work.way
    quantises = way.precision == "nf4" and way.cache != "read"
    if work.cold:
        drop_from_page_cache(files)
    to_device, to_host = copy_rates(device) if cuda and quantises else (None, None)
    weight = torch.Size((sizes["largest"],))
    return Rates(
        read=read_rate(files)[0] if pool is None else generate_rate(pool),
        quantise=quantise_rate(weight, device, double=work.double) if quantises else None,
        to_device=to_device,
        to_host=to_host,
        page_lock=lock_rate(device, locked) if cuda and locked else None,
        write=write_rate(Path(work.cache)) if way.cache == "write" else None,
        hash=hash_rate(),
    )


def _stages(
    work: LoadWork,
    files: list[Path],
    sizes: Mapping[str, int],
    rates: Rates,
    *,
    locked: int,
) -> dict[str, float]:
    """Return what each stage takes at least."""
    to_write = 0
    if work.way.cache == "write":
        to_write = sum(info.nbytes for info in _cache(work).entries())
    nbytes = {
        "read": sum(file.stat().st_size for file in files),
        "quantise": sizes["quantised_from"],
        "to_device": sizes["quantised_from"],
        "to_host": sizes["packed"],
        "page_lock": locked,
        "write": to_write,
    }
    found = {name: getattr(rates, name) for name in nbytes}
    return {name: nbytes[name] / rate for name, rate in found.items() if rate}


def _page_cache(work: LoadWork, files: list[Path]) -> str:
    if work.way.generated:
        return "no files: copied from a pool in memory"
    if files and memory_disk(files[0].parent):
        return "memory disk"
    return "dropped before the load" if work.cold else "as earlier work left it"
