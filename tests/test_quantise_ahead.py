"""Weights are quantised before Transformers asks for them, and the result tells nothing of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from helpers_checkpoint import CPU, TINY, bnb_config, write_checkpoint

import poros
from poros_core.berths import Berths
from poros_core.conformance.manifest import tensor_manifest
from poros_core.errors import CheckpointError
from poros_core.finite import bounds_of
from poros_loaders import weight_reader
from poros_loaders.checkpoint import read_checkpoint
from poros_loaders.code_table import one_table
from poros_loaders.quantise_ahead import Ahead, QuantiseAhead
from poros_loaders.stage import Stage
from poros_loaders.weight_reader import Extent, WeightReader

MATRICES = 7 * TINY["num_hidden_layers"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of every weight that is quantised whether it was quantised ahead."""
    found: list[bool] = []
    finished = Stage.finished

    def noted(self: Stage, *args: Any) -> Any:
        done = finished(self, *args)
        found.append(done is not None)
        return done

    monkeypatch.setattr(Stage, "finished", noted)
    return found


def manifest(path: Path, **arguments: Any) -> Any:
    return tensor_manifest(poros.load(path, device="cpu", **arguments))


def no_thread_is_left() -> bool:
    return not any(thread.name == "poros-quantise" for thread in threading.enumerate())


@pytest.mark.parametrize("double", [False, True])
def test_every_weight_is_quantised_ahead(checkpoint: Path, taken: list[bool], double: bool) -> None:
    config = bnb_config(double=double, storage=torch.bfloat16, compute=torch.float32)
    streamed = manifest(checkpoint, quantization_config=config)
    assert taken == [True] * MATRICES
    assert no_thread_is_left()
    standard = manifest(checkpoint, quantization_config=config, load_strategy="standard")
    assert streamed == standard


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_wrong_guess_is_dropped(
    checkpoint: Path, taken: list[bool], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    right = manifest(checkpoint)
    taken.clear()
    fits = QuantiseAhead.fits

    def wrong(self: QuantiseAhead, *args: Any) -> bool:
        assert fits(self, *args)
        if when == "late":
            with self._changed:
                assert self._changed.wait_for(lambda: len(self._done) == MATRICES, 30)
        return False

    monkeypatch.setattr(QuantiseAhead, "fits", wrong)
    full: list[bool] = []
    take = Berths.take
    monkeypatch.setattr(
        Berths, "take", lambda self, unit: (full.append((x := take(self, unit)) is None), x)[1]
    )
    assert manifest(checkpoint) == right
    assert taken == [False] * MATRICES
    assert not any(full), "what was dropped takes no room"
    assert no_thread_is_left()


def test_another_dtype_than_the_checkpoint_s_is_not_guessed(
    checkpoint: Path, taken: list[bool]
) -> None:
    found = {header.dtype for header in read_checkpoint(checkpoint).tensors.values()}
    other = torch.float16 if found == {"F32"} else torch.float32
    streamed = manifest(checkpoint, dtype=other)
    assert taken == [False] * MATRICES
    assert streamed == manifest(checkpoint, dtype=other, load_strategy="standard")


def test_what_the_thread_fails_with_ends_the_load(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = weight_reader.read_piece

    def damaged(handle: int, extent: Extent, at: int, into: memoryview) -> None:
        if extent.name.endswith("layers.1.mlp.up_proj.weight"):
            raise CheckpointError("damaged")
        read(handle, extent, at, into)

    monkeypatch.setattr(weight_reader, "read_piece", damaged)
    with pytest.raises(CheckpointError, match="damaged"):
        poros.load(checkpoint, device="cpu")
    assert no_thread_is_left()


@pytest.mark.parametrize("double", [False, True])
def test_the_default_dtype_of_torch_does_not_matter(tmp_path: Path, double: bool) -> None:
    weight = torch.randn(64, 128)
    file = tmp_path / "weights"
    file.write_bytes(weight.numpy().tobytes())
    extent = Extent(name="weight", file=file, begin=0, nbytes=weight.nbytes)
    bnb.functional.name2qmap.pop("dynamic", None)
    config = bnb_config(double=double, storage=torch.uint8, compute=torch.float32)
    changed = threading.Event()

    def look(tensor: torch.Tensor) -> Any:
        assert changed.wait(10)
        return bounds_of(tensor)

    with WeightReader(CPU) as reader, one_table():
        reader.begin([extent])
        ahead = QuantiseAhead(
            [Ahead(extent=extent, shape=(64, 128), unit="layer 0")],
            dtype=torch.float32,
            config=config,
            device=CPU,
            reader=reader,
            look=look,
            keep=lambda unit, data, state: data,
        )
        ahead.start()
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            changed.set()
            done = ahead.take("weight")
        finally:
            torch.set_default_dtype(default)
            ahead.stop()
    assert done is not None
    data, state = bnb.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=double, quant_type="nf4"
    )
    assert done.data.equal(data)
    assert done.state.as_dict().keys() == state.as_dict().keys()
    for name, value in state.as_dict().items():
        other = done.state.as_dict()[name]
        if isinstance(value, torch.Tensor):
            assert other.dtype == value.dtype
            assert other.equal(value), name
        else:
            assert other == value, name
