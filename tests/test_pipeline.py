"""The stages of a load that overlap: weights read ahead, memory made ahead, units placed."""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checkpoint import TINY, request, strategy, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import poros
from poros_core import berths as berths_module
from poros_core.berths import Berths
from poros_core.conformance.manifest import tensor_manifest
from poros_core.errors import CheckpointError, PrepareError
from poros_core.host_memory import HostBuffer
from poros_core.prepare import STORE
from poros_families.qwen2 import QWEN2
from poros_loaders import weight_reader
from poros_loaders.weight_reader import Extent, WeightReader

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pipeline") / "checkpoint", shards=3)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "weights"
    path.write_bytes(os.urandom(4000))
    return path


def extents(shard: Path, sizes: tuple[int, ...] = (700, 1, 64, 999, 300)) -> list[Extent]:
    begins = [10 + sum(sizes[:number]) for number in range(len(sizes))]
    return [
        Extent(name=str(number), file=shard, begin=begin, nbytes=size)
        for number, (begin, size) in enumerate(zip(begins, sizes, strict=True))
    ]


def bytes_of(extent: Extent) -> bytes:
    return extent.file.read_bytes()[extent.begin : extent.begin + extent.nbytes]


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests() -> None:
    """Models that other tests left to the garbage collector keep their threads until then."""
    _earlier.clear()
    _earlier.update(threading.enumerate())


def live_readers() -> list[threading.Thread]:
    alive = [t for t in threading.enumerate() if t.name.startswith("poros-")]
    return [thread for thread in alive if thread not in _earlier]


class TestWeightReader:
    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        asked=st.lists(st.integers(0, 5), max_size=8),
        buffers=st.integers(1, 3),
        threads=st.integers(1, 4),
    )
    def test_what_is_given_is_right_whatever_the_order(
        self, shard: Path, asked: list[int], buffers: int, threads: int
    ) -> None:
        wanted = extents(shard)
        with WeightReader(CPU, piece=128, buffers=buffers, threads=threads) as reader:
            reader.begin(wanted)
            last = -1
            for number in asked:
                size = wanted[number].nbytes if number < len(wanted) else 7
                target = torch.zeros(size, dtype=torch.uint8)
                given = reader.give(str(number), target)
                assert given == (last < number < len(wanted))
                if given:
                    assert target.numpy().tobytes() == bytes_of(wanted[number])
                    last = number
        assert not live_readers()

    def test_another_size_is_not_given(self, shard: Path) -> None:
        with WeightReader(CPU, piece=128) as reader:
            reader.begin(extents(shard))
            assert not reader.give("0", torch.zeros(701, dtype=torch.uint8))
            assert reader.give("0", torch.zeros(700, dtype=torch.uint8))
            assert reader.given == 1

    def test_nothing_wanted_starts_nothing(self) -> None:
        with WeightReader(CPU) as reader:
            reader.begin([])
            assert not reader.give("0", torch.zeros(1, dtype=torch.uint8))
            assert not live_readers()

    def test_a_shard_that_ends_early_is_named(self, shard: Path) -> None:
        wanted = [*extents(shard), Extent(name="late", file=shard, begin=3990, nbytes=20)]
        with WeightReader(CPU, piece=128) as reader:
            reader.begin(wanted)
            with pytest.raises(CheckpointError, match="ended while 'late' was read"):
                reader.give("late", torch.zeros(20, dtype=torch.uint8))
        assert not live_readers()

    def test_a_shard_that_is_gone(self, tmp_path: Path) -> None:
        gone = Extent(name="gone", file=tmp_path / "gone", begin=0, nbytes=5)
        with WeightReader(CPU) as reader:
            reader.begin([gone])
            with pytest.raises(FileNotFoundError):
                reader.give("gone", torch.zeros(5, dtype=torch.uint8))

    def test_a_buffer_is_not_filled_before_its_copy_is_done(
        self, shard: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited: list[int] = []

        class Event:
            def synchronize(self) -> None:
                waited.append(1)

        with WeightReader(CPU, piece=128, buffers=2, threads=1) as reader:
            reader.begin(extents(shard, (128, 128, 128)))
            put_back = reader._put_back

            def with_event(buffer: Any) -> None:
                buffer.event = Event()
                put_back(buffer)

            monkeypatch.setattr(reader, "_put_back", with_event)
            for name in "012":
                assert reader.give(name, torch.zeros(128, dtype=torch.uint8))
        assert waited == [1]

    def test_buffers_are_given_up_as_soon_as_nothing_is_left_to_read(self, shard: Path) -> None:
        with WeightReader(CPU, piece=128, buffers=3, threads=2) as reader:
            buffers = [weakref.ref(buffer) for buffer in reader._free]
            reader.begin(extents(shard))
            for extent in extents(shard):
                assert reader.give(extent.name, torch.zeros(extent.nbytes, dtype=torch.uint8))
            until = time.monotonic() + 10
            while any(buffer() is not None for buffer in buffers):
                assert time.monotonic() < until
                time.sleep(0.001)


class TestBerths:
    def model(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**TINY), dtype=torch.bfloat16
            )
        return model

    def test_what_finds_no_room_lands_elsewhere(self) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        with Berths(QWEN2, CPU, locked=False) as berths:
            berths.expect(self.model(), {name: 512})
            sizes = (200, 256, 10_000_000)
            tensors = [torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)]
            landed = [berths.land(name, tensor) for tensor in tensors]
            elsewhere = berths.land("unknown", tensors[0])
        assert all(torch.equal(*pair) for pair in zip(landed, tensors, strict=True))
        assert landed[1].data_ptr() - landed[0].data_ptr() == 256
        assert torch.equal(elsewhere, tensors[0])

    def test_a_unit_that_does_not_fit_is_laid_out_anew(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = tensor_manifest(poros.load(checkpoint, device="cpu"))
        expect = Berths.expect

        def half(self: Berths, model: nn.Module, sizes: Any, files: Any) -> None:
            expect(self, model, {name: size // 2 for name, size in sizes.items()}, files)

        monkeypatch.setattr(Berths, "expect", half)
        assert tensor_manifest(poros.load(checkpoint, device="cpu")) == right

    def test_memory_that_cannot_be_had_is_said(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[int] = []

        def full(nbytes: int, **kwargs: Any) -> HostBuffer:
            made.append(nbytes)
            if len(made) > 2:
                raise PrepareError("there is no more memory")
            return HostBuffer(nbytes, **kwargs)

        monkeypatch.setattr(berths_module, "HostBuffer", full)
        with pytest.raises(PrepareError, match="no more memory"):
            poros.load(checkpoint, device="cpu")
        assert not live_readers()


def test_every_weight_is_read_ahead_and_stands_in_its_berth(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    taken: list[bool] = []
    leave, take = WeightReader.__exit__, Berths.take
    monkeypatch.setattr(
        WeightReader, "__exit__", lambda self, *a: given.append(self.given) or leave(self, *a)
    )

    def noted(self: Berths, unit: Any) -> Any:
        found = take(self, unit)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Berths, "take", noted)
    model = poros.load(checkpoint, device="cpu")
    layers = TINY["num_hidden_layers"]
    assert given == [7 * layers]
    assert taken == [True] * (layers + 2)
    store = model.__dict__[STORE]
    for image in store.images():
        lying = sorted(image.entries, key=lambda entry: entry.offset)
        ends = [entry.offset + entry.nbytes for entry in lying]
        assert all(end <= entry.offset for end, entry in zip(ends, lying[1:], strict=False))
        assert ends[-1] <= image.nbytes == len(image.buffer.bytes)


def test_a_checkpoint_that_is_cast_is_not_read_ahead(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "half", dtype=torch.float16)
    asked = request(path, dtype=torch.bfloat16)
    streamed = tensor_manifest(strategy("nf4", "streamed").load(asked))
    assert streamed == tensor_manifest(strategy("nf4", "standard").load(asked))


def broken_read(*args: Any) -> None:
    raise OSError(5, "Input/output error")


def full_device(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("the device is full")


def no_room(*args: Any, **kwargs: Any) -> Any:
    raise PrepareError("no memory can be had")


@pytest.fixture(params=["read", "quantise", "back", "place"])
def fault(request: Any, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """Let one stage fail."""
    import bitsandbytes as bnb

    from poros_core.host_store import HostStore

    kinds: dict[str, tuple[Any, str, Any, type[BaseException]]] = {
        "read": (weight_reader, "read_piece", broken_read, OSError),
        "quantise": (bnb.functional, "quantize_4bit", full_device, torch.OutOfMemoryError),
        "back": (Berths, "land", no_room, PrepareError),
        "place": (HostStore, "place", no_room, PrepareError),
    }
    owner, name, fails, kind = kinds[request.param]
    monkeypatch.setattr(owner, name, fails)
    return kind


def test_a_stage_that_fails_ends_the_load(checkpoint: Path, fault: type[BaseException]) -> None:
    with pytest.raises(fault):
        poros.load(checkpoint, device="cpu")
    assert not live_readers()
