from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checkpoint import (
    TINY,
    bnb_config,
    edit_json,
    request,
    rewrite,
    strategy,
    write_checkpoint,
    write_raw,
)

from poros_core.errors import CheckpointError, SettingsError
from poros_loaders import poros_loaders
from poros_loaders.checkpoint import read_checkpoint

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "sharded", shards=3)
    assert len(list(path.glob("*.safetensors"))) >= 3
    return path


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    return {
        str(file): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in path.parent.rglob("*")
        if file.is_file()
    }


def message(path: Path, **changes: Any) -> str:
    """Every strategy refuses with the same words, in one paragraph; nothing is written."""
    before = snapshot(path)
    texts = set()
    for loader in poros_loaders():
        with pytest.raises(CheckpointError) as caught:
            loader.load(request(path, **changes))
        texts.add(str(caught.value))
    (text,) = texts
    assert "\n" not in text
    assert snapshot(path) == before
    return text


def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", read)


def first_shard(path: Path) -> Path:
    return min(path.glob("model-*.safetensors"))


def test_no_folder(tmp_path: Path) -> None:
    assert "no checkpoint folder" in message(tmp_path / "nowhere")


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    assert "config.json" in message(single)
    (single / "adapter_config.json").write_text("{}")
    assert "PeftModel.from_pretrained" in message(single)


def test_config_is_no_json(single: Path) -> None:
    (single / "config.json").write_text("{")
    assert "not valid JSON" in message(single)
    (single / "config.json").write_text("[]")
    assert "JSON object" in message(single)


def test_base_and_adapter_in_one_folder(single: Path) -> None:
    (single / "adapter_config.json").write_text("{}")
    assert "a folder of their own" in message(single)


def test_no_weights(single: Path) -> None:
    (single / WEIGHTS).unlink()
    assert "has no weights" in message(single)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_only(single: Path, name: str) -> None:
    (single / WEIGHTS).rename(single / name)
    text = message(single)
    assert name in text
    assert "save_pretrained" in text


def test_the_conversion_that_is_named_works(single: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(single / WEIGHTS), single / "pytorch_model.bin")
    (single / WEIGHTS).unlink()
    code = message(single).split('python -c "')[1].split('"')[0]
    exec(code.replace("'converted'", repr(str(tmp_path / "converted"))), {})
    strategy("nf4", "streamed").load(request(tmp_path / "converted"))


def test_missing_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_weight_is_read(monkeypatch)
    name = first_shard(sharded).name
    first_shard(sharded).unlink()
    text = message(sharded)
    assert name in text
    assert "Download the missing files" in text


@pytest.mark.parametrize(
    "leave", [lambda p: f"../{p.name}", lambda p: str(p), lambda p: f"..\\{p.name}", lambda p: 3]
)
def test_shard_that_leaves_its_folder(
    sharded: Path, leave: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weight_is_read(monkeypatch)
    shard = first_shard(sharded)
    outside = shard.rename(sharded.parent / shard.name)

    def point_outside(index: dict[str, Any]) -> None:
        for key, name in index["weight_map"].items():
            if name == shard.name:
                index["weight_map"][key] = leave(outside)

    edit_json(sharded / INDEX, point_outside)
    assert "not a plain file name" in message(sharded)


def test_symlinked_shards_are_read_as_in_a_hub_cache(sharded: Path) -> None:
    blobs = sharded.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    strategy("nf4", "streamed").load(request(sharded))


def test_dangling_symlink_is_a_missing_shard(sharded: Path) -> None:
    shard = first_shard(sharded)
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    assert shard.name in message(sharded)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -5000])
def test_truncated_shard(sharded: Path, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    no_weight_is_read(monkeypatch)
    shard = first_shard(sharded)
    os.truncate(shard, keep if keep >= 0 else shard.stat().st_size + keep)
    text = message(sharded)
    assert shard.name in text
    assert "truncated" in text


def entry(begin: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> Any:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape,
            "data_offsets": [begin, end]}  # fmt: skip


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (b"{", b"", "cannot be read"),
        (b"[]", b"", "cannot be read"),
        (b"\xff\xfe", b"", "cannot be read"),
        (b'{"a": 3}', b"", "cannot be read"),
        (json.dumps({"a": entry(0, 4), "b": entry(2, 6)}).encode(), b"123456", "overlap"),
        (json.dumps({"a": entry(0, 2), "b": entry(4, 6)}).encode(), b"123456", "gaps"),
        (json.dumps({"a": entry(0, 4)}).encode(), b"123456", "belong to no tensor"),
        (json.dumps({"a": entry(0, 4, dtype="F32", shape=[2])}).encode(), b"1234", "shape"),
        (b'{"a": 1, "a": 2}', b"", "occurs twice"),
    ],
)
def test_unreadable_header(single: Path, header: bytes, data: bytes, reason: str) -> None:
    write_raw(single / WEIGHTS, header, data)
    text = message(single)
    assert reason in text
    assert WEIGHTS in text


def test_one_tensor_in_two_shards(sharded: Path) -> None:
    from safetensors.torch import load_file, save_file

    one, other = sorted(sharded.glob("model-*.safetensors"))[:2]
    extra = dict(list(load_file(one).items())[:1])
    save_file({**load_file(other), **extra}, other, metadata={"format": "pt"})
    text = message(sharded)
    assert next(iter(extra)) in text
    assert "two shards" in text


def test_index_and_shards_of_different_downloads(sharded: Path) -> None:
    names = sorted(file.name for file in sharded.glob("model-*.safetensors"))

    def rotate(index: dict[str, Any]) -> None:
        index["weight_map"] = {
            key: names[names.index(name) - 1] for key, name in index["weight_map"].items()
        }

    edit_json(sharded / INDEX, rotate)
    assert "different downloads" in message(sharded)
    edit_json(sharded / INDEX, lambda index: index.pop("weight_map"))
    assert "weight_map" in message(sharded)


def test_weights_under_another_name(single: Path) -> None:
    edit_json(single / "config.json", lambda c: c.update(transformers_weights="../x.safetensors"))
    assert "transformers_weights" in message(single)


def test_distributed_checkpoint(single: Path) -> None:
    (single / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    assert "distributed checkpoint" in message(single)


@pytest.mark.parametrize("name", [Q, NORM, "lm_head.weight"])
def test_missing_key(single: Path, name: str) -> None:
    rewrite(single, lambda tensors: tensors.pop(name))
    text = message(single)
    assert "1 tensors are missing" in text
    assert name in text


def test_many_missing_keys_are_counted(single: Path) -> None:
    rewrite(single, lambda tensors: [tensors.pop(n) for n in list(tensors) if "mlp" in n])
    text = message(single)
    assert "12 tensors are missing" in text
    assert "7 more" in text


def test_unexpected_key(single: Path) -> None:
    rewrite(single, lambda tensors: tensors.update({"model.odd": torch.zeros(3)}))
    text = message(single)
    assert "unknown to the model (model.odd)" in text


def test_keys_that_transformers_ignores_are_no_error(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(single, lambda tensors: tensors.update({name: torch.zeros(8)}))
    for loader in poros_loaders():
        loader.load(request(single))


@pytest.mark.parametrize(("name", "shape"), [(NORM, (128,)), (Q, (64, 128)), (Q, (128, 32))])
@pytest.mark.parametrize("precision", ["nf4", "bf16"])
def test_mismatched_shape(single: Path, name: str, shape: tuple[int, ...], precision: str) -> None:
    rewrite(single, lambda tensors: tensors.update({name: torch.ones(shape).bfloat16()}))
    for way in ("streamed", "standard"):
        with pytest.raises(CheckpointError, match="shape") as caught:
            strategy(precision, way).load(request(single))
        assert name in str(caught.value)
        assert str(shape) in str(caught.value)


@pytest.mark.parametrize("way", ["streamed", "standard"])
def test_rows_that_a_cpu_does_not_dequantise(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "odd", {**TINY, "intermediate_size": 96})
    strategy("bf16", way).load(request(path))
    no_weight_is_read(monkeypatch)
    with pytest.raises(CheckpointError, match=r"4 weights.*down_proj \(96\)"):
        strategy("nf4", way).load(request(path))


@pytest.mark.parametrize("way", ["streamed", "standard"])
def test_a_model_of_which_nothing_is_quantised_is_refused(single: Path, way: str) -> None:
    config = bnb_config(double=False, storage=torch.uint8, compute=torch.bfloat16)
    config.llm_int8_skip_modules = ["model", "lm_head"]
    with pytest.raises(CheckpointError, match="no weight was quantised"):
        strategy("nf4", way).load(request(single, quantization_config=config))


def test_quantised_another_way(single: Path) -> None:
    edit_json(
        single / "config.json",
        lambda c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}),
    )
    for way in ("streamed", "standard"):
        with pytest.raises(CheckpointError, match="gptq"):
            strategy("nf4", way).load(request(single))
        with pytest.raises(CheckpointError, match="precision='nf4'"):
            strategy("bf16", way).load(request(single))


def test_bf16_of_a_quantised_checkpoint(single: Path, tmp_path: Path) -> None:
    model: Any = strategy("nf4", "streamed").load(request(single))
    model.save_pretrained(tmp_path / "nf4")
    for way in ("streamed", "standard"):
        with pytest.raises(CheckpointError, match="quantised already"):
            strategy("bf16", way).load(request(tmp_path / "nf4"))


def test_bf16_with_a_quantisation_config(single: Path) -> None:
    config = bnb_config(double=False, storage=torch.uint8, compute=torch.bfloat16)
    with pytest.raises(SettingsError, match="quantization_config"):
        strategy("bf16", "streamed").load(request(single, quantization_config=config))


def test_headers_are_read_without_weights(sharded: Path) -> None:
    checkpoint = read_checkpoint(sharded)
    assert checkpoint.config["model_type"] == "qwen2"
    assert checkpoint.tensors[Q].shape == (64, 64)
    assert checkpoint.tensors[Q].dtype == "BF16"
    assert checkpoint.tensors[Q].nbytes == 64 * 64 * 2
    assert set(checkpoint.files) == set(sharded.glob("model-*.safetensors"))
    assert checkpoint.quantization is None
