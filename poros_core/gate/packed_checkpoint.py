"""Random checkpoints that are quantised already, for shapes whose bf16 weights fit on no disk.

[Note: Rolled layers]
A few leading layers are drawn at random, loaded the ordinary way, which quantises them, and saved.
Every further layer is a copy of the drawn one of its kind, each of its weights rolled by another
number of elements: true shapes, bytes that differ from layer to layer, so that a layer computed
with another one's weights shows, and a quarter of the disk. Statistics are those of the drawn
layer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from poros_core.errors import GateError
from poros_core.gate.layers import layer_match, leading
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.raw_tensors import RawFile, write_index, write_raw

__all__ = ["write_packed_checkpoint"]

_ROLLED = ("weight", "bias", "absmax")
"""Last parts of the names of what differs between layers; code tables and the like do not."""
_STEP = 4099
_WRITERS = 4


def write_packed_checkpoint(
    config: Mapping[str, Any],
    path: Path,
    *,
    seed: int,
    device: torch.device,
    load: Callable[[Path], nn.Module],
) -> None:
    """Write a quantised random checkpoint; see [Note: Rolled layers].

    Args:
        config: a Transformers config as a mapping.
        path: the folder; it must exist.
        seed: of the layers that are drawn.
        device: where they are drawn.
        load: loads a checkpoint the ordinary way, quantised; its model can be saved.

    Raises:
        GateError: the model's layers are not copies of a few kinds, or the disk has no room.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    if text.get("hidden_size_per_layer_input") or text.get("num_kv_shared_layers"):
        raise GateError(
            "--weights rolled: this model's layers share tensors, so that none is a copy of "
            "another. Use --weights drawn."
        )
    kinds = _kinds(text)
    drawn = max(kinds.index(kind) for kind in set(kinds)) + 1
    with tempfile.TemporaryDirectory(prefix="drawn-", dir=path.parent) as folder:
        quantisation = _draw(leading(config, drawn), Path(folder), seed, device, load)
        template = [
            RawFile.open(f) for f in sorted((Path(folder) / "packed").glob("*.safetensors"))
        ]
        _check_room(path, template, layers=len(kinds), drawn=drawn)
        _write(path, template, [kinds.index(kind) for kind in kinds])
    whole = AutoConfig.for_model(**config)
    whole.quantization_config = quantisation["config"]
    whole.architectures, whole.dtype = quantisation["architectures"], torch.bfloat16
    whole.save_pretrained(path)


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """Return each layer's kind."""
    layers = int(text["num_hidden_layers"])
    whole: Any = AutoConfig.for_model(**text)
    kinds = getattr(whole, "layer_types", None) or ["layer"] * layers
    return [str(kind) for kind in kinds]


def _draw(
    config: Mapping[str, Any],
    folder: Path,
    seed: int,
    device: torch.device,
    load: Callable[[Path], nn.Module],
) -> dict[str, Any]:
    """Write the drawn layers, quantised, into ``packed``; return how they were quantised."""
    plain, packed = folder / "plain", folder / "packed"
    write_random_checkpoint(config, plain, seed=seed, dtype=torch.bfloat16, device=device)
    model: Any = load(plain)
    model.save_pretrained(packed)
    shutil.rmtree(plain)
    saved = model.config
    if getattr(saved, "quantization_config", None) is None:
        raise GateError("--weights rolled is for quantised bases: use it with --precision nf4.")
    return {
        "config": saved.quantization_config.to_dict(),
        "architectures": saved.architectures,
    }


def _check_room(path: Path, template: Sequence[RawFile], *, layers: int, drawn: int) -> None:
    sizes = [
        (raw.size(name), layer_match(name) is not None) for raw in template for name in raw.entries
    ]
    in_layers = sum(size for size, layered in sizes if layered)
    total = sum(size for size, layered in sizes if not layered) + in_layers // drawn * layers
    free = shutil.disk_usage(path).free
    if free < total:
        raise GateError(
            f"The packed checkpoint takes {total / 1e9:.1f} GB, and '{path}' has "
            f"{free / 1e9:.1f} GB free. Point TMPDIR at a disk with room."
        )


def _write(path: Path, template: Sequence[RawFile], copied_from: Sequence[int]) -> None:
    """Write one file per layer, and one for the rest."""
    files = {name: raw for raw in template for name in raw.entries}
    rest = {name: files[name].entries[name] for name in files if layer_match(name) is None}
    weight_map = dict.fromkeys(rest, "rest.safetensors")
    write_raw(path / "rest.safetensors", rest, lambda name: files[name].chunks(name))

    def write(layer: int) -> dict[str, str]:
        original = {
            _renumbered(name, layer): name
            for name in files
            if (found := layer_match(name)) is not None and int(found[1]) == copied_from[layer]
        }
        file = f"layer-{layer:04}.safetensors"
        write_raw(
            path / file,
            {new: files[old].entries[old] for new, old in original.items()},
            lambda new: _rolled(files[original[new]], original[new], layer),
        )
        return dict.fromkeys(original, file)

    with ThreadPoolExecutor(_WRITERS) as pool:
        for names in pool.map(write, range(len(copied_from))):
            weight_map.update(names)
    write_index(path, weight_map)


def _renumbered(name: str, layer: int) -> str:
    found = layer_match(name)
    assert found is not None
    return f"{name[: found.start(1)]}{layer}{name[found.end(1) :]}"


def _rolled(raw: RawFile, name: str, layer: int) -> Iterator[bytes]:
    size = raw.size(name)
    count = 1
    for extent in raw.entries[name]["shape"]:
        count *= extent
    if name.rpartition(".")[2] not in _ROLLED or count < 2:
        return raw.chunks(name)
    item = size // count
    # a multiple of the step, and never by a whole turn for two layers alike
    return raw.chunks(name, rolled=layer * _STEP % count * item)
