"""Gating the leading layers of a model: its config and its checkpoint, cut.

What a shorter stack shows holds for those layers and nothing else: a record says how many there
were of how many, and is of a kind that validates no family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poros_core.errors import GateError
from poros_core.gate.raw_tensors import RawFile, write_index, write_raw

__all__ = ["cut_checkpoint", "layer_match", "leading"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOWER = re.compile(r"(?:^|[._])(?:vision|visual|audio)(?:[._]|$)")
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Keys of a config whose list has one entry per layer."""


def leading(config: Mapping[str, Any], layers: int) -> Mapping[str, Any]:
    """Return a config with the first layers of a decoder only.

    Args:
        config: a Transformers config as a mapping; the decoder's part may be ``text_config``.
        layers: how many.

    Raises:
        GateError: it has fewer.
    """
    if "text_config" in config:
        return {**config, "text_config": leading(config["text_config"], layers)}
    whole = int(config["num_hidden_layers"])
    if layers > whole:
        raise GateError(f"--layers {layers} is more than the {whole} layers there are.")
    if layers == whole:
        return config
    cut = {**config, "num_hidden_layers": layers}
    for name in _PER_LAYER:
        if isinstance(config.get(name), list):
            cut[name] = list(config[name][:layers])
    sharing = config.get("num_kv_shared_layers")
    if sharing:
        cut["num_kv_shared_layers"] = max(0, layers - (whole - int(sharing)))
    if isinstance(config.get("max_window_layers"), int):
        cut["max_window_layers"] = min(config["max_window_layers"], layers)
    return cut


def cut_checkpoint(source: Path, target: Path, *, config: Mapping[str, Any], whole: int) -> None:
    """Write a checkpoint that holds a model's first layers, byte for byte.

    Args:
        source: the checkpoint's folder.
        target: a folder for the shorter one; it must exist.
        config: the config with fewer layers, from ``leading``.
        whole: how many layers the checkpoint has.

    Raises:
        GateError: a tensor of the model spans all layers, or a file cannot be read.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    layers = int(text["num_hidden_layers"])
    if text.get("hidden_size_per_layer_input"):
        raise GateError(
            "--layers cannot cut this checkpoint: its per-layer inputs are one tensor for all "
            "layers. Use --shape with random weights, or leave --layers out."
        )
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise GateError(f"'{source}' holds no safetensors file. Fetch the checkpoint again.")
    weight_map: dict[str, str] = {}
    for file in files:
        raw = RawFile.open(file)
        kept = {name: entry for name, entry in raw.entries.items() if _stays(name, layers)}
        if kept:
            write_raw(target / file.name, kept, raw.chunks)
        weight_map.update(dict.fromkeys(kept, file.name))
    found = {int(m[1]) for n in weight_map if (m := layer_match(n)) is not None}
    if found != set(range(min(layers, whole))):
        raise GateError(
            f"--layers: '{source}' names its decoder layers in a way that is not known "
            "(no 'layers.0.' ...), so its first layers cannot be told. Leave --layers out."
        )
    write_index(target, weight_map)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def layer_match(name: str) -> re.Match[str] | None:
    """Return where a tensor's name has the number of its decoder layer; None if it is of none."""
    return None if _TOWER.search(name) else _LAYER.search(name)


def _stays(name: str, layers: int) -> bool:
    found = layer_match(name)
    return found is None or int(found[1]) < layers
