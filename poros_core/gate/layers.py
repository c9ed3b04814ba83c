"""Gating the leading layers of a model: its config and its checkpoint, cut.

What a shorter stack shows holds for those layers and nothing else: a record says how many there
were of how many, and is of a kind that validates no family.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from poros_core.errors import GateError

__all__ = ["cut_checkpoint", "leading"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOWER = re.compile(r"(?:^|[._])(?:vision|visual|audio)(?:[._]|$)")
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Keys of a config whose list has one entry per layer."""
_CHUNK = 1 << 24


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
        kept = _cut_file(file, target / file.name, layers=layers)
        weight_map.update(dict.fromkeys(kept, file.name))
    found = {int(m[1]) for n in weight_map if (m := _layer(n)) is not None}
    if found != set(range(min(layers, whole))):
        raise GateError(
            f"--layers: '{source}' names its decoder layers in a way that is not known "
            "(no 'layers.0.' ...), so its first layers cannot be told. Leave --layers out."
        )
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _layer(name: str) -> re.Match[str] | None:
    return None if _TOWER.search(name) else _LAYER.search(name)


def _cut_file(source: Path, target: Path, *, layers: int) -> list[str]:
    """Copy the tensors of a file that stay; return their names. Writes nothing if none does."""
    try:
        with source.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
            start = 8 + length
            metadata = header.pop("__metadata__", {"format": "pt"})
            kept = {n: e for n, e in header.items() if _stays(n, layers)}
            if kept:
                _write(file, start, target, kept, metadata)
    except (OSError, ValueError, struct.error) as error:
        raise GateError(f"'{source}' cannot be read: {error}. Fetch the file again.") from error
    return list(kept)


def _stays(name: str, layers: int) -> bool:
    found = _layer(name)
    return found is None or int(found[1]) < layers


def _write(
    file: BinaryIO, start: int, target: Path, kept: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, entry in kept.items():
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        header[name] = {**entry, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in kept.values():
            for chunk in _chunks(file, start, *entry["data_offsets"]):
                out.write(chunk)


def _chunks(file: BinaryIO, start: int, begin: int, end: int) -> Iterator[bytes]:
    file.seek(start + begin)
    left = end - begin
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise ValueError("it ends early")
        left -= len(chunk)
        yield chunk
