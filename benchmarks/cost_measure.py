"""One measurement in one process: build the model, train it, say what that cost."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cost_loop
import torch
from attrs import evolve
from cost_models import Refused, build, compute_device
from cost_work import CARD, Work
from device_figures import DeviceMemory, cap_memory, used_before

import poros
from poros_core.gate.stack import stack_of

LOADING = "while loading"
TRAINING = "while training"


def outcome(work: Work, path: Path | None) -> dict[str, Any]:
    """Measure, and say how it went: trained, refused, out of memory, or failed on bad input."""
    try:
        return {"outcome": "trained", "error": None, **measure(work, path)}
    except poros.GateError as error:
        found = {"outcome": "failed", "error": str(error)}
    except (Refused, poros.PorosError) as error:
        found = {"outcome": "refused", "error": str(error)}
    except torch.OutOfMemoryError as error:
        where = getattr(error, "__notes__", [TRAINING])[0]
        found = {"outcome": "out of memory", "error": f"{where}: {str(error).splitlines()[0]}"}
    return {**found, "stack": stack_of(compute_device())}


def measure(work: Work, path: Path | None) -> dict[str, Any]:
    """Build the model of ``work``, train it, and return what that cost.

    Args:
        work: what is measured.
        path: the checkpoint; None draws the weights in place.

    Raises:
        Refused: the method cannot train this.
        torch.OutOfMemoryError: it does not fit.
    """
    device = compute_device()
    cuda = device.type == "cuda"
    before = used_before(device)
    memory = DeviceMemory(device)
    memory.restart()
    cap = None
    if cuda and work.cap_bytes is not None:
        cap = cap_memory(device, cap=work.cap_bytes, reserve=work.cap_reserve_bytes)
    start = time.perf_counter()
    try:
        with memory.watching():
            model = build(_with_budget(work, cap), path, device)
    except torch.OutOfMemoryError as error:
        error.add_note(LOADING)
        raise
    memory.look()
    building = {
        "build_seconds": time.perf_counter() - start,
        "build_peak_device_bytes": memory.peak,
        "build_peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }
    _clear(cuda)
    memory.restart()
    if work.data is None:
        found = cost_loop.train(work, model, device, memory)
    else:
        import trainer_loop

        found = trainer_loop.train(work, model, device, memory)
    return {
        **found,
        **building,
        "device_bytes_before": before,
        "driver_sampled": memory.sampled,
        "card": cap,
        "stack": stack_of(device),
    }


def _with_budget(work: Work, card: Mapping[str, Any] | None) -> Work:
    """Settle a budget of ``"card"``: what the emulated card leaves to the allocator."""
    if work.vram_budget != CARD:
        return work
    if card is None:
        raise poros.GateError(
            f"--vram-budget {CARD} is an emulated card's, so it needs --cap-bytes and a GPU."
        )
    return evolve(work, vram_budget=card["allocator_limit_bytes"])


def _clear(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
