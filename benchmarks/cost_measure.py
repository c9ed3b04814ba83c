"""The measurements of one process: build the model, train it, say what that cost."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cost_loop
import torch
from attrs import evolve
from cost_models import Builder, Refused, compute_device
from cost_work import CARD, Work
from device_figures import DeviceMemory, cap_memory, used_before

import poros
from poros_core.gate.stack import stack_of
from poros_core.workspaces import drop_workspaces

LOADING = "while loading"
TRAINING = "while training"
_LEFT_BEHIND = 128 << 20
"""Bytes; more than what libraries keep."""


def outcomes(works: Sequence[Work], path: Path | None) -> Iterator[dict[str, Any]]:
    """Measure one work after the other, and say how each went: trained, refused, out of memory, or
    failed on bad input.

    Ends early where a process of its own is due to what is left: after a work that was not
    trained, or if one left something behind on the device.

    Args:
        works: all with the same base; see ``cost_work.groups``.
        path: the checkpoint; None draws the weights in place.
    """
    bench = Bench(path)
    for number, work in enumerate(works):
        if number and not bench.clear():
            return
        found = _outcome(bench, work)
        yield {**found, "measured_before_in_process": number}
        if found["outcome"] != "trained":
            return


def _outcome(bench: Bench, work: Work) -> dict[str, Any]:
    try:
        return {"outcome": "trained", "error": None, **bench.measure(work)}
    except poros.GateError as error:
        found = {"outcome": "failed", "error": str(error)}
    except (Refused, poros.PorosError) as error:
        found = {"outcome": "refused", "error": str(error)}
    except torch.OutOfMemoryError as error:
        where = getattr(error, "__notes__", [TRAINING])[0]
        found = {"outcome": "out of memory", "error": f"{where}: {str(error).splitlines()[0]}"}
    return {**found, "stack": stack_of(bench.device)}


class Bench:
    """Measures one work after the other on the same base."""

    def __init__(self, path: Path | None) -> None:
        self.device = compute_device()
        self._cuda = self.device.type == "cuda"
        self._builder = Builder(path, self.device)
        self._stack: dict[str, str | None] | None = None

    def measure(self, work: Work) -> dict[str, Any]:
        """Build the model of ``work``, train it, and return what that cost.

        Raises:
            Refused: the method cannot train this.
            torch.OutOfMemoryError: it does not fit.
        """
        device = self.device
        before = used_before(device)
        memory = DeviceMemory(device)
        memory.restart()
        cap = None
        if self._cuda and work.cap_bytes is not None:
            cap = cap_memory(device, cap=work.cap_bytes, reserve=work.cap_reserve_bytes)
        allocated_before = _allocated(self._cuda)
        start = time.perf_counter()
        try:
            with memory.watching():
                model = self._builder.build(_with_budget(work))
        except torch.OutOfMemoryError as error:
            error.add_note(LOADING)
            raise
        memory.look()
        building = {
            "build_seconds": time.perf_counter() - start,
            "build_peak_device_bytes": memory.peak,
            "build_peak_allocated_bytes": torch.cuda.max_memory_allocated() if self._cuda else None,
        }
        _clear(self._cuda)
        memory.restart()
        if work.data is None:
            found = cost_loop.train(work, model, device, memory)
        else:
            import trainer_loop

            found = trainer_loop.train(work, model, device, memory)
        self._stack = self._stack or stack_of(device)
        return {
            **found,
            **building,
            "device_bytes_before": before,
            "allocated_before_bytes": allocated_before,
            "driver_sampled": memory.sampled,
            "card": cap,
            "stack": self._stack,
        }

    def clear(self) -> bool:
        """Leave nothing but the base; say whether that is all that the device holds."""
        self._builder.strip()
        if self._cuda:
            drop_workspaces()
        _clear(self._cuda)
        return (_allocated(self._cuda) or 0) - self._builder.base_bytes <= _LEFT_BEHIND


def _with_budget(work: Work) -> Work:
    """Settle a budget of ``"card"``: the size of the card that is emulated."""
    return evolve(work, vram_budget=work.cap_bytes) if work.vram_budget == CARD else work


def _allocated(cuda: bool) -> int | None:
    return torch.cuda.memory_allocated() if cuda else None


def _clear(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
