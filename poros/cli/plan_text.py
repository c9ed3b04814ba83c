"""How a plan is shown: as text, and as JSON."""

from __future__ import annotations

from typing import Any

import attrs
from rich.text import Text

from poros.cli.output import print_line, print_rows
from poros_core.planner import HOST_MARGIN, RunPlan
from poros_core.planner.memory import CONTEXT_BYTES, Memory
from poros_core.planner.settings import RunSettings
from poros_core.planner.step_time import Rates, StepTime

__all__ = ["as_json", "print_plan"]

_SMALL = 5_000_000
"""Bytes below which a part is not shown."""
_ADVICE = {
    "resident": "The base fits on the device, activations and all: the plain resident run, without "
    "Poros, is the right choice.",
    "checkpointing": "The base fits on the device with gradient checkpointing: the plain resident "
    "run, without Poros, is the right choice.",
}
_NOT_JUDGED = {
    "device": "The card's memory was not judged: give --vram-budget.",
    "host": "Host memory was not judged: give --ram.",
}


def print_plan(plan: RunPlan, rates: Rates) -> None:
    """Print what a run takes, and whether it fits."""
    model, run = plan.model, plan.run
    print_line(
        Text.assemble(
            ("Poros plan  ", "bold"),
            f"{model.name} ({model.family}, {model.weights.count / 1e9:.2f} billion parameters), "
            f"{run.precision.upper()}; {run.accumulate} x {run.batch} x {run.seq_len} tokens, LoRA "
            f"rank {run.rank}, block size {run.block_size}, CUDA graphs "
            f"{'on' if run.graphs else 'off'}\n",
        )
    )
    print_rows([*_device_rows(plan.memory), *_other_rows(plan, rates)])
    for line in _verdict(plan):
        print_line(line)


def _device_rows(memory: Memory) -> list[tuple[str | Text, str | Text]]:
    found: list[tuple[str | Text, str | Text]] = [
        (Text("device memory", style="bold"), f"at its peak, the {memory.moment}")
    ]
    parts = sorted(memory.components.items(), key=lambda item: -item[1])
    for name, nbytes in [*parts, *_around(memory).items()]:
        if nbytes < _SMALL:
            continue
        note = ""
        if name == "arena":
            note = f" (slots {_gb(memory.slots)} and head {_gb(memory.head)}, in turn)"
        found.append((f"  {name}", f"{_gb(nbytes)}{note}"))
    return [*found, ("  card must have", Text(_gb(memory.device), style="bold"))]


def _around(memory: Memory) -> dict[str, int]:
    found = {
        "graph workspace outside the arena": memory.graph_workspace,
        "the allocator's gaps": memory.gaps,
        "CUDA graphs": memory.graphs,
        "CUDA context": CONTEXT_BYTES,
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _other_rows(plan: RunPlan, rates: Rates) -> list[tuple[str | Text, str | Text]]:
    model = plan.model
    parts = ", ".join(f"{name} {_gb(nbytes)}" for name, nbytes in plan.host.items())
    but = " but for layers" if plan.run.host == "pageable" else ""
    adapter = 4 * model.weights.adapter_count(plan.run.rank)
    packed = f"packed layers {_gb(plan.files)}, " if plan.run.host == "mmap" else ""
    resident = f"{_gb(plan.resident.device)}; with checkpointing {_gb(plan.checkpointed.device)}"
    rows = {
        "host memory": f"{_gb(plan.host_bytes)}, page-locked{but} ({parts})",
        "disk": f"{_gb(model.download)} to download, {packed}adapter {_gb(adapter)}",
        "step, all streams": _step_text(plan.time, rates),
    }
    if plan.kept_time is not None and plan.kept:
        layers = len(model.weights.layers)
        rows["step, with the budget"] = (
            f"{plan.kept} of {layers} layers stay on the card: {_step_text(plan.kept_time, rates)}"
        )
    rows["without Poros"] = f"card must have {resident}"
    return [(Text(name, style="bold"), text) for name, text in rows.items()]


def _step_text(time: StepTime, rates: Rates) -> str:
    link = f"{time.link:.3f} s for {_gb(time.streamed)} at {rates.link / 1e9:.1f} GB/s"
    if time.rate != rates.link:
        link += f", layers, which are not page-locked, at {time.rate / 1e9:.1f} GB/s"
    if time.compute is None:
        return (
            f"at least {time.seconds:.3f} s: link {link} ({rates.source}); the GPU's rate is not "
            "known (--compute-rate)"
        )
    return (
        f"{time.seconds:.3f} s, set by {time.bound}: link {link} ({rates.source}), compute "
        f"{time.compute:.3f} s"
    )


def _verdict(plan: RunPlan) -> list[Text]:
    lines = [Text("")]
    if plan.model.weights.uncounted:
        missing = ", ".join(plan.model.weights.uncounted)
        lines.append(
            Text(
                f"Not counted: {missing} (towers stay on the device). Name a folder with the "
                "checkpoint, whose headers are read.",
                style="yellow",
            )
        )
    if plan.vram is None and plan.ram is None:
        lines.append(Text("Give --vram-budget and --ram to have it judged."))
        return lines
    if not plan.loads:
        lines.append(
            Text(
                f"It does not load: the base and {_gb(HOST_MARGIN)} for the process need more host "
                f"memory than {_gb(plan.ram or 0)}.",
                style="red",
            )
        )
        if plan.fitting:
            changed = _changes(plan.run, plan.fitting[0])
            lines.append(
                Text(
                    f"It loads and trains with {changed}: as exact, and with up to "
                    f"{_gb(2 * plan.files)} to read from disk for each micro-batch, which no step "
                    "time here counts.",
                    style="yellow",
                )
            )
    elif plan.trains:
        lines.append(Text("It loads and trains.", style="green"))
    elif plan.fitting:
        changed = _changes(plan.run, plan.fitting[0])
        lines.append(Text(f"It loads, and trains with {changed}.", style="yellow"))
    else:
        lines.append(
            Text(
                "It loads, and does not train: no setting fits. Take a shorter sequence, a smaller "
                "batch or a lower rank.",
                style="red",
            )
        )
    for memory in plan.not_judged:
        lines.append(Text(_NOT_JUDGED[memory], style="yellow"))
    if plan.longest is not None:
        lines.append(Text(f"The longest sequence that fits so has {plan.longest} tokens."))
    if plan.advice is not None:
        lines.append(Text(_ADVICE[plan.advice], style="yellow"))
    return lines


def _changes(asked: RunSettings, option: RunSettings) -> str:
    found = []
    if option.host != asked.host:
        found.append("poros.load(host='mmap')")
    if option.optimizer_state != asked.optimizer_state:
        found.append("poros.offload_optimizer")
    if option.block_size != asked.block_size:
        found.append(f"block_size={option.block_size}")
    if option.graphs != asked.graphs:
        found.append("graphs='off'")
    if option.loss_chunk != asked.loss_chunk:
        found.append(
            f"poros.chunked_loss(chunk={option.loss_chunk}), a loss whose bits are its own"
        )
    return ", ".join(found)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def as_json(plan: RunPlan, rates: Rates) -> dict[str, Any]:
    """Return a plan as JSON has it. Sizes are in bytes, times in seconds."""
    model = plan.model
    return {
        "model": model.name,
        "family": model.family,
        "parameters": model.weights.count,
        "layers": len(model.weights.layers),
        "not_counted": list(model.weights.uncounted),
        "settings": attrs.asdict(plan.run),
        "device": _memory_json(plan.memory),
        "resident": {
            "plain": _memory_json(plan.resident),
            "checkpointing": _memory_json(plan.checkpointed),
            "right_choice": plan.advice,
        },
        "host_bytes": plan.host_bytes,
        "host": dict(plan.host),
        "disk": {
            "checkpoint_bytes": model.disk,
            "download_bytes": model.download,
            "packed_layers_bytes": plan.files if plan.run.host == "mmap" else 0,
            "adapter_bytes": 4 * model.weights.adapter_count(plan.run.rank),
        },
        "step": _time_json(plan.time),
        "kept_layers": plan.kept,
        "step_with_budget": None if plan.kept_time is None else _time_json(plan.kept_time),
        "rates": attrs.asdict(rates),
        "vram_budget": plan.vram,
        "ram": plan.ram,
        "loads": plan.loads,
        "not_judged": list(plan.not_judged),
        "trains": plan.trains,
        "fitting": [attrs.asdict(option) for option in plan.fitting],
        "longest_seq_len": plan.longest,
    }


def _time_json(time: StepTime) -> dict[str, Any]:
    return {
        "seconds": time.seconds,
        "complete": time.compute is not None,
        "bound": time.bound,
        "link_seconds": time.link,
        "compute_seconds": time.compute,
        "launch_seconds": time.launch,
        "beside_seconds": time.beside,
        "bytes_streamed": time.streamed,
        "layers_bytes_per_second": time.rate,
    }


def _memory_json(memory: Memory) -> dict[str, Any]:
    return {
        "moment": memory.moment,
        "components": dict(memory.components),
        "slots_bytes": memory.slots,
        "head_bytes": memory.head,
        **{name.replace(" ", "_"): nbytes for name, nbytes in _around(memory).items()},
        "peak_allocated_bytes": memory.allocated,
        "peak_reserved_bytes": memory.reserved,
        "peak_device_bytes": memory.device,
    }
