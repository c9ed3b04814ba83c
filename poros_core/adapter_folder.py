"""Telling an adapter's folder from a model's. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["adapter_told"]


def adapter_told(folder: Path) -> str | None:
    """Return what a folder with an adapter and no model is, and what to do; None for any other.

    Args:
        folder: the folder that was given for a model.
    """
    file = folder / "adapter_config.json"
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    base = _base(file)
    load = "its base model" if base is None else f"its base model, '{base}',"
    return (
        f"'{folder}' holds a PEFT adapter (adapter_config.json), not a model. Load {load} and put "
        "the adapter on it with peft.PeftModel.from_pretrained(model, folder, is_trainable=True)."
    )


def _base(file: Path) -> str | None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return base if isinstance(base, str) and base else None
