"""The panel that ``prepare`` prints: what was prepared, and what can be claimed of it."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text

from poros_core.determinism import is_deterministic
from poros_core.family import Family
from poros_core.host_memory import layout
from poros_core.plan import base_model_of
from poros_core.planner.memory import CONTEXT_BYTES
from poros_core.settings import Settings
from poros_core.status import family_status, running_stack

if TYPE_CHECKING:
    from torch import nn

    from poros_core.plan import BlockPlan

__all__ = ["panel_lines", "print_panel"]

_PLAIN = "bf16"
"""Name of the codec of weights that are computed with as they are stored, whatever their dtype."""
_TRAINED = 12
"""Bytes of a trained parameter beside its own: gradient and AdamW's two tensors, in float32."""
_DTYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float64": "FP64"}


def panel_lines(
    model: nn.Module, *, family: Family, plan: BlockPlan, settings: Settings
) -> list[tuple[str, str]]:
    """Return the panel as (label, text) pairs. Every text is computed from the model."""
    config: Any = base_model_of(model).config
    precision = _precision(plan)
    status = family_status(family.name, running=running_stack(plan.device))
    if is_deterministic(plan.device):
        guarantee = f"bitwise parity ({precision}, deterministic)"
    else:
        guarantee = (
            f"none yet ({precision}): kernels are not deterministic; enter poros.deterministic() "
            "before loading for bitwise parity"
        )
    return [
        ("model", getattr(config, "_name_or_path", "") or type(base_model_of(model)).__name__),
        ("model_type", config.model_type),
        ("architecture", str(status)),
        ("adapter", f"{adapter_name(model)} (experimental)"),
        ("precision", precision),
        *_towers(plan),
        (
            "stack",
            "not checked (run poros doctor)"
            if status.record is None
            else f"matches the record {status.record.file}",
        ),
        ("block_size", str(settings.block_size)),
        *_budget(model, plan, settings),
        ("guarantee", guarantee),
    ]


def _precision(plan: BlockPlan) -> str:
    """Return the base's precision; of weights that are not quantised, the dtype of most bytes."""
    if plan.codec.name != _PLAIN:
        return plan.codec.title
    nbytes: Counter[str] = Counter()
    for unit in plan.units():
        for ref in unit.refs:
            tensor = ref.get()
            nbytes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    [(dtype, _)] = nbytes.most_common(1)
    return _DTYPES.get(dtype, dtype)


def _towers(plan: BlockPlan) -> list[tuple[str, str]]:
    """Return what stays on the device outside the decoder, if there is any, and its size."""
    decoder = f"{plan.decoder_name}."
    parts = [
        f"{part.rpartition('.')[2]} {nbytes / 1e6:.1f} MB"
        for part, nbytes in plan.on_device_bytes().items()
        if not part.startswith(decoder)
    ]
    return [("on device", ", ".join(parts))] if parts else []


def _budget(model: nn.Module, plan: BlockPlan, settings: Settings) -> list[tuple[str, str]]:
    """Return what a budget has room for, as far as that is known before the first step."""
    if settings.vram_budget is None:
        return []
    budget = _budget_bytes(settings.vram_budget, plan.device)
    if budget is None:
        return [("vram_budget", "auto")]
    base = sum(layout(unit.refs)[1] for unit in plan.units())
    trained = [param for param in model.parameters() if param.requires_grad]
    training = sum(param.nbytes + _TRAINED * param.numel() for param in trained)
    text = f"{budget / 1e9:.2f} GB"
    if settings.vram_budget == "auto":
        text = f"auto, {text} now"
    context = CONTEXT_BYTES if plan.device.type == "cuda" else 0
    if base + training + context > budget:
        return [("vram_budget", f"{text}; the base takes {base / 1e9:.2f} GB")]
    return [
        (
            "vram_budget",
            f"{text}; the base takes {base / 1e9:.2f} GB, so that all of it may stay on the device "
            "(the first step measures that): the plain resident path, without poros.prepare(), "
            "remains the right choice there",
        )
    ]


def _budget_bytes(budget: int | str, device: torch.device) -> int | None:
    """Return a budget in bytes; None for ``"auto"`` where the device's memory is not counted."""
    if not isinstance(budget, str):
        return budget
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device)


def adapter_name(model: nn.Module) -> str:
    """Return what kind of adapters train, for example ``"lora"`` or ``"dora"``."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    kinds = {
        "dora" if getattr(config, "use_dora", False) else config.peft_type.value.lower()
        for config in configs.values()
    }
    return ", ".join(sorted(kinds)) or "parameters without PEFT"


def print_panel(model: nn.Module, *, family: Family, plan: BlockPlan, settings: Settings) -> None:
    """Print the panel to standard output through rich."""
    lines = panel_lines(model, family=family, plan=plan, settings=settings)
    text = Text("Poros prepared model\n", style="bold")
    width = max(16, *(len(label) for label, _ in lines))
    out = Console()
    room = max(20, out.width - width - 2) if out.is_terminal else sys.maxsize
    for label, value in lines:
        parts = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
        for number, part in enumerate(parts):
            text.append(f"{'' if number else label:>{width}}  ", style="dim")
            text.append(f"{part}\n", style="default")
    out.print(text, end="", soft_wrap=True)
