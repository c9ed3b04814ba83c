"""What is asked of ``poros.load`` and its neighbours is understood, or refused with the fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checkpoint import CPU, bnb_config, edit_json, request, write_checkpoint
from torch import nn
from typer.testing import CliRunner

import poros
from poros.cli import app
from poros_core.load import local_folder
from poros_core.packed_cache import FOLDER_VARIABLE, LIMIT_VARIABLE, cache_from, default_folder
from poros_core.prepare import named_device
from poros_loaders.checkpoint import read_checkpoint
from poros_loaders.pretrained import check_arguments

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    f"oid sha256:{'4d7a' * 16}\n"
    "size 3945441440\n"
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when anything is looked for in a folder or on the hub."""

    def never(*_: object, **__: object) -> Path:
        raise AssertionError("something was read")

    monkeypatch.setattr("poros_core.load.local_folder", never)


def norm_dtype(model: Any) -> torch.dtype:
    found: torch.dtype = model.model.norm.weight.dtype
    return found


@pytest.mark.parametrize("precision", ["nf4", "bf16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "half"])
def test_a_dtype_is_known_by_its_name(checkpoint: Path, precision: str, dtype: str) -> None:
    model = poros.load(checkpoint, precision=precision, dtype=dtype, device="cpu")
    assert norm_dtype(model) == getattr(torch, dtype)


@pytest.mark.parametrize(("precision", "wanted"), [("nf4", "float32"), ("bf16", "bfloat16")])
def test_auto_is_what_none_is(tmp_path: Path, precision: str, wanted: str) -> None:
    path = write_checkpoint(tmp_path, dtype=torch.float32)
    for dtype in ("auto", None):
        model = poros.load(path, precision=precision, dtype=dtype, device="cpu")
        assert norm_dtype(model) == getattr(torch, wanted)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    "dtype", ["bf16", "", "int8", "nn", "float8_e4m3fn", torch.int8, 5, {"": "float32"}]
)
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(poros.SettingsError, match=r"'bfloat16', 'float16', 'float32'.*'auto'"):
        poros.load("a/b", dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("load_in_4bit", 'precision="nf4"'),
        ("load_in_8bit", "precision= of poros.load, of which these are installed: bf16, nf4"),
        ("bnb_4bit_quant_type", "quantization_config=BitsAndBytesConfig"),
        ("device_map", "device="),
        ("max_memory", "leave it out"),
        ("precison", "Did you mean 'precision'"),
        ("atn_implementation", "Did you mean 'attn_implementation'"),
        ("rope_parameter", "Did you mean 'rope_parameters'"),
        ("xyzzy", "Leave it out"),
    ],
)
@pytest.mark.parametrize("precision", ["nf4", "bf16"])
def test_an_argument_that_nobody_takes(
    checkpoint: Path, precision: str, name: str, fix: str
) -> None:
    options: dict[str, Any] = {name: True}
    with pytest.raises(poros.SettingsError) as caught:
        poros.load(checkpoint, precision=precision, device="cpu", **options)
    assert f"'{name}'" in str(caught.value)
    assert fix in str(caught.value)


def test_arguments_of_transformers_and_entries_of_the_config_pass(checkpoint: Path) -> None:
    model = poros.load(
        checkpoint, device="cpu", attn_implementation="eager", use_cache=False, weights_only=True
    )
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False


def test_a_checkpoints_own_code_may_take_more(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    asked = request(tmp_path, trust_remote_code=True, from_pretrained={"special": 1})
    with pytest.raises(poros.SettingsError, match="'special' is no argument"):
        check_arguments(asked)
    edit_json(tmp_path / "config.json", lambda config: config.update(auto_map={}))
    check_arguments(asked)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("device", ["nope", "", "mps", "meta", -1, 3.5, True, torch.device("meta")])
def test_a_device_that_is_none(device: Any) -> None:
    with pytest.raises(poros.SettingsError, match="device must be 'cpu', 'cuda'"):
        poros.load("a/b", device=device)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_cuda_where_there_is_none(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(poros.SettingsError, match="device='cpu'"):
        poros.load("a/b", device=device)
    for build, why in ((None, "built without CUDA"), ("13.0", "sees no CUDA device")):
        monkeypatch.setattr(torch.version, "cuda", build)
        with pytest.raises(poros.SettingsError, match=why):
            named_device(device)


def test_a_cuda_device_has_a_number_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert named_device("cuda") == torch.device("cuda", 1)
    assert named_device("cuda:0") == named_device(0) == torch.device("cuda", 0)
    assert named_device("cpu") == CPU
    with pytest.raises(poros.SettingsError, match="numbered 0 to 1"):
        named_device("cuda:2")


@pytest.mark.parametrize("device", ["nope", "cuda"])
def test_prepare_refuses_such_a_device(
    checkpoint: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = poros.load(checkpoint, device="cpu")
    model.add_module("adapter", nn.Linear(2, 2))
    with pytest.raises(poros.SettingsError, match="device"):
        poros.prepare(model, device=device)


@pytest.mark.parametrize("model", [None, 5, b"a/b", nn.Linear(1, 1)])
def test_a_model_must_be_named(model: Any) -> None:
    for find in (local_folder, poros.load):
        with pytest.raises(poros.SettingsError, match="'Qwen/Qwen2.5-7B'; got"):
            find(model)


@pytest.mark.parametrize("model", ["", "  "])
def test_an_empty_name(model: str) -> None:
    for find in (local_folder, poros.load):
        with pytest.raises(poros.CheckpointError, match="is empty"):
            find(model)


@pytest.mark.usefixtures("unread")
def test_an_observer_must_be_one() -> None:
    class Half:
        def stage(self, title: str, total: int) -> None: ...

    for observer, lacks in ((object(), "stage, advance, done"), (Half(), "advance, done")):
        odd: Any = observer
        with pytest.raises(poros.SettingsError, match=f"lacks {lacks}.*verbose=True"):
            poros.load("a/b", device="cpu", observer=odd)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("cache", [5, 1.5, b"x", ["x"], "", " "])
def test_a_cache_is_a_switch_or_a_path(cache: Any) -> None:
    with pytest.raises(poros.SettingsError, match="cache must be True, False, None or the path"):
        poros.load("a/b", device="cpu", cache=cache)


@pytest.mark.usefixtures("unread")
def test_a_cache_must_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(poros.SettingsError, match=r"file' is a file"):
        poros.load("a/b", device="cpu", cache=file)
    for cache in (file / "below", str(file / "below"), "a\0b"):
        with pytest.raises(poros.SettingsError, match="there can be no folder"):
            poros.load("a/b", device="cpu", cache=cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(poros.SettingsError, match="there can be no folder"):
        poros.load("a/b", device="cpu", cache=True)
    monkeypatch.setenv(FOLDER_VARIABLE, str(file))
    for setting in (None, False):
        with pytest.raises(AssertionError, match="something was read"):
            poros.load("a/b", device="cpu", cache=setting)


def test_accumulate_takes_a_function(checkpoint: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base: Any = poros.load(checkpoint, device="cpu")
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)
    model: Any = poros.prepare(get_peft_model(base, config), verbose=False)
    odd: Any = 5
    with pytest.raises(poros.SettingsError, match=r"loss must be a function.*got 5"):
        poros.accumulate(model, [{}], loss=odd)


@pytest.mark.parametrize("model", ["x", None, 5])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(poros.SettingsError, match=r"chunked_loss\(\) takes a model, not"):
        poros.chunked_loss(model)
    with pytest.raises(poros.PrepareError, match="not prepared"):
        poros.accumulate(model, [{}])


def test_switches_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for text in ("0", "false", "False", "no", "OFF", " off ", ""):
        monkeypatch.setenv(FOLDER_VARIABLE, text)
        assert cache_from(None) is None, text
    for text in ("1", "true", "True", "YES", "on"):
        monkeypatch.setenv(FOLDER_VARIABLE, text)
        cache = cache_from(None)
        assert cache is not None
        assert cache.folder == default_folder(), text


def test_the_limit_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in [
        ("1000", 1000),
        ("1KB", 10**3),
        ("1MB", 10**6),
        ("200GB", 200 * 10**9),
        ("1.5 gib", 3 << 29),
        ("", 200 * 10**9),
    ]:
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        cache = cache_from(True)
        assert cache is not None
        assert cache.limit == wanted, text
    for text in ("0", "0GB", "-5", "-1GB", "0.1", "much", "5 apples"):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        with pytest.raises(poros.SettingsError, match=LIMIT_VARIABLE):
            cache_from(True)


def refusal(path: Path) -> str:
    with pytest.raises(poros.CheckpointError) as caught:
        poros.load(path, device="cpu")
    return str(caught.value)


@pytest.mark.parametrize("content", ["{}", '{"model_type": 5}', "[]", "{", None])
def test_load_and_check_say_the_same_of_a_config(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code != 0
    text = refusal(tmp_path)
    assert "config.json" in text
    assert text in (str(result.exception), " ".join(result.output.split()), result.output)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "model.safetensors").write_text(POINTER),
        lambda path: (
            (path / "model.safetensors").unlink(),
            (path / "model.safetensors.index.json").write_text(POINTER),
        ),
    ],
    ids=["weights", "index"],
)
def test_a_pointer_of_git_lfs(tmp_path: Path, change: Callable[[Path], object]) -> None:
    path = write_checkpoint(tmp_path / "model")
    change(path)
    assert "git lfs pull" in refusal(path)
    assert str(path) in refusal(path)


@pytest.mark.parametrize("base", ["Qwen/Qwen2.5-7B", None])
def test_an_adapter_is_no_model(tmp_path: Path, base: str | None) -> None:
    content = {"peft_type": "LORA", "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(poros.CheckpointError) as caught:
        read_checkpoint(tmp_path)
    for text in (refusal(tmp_path), str(caught.value)):
        assert "holds a PEFT adapter" in text
        assert base is None or f"'{base}'" in text


def test_the_config_of_bitsandbytes_stays_an_argument(checkpoint: Path) -> None:
    config = bnb_config(double=True, storage=torch.uint8, compute=torch.float32)
    model: Any = poros.load(checkpoint, quantization_config=config, device="cpu")
    assert model.config.quantization_config.bnb_4bit_use_double_quant
