"""The packed cache: what it gives back, what it refuses, and what failures leave."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checkpoint import TINY, bnb_config, edit_json, request, strategy, write_checkpoint
from safetensors.torch import load_file
from transformers import GenerationConfig
from typer.testing import CliRunner

import poros
from poros_core import packed_file
from poros_core.conformance.manifest import tensor_manifest
from poros_core.errors import SettingsError
from poros_core.packed_cache import LIMIT_VARIABLE, PackedCache, cache_from, default_folder

slow = pytest.mark.slow
U8, BF16, F16, F32 = torch.uint8, torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cached"), {**TINY, "num_hidden_layers": 2})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="poros")
    return caplog


def happened(events: pytest.LogCaptureFixture) -> list[str]:
    names = [record.getMessage().partition("'")[2].partition("'")[0] for record in events.records]
    events.clear()
    return [name for name in names if name.startswith("cache_")]


def load(path: Path, folder: Path | bool, **options: Any) -> dict[str, str]:
    model = poros.load(path, cache=folder, device="cpu", **options)
    return {**tensor_manifest(model), "config": json.dumps(model.config.to_dict(), default=str)}


def entry_folder(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if not path.name.startswith("building-")]
    return found


NF4 = [(False, BF16, F32), (True, F16, BF16)]
SETTINGS: list[dict[str, Any]] = [
    *({"quantization_config": bnb_config(double=d, storage=s, compute=c)} for d, s, c in NF4),
    {"dtype": F32},
    {"precision": "bf16", "dtype": F32},
    {"precision": "bf16", "load_strategy": "standard"},
]


@pytest.mark.parametrize("options", SETTINGS)
def test_the_second_load_reads_and_gives_the_same_bytes(
    checkpoint: Path, folder: Path, options: dict[str, Any], events: pytest.LogCaptureFixture
) -> None:
    without = load(checkpoint, False, **options)
    assert happened(events) == []
    assert load(checkpoint, folder, **options) == without
    assert happened(events) == ["cache_written"]
    assert load(checkpoint, folder, **options) == without
    assert happened(events) == ["cache_read"]


@slow
def test_a_prequantised_checkpoint_is_kept_too(
    checkpoint: Path, folder: Path, tmp_path: Path, events: pytest.LogCaptureFixture
) -> None:
    config = bnb_config(double=True, storage=U8, compute=BF16)
    first: Any = strategy("nf4", "streamed").load(request(checkpoint, quantization_config=config))
    first.save_pretrained(tmp_path / "nf4")
    without = load(tmp_path / "nf4", False)
    assert load(tmp_path / "nf4", folder) == without
    assert load(tmp_path / "nf4", folder) == without
    assert happened(events) == ["cache_written", "cache_read"]


def test_a_model_from_the_cache_is_an_ordinary_one(checkpoint: Path, folder: Path) -> None:
    first: Any = poros.load(checkpoint, cache=folder, device="cpu")
    again: Any = poros.load(checkpoint, cache=folder, device="cpu")
    assert vars(again).keys() == vars(first).keys()
    assert type(again.hf_quantizer) is type(first.hf_quantizer)
    assert vars(again.hf_quantizer).keys() == vars(first.hf_quantizer).keys()
    assert again.generation_config.to_dict() == first.generation_config.to_dict()
    for name, param in first.named_parameters():
        other = again.get_parameter(name)
        assert type(other) is type(param)
        assert vars(other).keys() == vars(param).keys()
        state, new = getattr(param, "quant_state", None), getattr(other, "quant_state", None)
        if state is not None:
            assert (new.shape, new.dtype, new.blocksize) == (
                state.shape,
                state.dtype,
                state.blocksize,
            )
    layer = again.model.layers[1].mlp.up_proj
    assert layer.quant_state is layer.weight.quant_state
    assert layer.weight.module is layer
    ids = torch.arange(24).view(1, 24)
    assert torch.equal(again.train()(ids).logits, first.train()(ids).logits)


def resident(file: Path) -> int:
    """Bytes of a mapped file that this process has touched."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found, inside = 0, False
    for line in lines:
        if "-" in line.partition(" ")[0]:  # the first line of a mapping
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.parametrize("dtype", [None, F32])
def test_no_weight_is_read_for_a_skeleton(tmp_path: Path, dtype: torch.dtype | None) -> None:
    path = write_checkpoint(tmp_path / "wide", {**TINY, "intermediate_size": 16384})
    loader: Any = strategy("bf16", "streamed")
    asks = request(path, dtype=dtype)
    described = loader.describe(loader.load(asks))
    file = path / "model.safetensors"
    assert resident(file) == 0
    skeleton = loader.skeleton(asks, described)
    assert skeleton.dtype != dtype
    assert resident(file) < file.stat().st_size / 4, "more than the header was read"
    sum(p.sum() for p in skeleton.parameters())
    assert resident(file) > file.stat().st_size / 2, "the skeleton's weights are not the file's"


def test_units_are_safetensors_files(checkpoint: Path, folder: Path) -> None:
    model = poros.load(checkpoint, cache=folder, device="cpu", precision="bf16")
    files = sorted(entry_folder(folder).glob("*.safetensors"))
    assert len(files) == 2 + 2 + 1
    content = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, param in model.named_parameters():
        assert torch.equal(content[f"{name}:data"], param)


def truncate(entry: Path) -> None:
    file = entry / "unit-0001.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def flip(name: str, at: int) -> Any:
    def damage(entry: Path) -> None:
        content = bytearray((entry / name).read_bytes())
        content[at] ^= 1
        (entry / name).write_bytes(content)

    return damage


DAMAGE = {
    "truncated": truncate,
    "flipped": flip("unit-0000.safetensors", -5000),
    "flipped header": flip("unit-0002.safetensors", 20),
    "flipped rest": flip("rest.safetensors", -300),
    "flipped record": flip("entry.json", 200),
    "missing": lambda entry: (entry / "unit-0001.safetensors").unlink(),
    "no json": lambda entry: (entry / "entry.json").write_text("{"),
}


@pytest.mark.parametrize(
    "how",
    [
        how if how in ("truncated", "flipped", "flipped record") else pytest.param(how, marks=slow)
        for how in DAMAGE
    ],
)
def test_a_damaged_base_is_made_anew(
    checkpoint: Path, folder: Path, how: str, events: pytest.LogCaptureFixture
) -> None:
    wanted = load(checkpoint, folder, precision="bf16")
    DAMAGE[how](entry_folder(folder))
    assert [info.problem is None for info in PackedCache(folder).verify()] == [False]
    events.clear()
    assert load(checkpoint, folder, precision="bf16") == wanted
    assert happened(events) == ["cache_damaged", "cache_written"]
    assert [info.problem for info in PackedCache(folder).verify()] == [None]
    assert load(checkpoint, folder, precision="bf16") == wanted
    assert happened(events) == ["cache_read"]


def test_what_decides_the_bytes_is_in_the_key(
    tmp_path: Path, folder: Path, events: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path / "model", {**TINY, "num_hidden_layers": 1})
    loader: Any = strategy("nf4", "streamed")

    def key(**changes: Any) -> str:
        return json.dumps(loader.cache_key(request(path, **changes)), sort_keys=True)

    double = bnb_config(double=True, storage=U8, compute=BF16)
    plain = bnb_config(double=False, storage=U8, compute=BF16)
    keys = [
        key(),
        key(quantization_config=double),
        key(quantization_config=plain, dtype=F32),
        key(from_pretrained={"num_hidden_layers": 2}),
    ]
    assert key() == keys[0]
    stat = (path / "model.safetensors").stat()
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1  # the sampled fingerprint reads small files nearly whole
    (path / "model.safetensors").write_bytes(content)
    os.utime(path / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    keys.append(key())
    os.utime(path / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    keys.append(key())
    edit_json(path / "config.json", lambda config: config.update(rms_norm_eps=1e-5))
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_keyed_is_loaded_and_not_kept(
    checkpoint: Path, folder: Path, events: pytest.LogCaptureFixture
) -> None:
    load(checkpoint, folder, precision="bf16", generation_config=GenerationConfig())
    assert happened(events) == ["cache_unavailable"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("writes", [pytest.param(0, marks=slow), 7])
def test_a_full_disk_leaves_nothing_and_the_load_stands(
    checkpoint: Path,
    folder: Path,
    writes: int,
    events: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = [writes]
    original = packed_file._write_all

    def write(file: Any, data: memoryview) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        original(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(packed_file, "_write_all", write)
        got = load(checkpoint, folder, precision="bf16")
    assert "No space left on device" in events.text
    assert happened(events) == ["cache_not_written"]
    assert list(folder.iterdir()) == []
    assert got == load(checkpoint, False, precision="bf16")


def test_a_base_that_is_too_large_is_not_begun(
    checkpoint: Path,
    folder: Path,
    events: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.00001GB")
    load(checkpoint, folder, precision="bf16")
    assert LIMIT_VARIABLE in events.text
    assert happened(events) == ["cache_not_written"]
    assert list(folder.iterdir()) == []


def fill(cache: PackedCache, number: int, size: int = 6000) -> str:
    """Write an entry of ``size`` bytes; return its name."""
    writer = cache.begin({"precision": "x", "number": number}, title=f"{number}", nbytes=size)
    record = writer.write("a", [], [memoryview(bytes(size))], unit="a", nbytes=size)
    return writer.finish([record], None, {}).name


def test_the_least_recently_used_goes_first(folder: Path) -> None:
    cache = PackedCache(folder, limit=25_000)
    names = [fill(cache, number) for number in range(2)]
    for age, name in enumerate(names):
        os.utime(folder / name / "entry.json", (age, age))
    entry = cache.find({"precision": "x", "number": 0})
    assert entry is not None
    names.append(fill(cache, 2))
    assert {info.name for info in cache.entries()} == {names[0], names[2]}
    os.utime(folder / names[0] / "entry.json", (0, 0))
    names.append(fill(cache, 3))
    assert names[0] in {info.name for info in cache.entries()}, "an entry in use was evicted"
    assert not cache.remove(names[0])
    entry.close()
    assert cache.remove(names[0])
    assert {path.name for path in folder.iterdir()} == {info.name for info in cache.entries()}


def test_what_a_killed_writer_left_is_removed(folder: Path) -> None:
    cache = PackedCache(folder)
    alive = cache.begin({"precision": "x"}, title="alive", nbytes=1)
    dead = cache.begin({"precision": "y"}, title="dead", nbytes=1)
    (dead.folder / "entry.json").write_text("{}")
    dead._release()
    assert cache.entries() == []
    fill(cache, 1)
    assert alive.folder.is_dir()
    assert not dead.folder.exists()
    alive.abandon()
    assert not alive.folder.exists()


def test_two_writers_of_one_base(folder: Path) -> None:
    cache = PackedCache(folder)
    key = {"precision": "x"}
    writers = [cache.begin(key, title="", nbytes=1) for _ in range(2)]
    for writer in writers:
        record = writer.write("a", [], [memoryview(b"abc")], unit="a", nbytes=3)
        writer.finish([record], None, {})
    assert len(list(folder.iterdir())) == 1
    entry = cache.find(key)
    assert entry is not None
    entry.read(entry.units[0], None)


def test_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POROS_CACHE", raising=False)
    assert cache_from(None) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "poros" / "packed"
    for setting, environment, wanted in [
        (None, "1", default_folder()),
        (None, "0", None),
        (None, str(tmp_path / "x"), tmp_path / "x"),
        (False, "1", None),
        (True, "", default_folder()),
        (tmp_path / "y", "0", tmp_path / "y"),
    ]:
        monkeypatch.setenv("POROS_CACHE", environment)
        cache = cache_from(setting)
        assert (None if cache is None else cache.folder) == wanted
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with pytest.raises(SettingsError, match="16GB"):
        cache_from(True)


def kill_a_first_load(path: Path, folder: Path, delay: float, *, while_writing: bool) -> bool:
    """Kill a first load at some moment; say whether it was still running."""
    child = os.fork()
    if child == 0:
        poros.load(path, cache=folder, device="cpu")
        os._exit(0)
    if while_writing:
        end = time.monotonic() + 30
        while time.monotonic() < end and not any(folder.glob("*")):
            time.sleep(0.0005)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(
    "kills", [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_a_killed_first_load_is_never_used(checkpoint: Path, tmp_path: Path, kills: int) -> None:
    load(checkpoint, False)
    begin = time.monotonic()
    wanted = load(checkpoint, False)
    whole = time.monotonic() - begin
    chance = random.Random(kills)
    killed = 0
    for number in range(kills):
        folder = tmp_path / f"cache{number}"
        writing = number % 2 == 0
        delay = chance.uniform(0, 0.02 if writing else whole)
        killed += kill_a_first_load(checkpoint, folder, delay, while_writing=writing)
        assert load(checkpoint, folder) == wanted
        assert [info.problem for info in PackedCache(folder).verify()] == [None]
        assert load(checkpoint, folder) == wanted
        assert len(list(folder.iterdir())) == 1
    assert killed > kills // 4, "hardly a load was still running when it was to be killed"


class TestCommandLine:
    def run(self, *arguments: str) -> Any:
        from poros.cli import app

        return CliRunner().invoke(app, ["cache", *arguments])

    def test_list_verify_clear(self, folder: Path) -> None:
        cache = PackedCache(folder)
        names = [fill(cache, number) for number in range(3)]
        listed = self.run("list", "--folder", str(folder), "--json")
        assert {info["name"] for info in json.loads(listed.stdout)} == set(names)
        assert names[0] in self.run("list", "--folder", str(folder)).stdout
        assert self.run("verify", "--folder", str(folder)).exit_code == 0
        flip("a", -1)(folder / names[1])
        damaged = self.run("verify", "--folder", str(folder))
        assert damaged.exit_code == 1
        assert "other bytes" in damaged.stdout
        problems = json.loads(self.run("verify", "--folder", str(folder), "--json").stdout)
        assert [info["name"] for info in problems if info["problem"]] == [names[1]]
        assert self.run("clear", names[1], "--folder", str(folder)).exit_code == 0
        assert {info.name for info in cache.entries()} == {names[0], names[2]}
        entry = cache.find({"precision": "x", "number": 0})
        assert entry is not None
        left = self.run("clear", "--all", "--folder", str(folder))
        assert left.exit_code == 1
        assert f"{names[0]}: left" in left.stdout
        entry.close()
        assert self.run("clear", "--all", "--folder", str(folder)).exit_code == 0
        assert "0 bases" in self.run("list", "--folder", str(folder)).stdout

    def test_bad_input(self, folder: Path) -> None:
        for arguments in (["clear"], ["clear", "nothing"]):
            result = self.run(*arguments, "--folder", str(folder))
            assert isinstance(result.exception, SettingsError)

    def test_no_torch_is_needed(self, folder: Path) -> None:
        code = (
            "import sys; from poros.cli import main\n"
            f"sys.argv = ['poros', 'cache', 'list', '--folder', {str(folder)!r}]\n"
            "try: main()\n"
            "finally: print('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "False", done.stderr
