"""What a checkpoint folder holds, read from its config and headers before any weight.

Needs neither torch nor safetensors: a safetensors header is eight bytes of length and a JSON text.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from attrs import frozen

from poros_core.adapter_folder import adapter_told
from poros_core.errors import CheckpointError

__all__ = ["Checkpoint", "TensorHeader", "few", "read_checkpoint", "read_config"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
_HEADER_LIMIT = 100_000_000
_POINTER = b"version https://git-lfs.github.com/spec/"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


@frozen(kw_only=True)
class TensorHeader:
    """One tensor of a checkpoint, as its shard's header describes it.

    Attributes:
        file: the shard.
        dtype: the safetensors name of its dtype, for example ``"BF16"``.
        shape: its shape.
        begin: bytes before it in the shard.
        nbytes: its size on disk.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@frozen(kw_only=True)
class Checkpoint:
    """A checkpoint folder whose files are all there and whole.

    Attributes:
        path: the folder.
        config: ``config.json`` as a mapping.
        files: the shards, in the order in which the index first names them.
        tensors: every tensor by its name in the checkpoint.
    """

    path: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorHeader]

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The ``quantization_config`` with which the weights were saved, or None."""
        for config in (self.config, self.config.get("text_config")):
            if isinstance(config, Mapping):
                found = config.get("quantization_config")
                if isinstance(found, Mapping):
                    return found
        return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read config and headers of a checkpoint folder, and check that every file is whole.

    Args:
        path: the folder.

    Raises:
        CheckpointError: something is missing, damaged, or of a kind that is not read; the message
            names the file and the fix.
    """
    config = read_config(path)
    files = _weight_files(path, config)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for name, header in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"Checkpoint '{path}': tensor '{name}' stands in two shards, "
                    f"'{tensors[name].file.name}' and '{file.name}', and which one counts is not "
                    "defined. Download the checkpoint again, or delete the shard that does not "
                    "belong to it and its lines in the index."
                )
            tensors[name] = header
    _check_index(path, tensors)
    return Checkpoint(path=path, config=config, files=files, tensors=tensors)


def read_config(path: Path) -> Mapping[str, Any]:
    """Return ``config.json`` of a checkpoint folder as a mapping.

    Raises:
        CheckpointError: the folder or the file is missing, or it is not a JSON object.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"There is no checkpoint folder at '{path}'. Give a folder that holds config.json and "
            "safetensors weights, or a model id of the Hugging Face Hub."
        )
    config = path / "config.json"
    if not config.is_file():
        raise CheckpointError(
            adapter_told(path)
            or f"Checkpoint '{path}' has no config.json. Give the folder that Transformers' "
            "save_pretrained wrote."
        )
    loaded = _read_json(config)
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"Checkpoint '{path}' holds a base model and an adapter (adapter_config.json) in one "
            "folder, and Transformers would load both at once. Move the adapter's files to a "
            "folder of their own and load it with peft.PeftModel.from_pretrained."
        )
    return loaded


def _weight_files(path: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the shards in the order in which Transformers would choose them."""
    if config.get("transformers_weights") is not None:
        raise CheckpointError(
            f"Checkpoint '{path}': config.json names its own weight file "
            f"('transformers_weights': {config['transformers_weights']!r}), which is not read. "
            f"Rename that file to {SINGLE} (or its index to {INDEX}) and remove the entry."
        )
    if any(path.glob("shard-*-model-*-of-*.safetensors")):
        raise CheckpointError(
            f"Checkpoint '{path}' holds a distributed checkpoint (shard-*.safetensors), which "
            "Transformers reads before anything else in the folder and which cannot be quantised. "
            "Load it once with Transformers and write it with save_pretrained to a new folder."
        )
    if (path / SINGLE).is_file():
        return (path / SINGLE,)
    if not (path / INDEX).is_file():
        raise _no_safetensors(path)
    return _indexed_files(path)


def _no_safetensors(path: Path) -> CheckpointError:
    pickled = sorted({file.name for pattern in _PICKLED for file in path.glob(pattern)})
    if pickled:
        return CheckpointError(
            f"Checkpoint '{path}' has pickled weights only ({few(pickled)}), and unpickling runs "
            "code from the file. If you trust where it came from, convert it once: python -c "
            '"from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained({str(path)!r}, dtype='auto').save_pretrained('converted')\" and "
            "load the folder 'converted' with the tokenizer's files copied to it."
        )
    return CheckpointError(
        f"Checkpoint '{path}' has no weights: neither {SINGLE} nor {INDEX} is there. Download the "
        "checkpoint again, or give the folder that Transformers' save_pretrained wrote."
    )


def _weight_map(path: Path) -> Mapping[str, Any]:
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(
            f"Checkpoint '{path}': {INDEX} has no 'weight_map' that says which shard holds which "
            "tensor. Download the index again."
        )
    return weight_map


def _indexed_files(path: Path) -> tuple[Path, ...]:
    names = list(dict.fromkeys(_weight_map(path).values()))
    for name in names:
        if not _stays_inside(name):
            raise CheckpointError(
                f"Checkpoint '{path}': {INDEX} names the shard {name!r}, which is not a plain file "
                "name. A shard must stand in the checkpoint's own folder: an index that reads "
                "from elsewhere is refused. Put the file there and name it without a path."
            )
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"Checkpoint '{path}' lacks {len(missing)} of the {len(names)} shards that {INDEX} "
            f"names: {few(missing)}. Download the missing files again (huggingface_hub's "
            "snapshot_download resumes where it stopped)."
        )
    return tuple(path / name for name in names)


def _stays_inside(name: object) -> bool:
    """Say whether an index entry is a plain safetensors file name, on any system's reading."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and "\0" not in name
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )


def _check_index(path: Path, tensors: Mapping[str, TensorHeader]) -> None:
    if (path / SINGLE).is_file():
        return
    wrong = [
        name
        for name, shard in _weight_map(path).items()
        if name not in tensors or tensors[name].file.name != shard
    ]
    if wrong:
        raise CheckpointError(
            f"Checkpoint '{path}': {INDEX} places {len(wrong)} tensors in shards that do not hold "
            f"them: {few(wrong)}. Index and shards are of different downloads; download them "
            "again together."
        )


def _read_header(file: Path) -> dict[str, TensorHeader]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == _POINTER[:8] and prefix + stream.read(len(_POINTER) - 8) == _POINTER:
            raise _pointer(file)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT
        if length > min(size - 8, _HEADER_LIMIT):
            raise _damaged(file, f"its header does not fit into its {size} bytes")
        text = stream.read(length)
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        entries.pop("__metadata__", None)
        headers = {name: _entry(file, entry, 8 + length) for name, entry in entries.items()}
        _check_extent(
            file, [entry["data_offsets"] for entry in entries.values()], size - 8 - length
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(file, f"its header cannot be read ({error})") from error
    return headers


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in it")
    return found


def _entry(file: Path, entry: Mapping[str, Any], start: int) -> TensorHeader:
    shape = tuple(int(extent) for extent in entry["shape"])
    begin, end = entry["data_offsets"]
    dtype = str(entry["dtype"])
    bits = _BITS.get(dtype)
    if bits is not None:
        count = 1
        for extent in shape:
            count *= extent
        if count * bits != (end - begin) * 8:
            raise ValueError(
                f"a tensor of shape {shape} and {dtype} cannot take {end - begin} bytes"
            )
    return TensorHeader(
        file=file, dtype=dtype, shape=shape, begin=start + begin, nbytes=end - begin
    )


def _check_extent(file: Path, offsets: list[list[int]], available: int) -> None:
    position = 0
    for begin, end in sorted(offsets):
        if begin != position or end < begin:
            raise ValueError("its tensors overlap or leave gaps")
        position = end
    if position > available:
        raise _damaged(
            file, f"its header describes {position} bytes of weights and {available} are there"
        )
    if position < available:
        raise _damaged(file, f"{available - position} bytes at its end belong to no tensor")


def _pointer(file: Path) -> CheckpointError:
    return CheckpointError(
        f"Checkpoint file '{file}' is a git-LFS pointer: it says where the content is and has "
        f"none. Run `git lfs install` and `git lfs pull` in '{file.parent}', or download the "
        "checkpoint with huggingface_hub's snapshot_download."
    )


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"Checkpoint file '{file}' is truncated or damaged: {what}. Delete it and download it "
        "again, or save the checkpoint again."
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        content = file.read_bytes()
        if content.startswith(_POINTER):
            raise _pointer(file)
        loaded = json.loads(content.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"'{file}' is not valid JSON ({error}). Download it again."
        ) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"'{file}' must hold a JSON object. Download it again.")
    return loaded


def few(names: list[str], *, most: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
