"""The panel that ``prepare`` prints: what was prepared, and what can be claimed of it."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from poros_core.determinism import is_deterministic
from poros_core.family import Family
from poros_core.plan import base_model_of
from poros_core.settings import Settings
from poros_core.status import family_status, running_stack

if TYPE_CHECKING:
    from torch import nn

    from poros_core.plan import BlockPlan

__all__ = ["panel_lines", "print_panel"]

_PLAIN = "bf16"
"""Name of the codec of weights that are computed with as they are stored, whatever their dtype."""
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
