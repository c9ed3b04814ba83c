"""Where layers stand on the host: exact whatever the way, and with less memory than the base."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers_checkpoint import CPU, TINY, request, strategy, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

import poros
from poros_core import machine
from poros_core.conformance.manifest import tensor_manifest
from poros_core.gate import GateOptions
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.run import run_gate
from poros_core.host_memory import HostBuffer
from poros_core.host_mode import HostChoice, Limits, choose_host
from poros_core.host_store import HostStore
from poros_core.mapped_buffer import MappedBuffer
from poros_core.packed_cache import PackedCache
from poros_core.plugins import plugins
from poros_core.prepare import prepared_of
from poros_core.ring import Order, StagingRing

F32 = torch.float32
MODES = ["pinned", "pageable", "mmap"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("modes"))


def adapted(model: Any, *, streamed: bool) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config)
    if streamed:
        poros.prepare(wrapped, verbose=False)
    return wrapped.train()


def train(model: Any, *, steps: int = 2) -> list[torch.Tensor]:
    """Train some steps; return every loss and every adapter weight at the end."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    torch.manual_seed(2)
    noted = []
    for _ in range(steps):
        ids = torch.randint(0, 60, (2, 12))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        noted.append(loss.detach())
    return [*noted, *(param.detach().clone() for param in params)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        ("nf4", "mmap"),
        pytest.param("nf4", "pageable", marks=pytest.mark.slow),
        pytest.param("bf16", "mmap", marks=pytest.mark.slow),
    ],
)
def test_training_is_exact_whatever_the_way(
    checkpoint: Path, tmp_path: Path, precision: str, mode: str
) -> None:
    resident = strategy(precision, "streamed").load_resident(request(checkpoint, dtype=F32))
    bytes_of = tensor_manifest(resident)
    wanted = train(adapted(resident, streamed=False))
    assert wanted[0].isfinite()
    assert not torch.equal(wanted[0], wanted[1])

    def load() -> Any:
        return poros.load(
            checkpoint, host=mode, cache=tmp_path, precision=precision, dtype=F32, device="cpu"
        )

    first, second = load(), load()
    assert tensor_manifest(first) == bytes_of
    assert tensor_manifest(second) == bytes_of
    for model in (adapted(first, streamed=True), adapted(second, streamed=True)):
        assert equal(train(model), wanted)
        prepared = prepared_of(model)
        assert prepared is not None
        assert prepared.store.ring is not None
        copies = prepared.handle.counters()["copies"]
        assert prepared.store.ring.hits > copies // 3, "hardly a unit was read ahead"
    poros.unprepare(model)
    assert tensor_manifest(model.unload()) == bytes_of


@pytest.mark.parametrize("entry", list(plugins().families), ids=lambda e: e.value.name)
@pytest.mark.long
def test_every_family_is_exact_whatever_the_way(entry: Any, tmp_path: Path) -> None:
    family = entry.value
    for shape in [name for name in family.shapes if name.startswith("tiny")]:
        path = tmp_path / shape
        write_random_checkpoint(
            family.shapes[shape], path, seed=0, dtype=torch.bfloat16, device=CPU
        )
        for precision in ("nf4", "bf16"):
            asks = request(path, family=family, dtype=F32)
            resident = strategy(precision, "streamed").load_resident(asks)
            wanted = train(adapted(resident, streamed=False))
            for mode in MODES:
                for way in ("streamed", "standard"):
                    cache = tmp_path / f"{mode} {way}"
                    for _ in range(2):
                        model = poros.load(
                            path, host=mode, cache=cache, precision=precision, dtype=F32,
                            device="cpu", load_strategy=way,
                        )  # fmt: skip
                        assert equal(train(adapted(model, streamed=True)), wanted), (mode, way)


def test_a_base_that_is_cast_after_the_load(checkpoint: Path, tmp_path: Path) -> None:
    def cast(model: Any) -> Any:
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    asks = request(checkpoint)
    resident = strategy("nf4", "streamed").load_resident(asks)
    wanted = train(adapted(cast(resident), streamed=False))
    model = poros.load(checkpoint, host="mmap", cache=tmp_path, device="cpu")
    assert equal(train(adapted(cast(model), streamed=True)), wanted)


def test_writing_to_a_mapped_weight_leaves_the_file_alone(checkpoint: Path, tmp_path: Path) -> None:
    model: Any = poros.load(checkpoint, host="mmap", cache=tmp_path, device="cpu", precision="bf16")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data[0, 0] += 1
    changed = weight.data[0, 0].clone()
    wrapped = adapted(model, streamed=True)
    prepared = prepared_of(wrapped)
    assert prepared is not None
    image = prepared.store._images[0]
    staged = image.views(image.bytes_for_copy())
    image.copied(object())
    assert any(
        view.shape == weight.shape and torch.equal(view[0, 0], changed) for _, view in staged
    )
    assert [info.problem for info in PackedCache(tmp_path).verify()] == [None]


def test_an_entry_that_is_trained_from_is_not_evicted(checkpoint: Path, tmp_path: Path) -> None:
    for _ in range(2):
        model = poros.load(checkpoint, host="mmap", cache=tmp_path, device="cpu")
        (info,) = PackedCache(tmp_path).entries()
        assert not PackedCache(tmp_path).remove(info.name)
        del model
        assert PackedCache(tmp_path).remove(info.name)


def test_without_a_cache_mmap_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(poros.SettingsError, match="cache=True"):
        poros.load(checkpoint, host="mmap", cache=False, device="cpu")
    with pytest.raises(poros.SettingsError, match="pageable"):
        poros.load(checkpoint, host="elsewhere", device="cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POROS_CACHE", raising=False)
    poros.load(checkpoint, host="mmap", device="cpu")
    assert len(PackedCache(tmp_path / "poros" / "packed").entries()) == 1


def test_a_full_disk_ends_a_load_into_files(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POROS_CACHE_LIMIT", "1000")
    with pytest.raises(poros.PrepareError, match="POROS_CACHE_LIMIT"):
        poros.load(checkpoint, host="mmap", cache=tmp_path, device="cpu")
    monkeypatch.delenv("POROS_CACHE_LIMIT")
    for what in ("posix_fallocate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr("poros_core.landing._SMALL", 0)
            patch.setattr(os, what, _full)
            with pytest.raises(poros.PrepareError, match="No space left"):
                poros.load(checkpoint, host="mmap", cache=tmp_path, device="cpu")
        assert list(tmp_path.iterdir()) == []


def _full(*args: Any) -> None:
    raise OSError(28, os.strerror(28))


SIZES: Mapping[str, int] = {"layers": 100, "rest": 20, "largest": 10}


@pytest.mark.parametrize(
    ("host", "limits", "mode"),
    [
        ("auto", (None, None, None), "pinned"),
        ("auto", (1000, 200, 120), "pinned"),
        ("auto", (1000, None, 119), "pageable"),
        ("auto", (119, None, None), "mmap"),
        ("auto", (1000, 119, None), "mmap"),
        ("auto", (1000, 119, 60), "mmap"),
        ("pinned", (50, 50, 50), "pinned"),
        ("mmap", (1000, None, None), "mmap"),
        ("pageable", (1000, None, 50), "pageable"),
    ],
)
def test_what_is_chosen(host: Any, limits: tuple[Any, Any, Any], mode: str) -> None:
    found: HostChoice = choose_host(
        host, **SIZES, limits=Limits(total=limits[0], container=limits[1], locked=limits[2])
    )
    assert found.mode == mode
    assert found.reason
    assert (found.cost == "none") is (mode == "pinned")


def test_what_does_not_even_hold_the_ring_is_refused() -> None:
    limits = Limits(total=None, container=None, locked=49)
    with pytest.raises(poros.PrepareError, match="ulimit -l"):
        choose_host("auto", **SIZES, limits=limits)


def test_auto_reports_what_it_chose(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="poros")
    monkeypatch.setattr(machine, "container_headroom", lambda: 1000)
    model: Any = poros.load(checkpoint, cache=tmp_path, device="cpu")
    assert "mode='mmap'" in caplog.text
    assert "host memory may be used" in caplog.text
    assert "a step" in caplog.text
    assert model.__dict__["_poros_store"].ring is not None


@pytest.mark.parametrize(("precision", "dtype"), [("nf4", None), ("bf16", F32)])
def test_the_estimate_is_near(checkpoint: Path, precision: str, dtype: torch.dtype | None) -> None:
    asks = request(checkpoint, dtype=dtype)
    loader: Any = strategy(precision, "streamed")
    sizes = loader.estimate(asks)
    model: Any = poros.load(checkpoint, precision=precision, dtype=dtype, device="cpu")
    store: HostStore = model.__dict__["_poros_store"]
    true = sum(sum(e.nbytes for e in image.entries) for image in store._images)
    assert sizes.layers + sizes.rest == pytest.approx(true, rel=0.15)
    assert sizes.largest == pytest.approx(sizes.layers / TINY["num_hidden_layers"], rel=0.01)


class TestOrder:
    def test_a_step_is_learnt(self) -> None:
        order = Order(8)
        step = [*range(2, 8), *range(5, -1, -1)]
        right = 0
        for number in range(3):
            for position, unit in enumerate(step):
                if number:
                    following = (step + step)[position : position + 2]
                    right += order.ahead(2)[: len(following)] == following
                order.seen(unit)
        assert right >= 2 * len(step) - 3

    @settings(max_examples=40)
    @given(st.lists(st.integers(0, 4), max_size=40), st.integers(0, 6))
    def test_a_guess_is_always_another_unit(self, seen: list[int], count: int) -> None:
        order = Order(5)
        for unit in seen:
            order.seen(unit)
        found = order.ahead(count)
        assert len(found) <= count
        assert len(set(found)) == len(found)
        assert all(0 <= unit < 5 for unit in found)
        assert not seen or seen[-1] not in found


class TestRing:
    def images(self, count: int = 5) -> tuple[StagingRing, list[Any], list[torch.Tensor]]:
        from test_window import Ref, parameter

        ring = StagingRing(CPU)
        store = HostStore(CPU, ring=ring)
        params = [parameter(i, 3 + i, 70) for i in range(count)]
        images = [store.adopt([Ref(param)], staged=True) for param in params]
        return ring, images, params

    @settings(max_examples=20)
    @given(st.lists(st.integers(0, 4), max_size=30))
    def test_every_unit_has_its_own_bytes(self, asked: list[int]) -> None:
        _, images, params = self.images()
        for unit in asked:
            staged = images[unit].bytes_for_copy()
            ((_, view),) = images[unit].views(staged)
            assert torch.equal(view, params[unit])
            images[unit].copied(object())

    def test_a_buffer_is_not_filled_before_its_copy_is_done(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        issued: list[Any] = []

        class Copy:
            """An event in a stream that gets on only when somebody waits."""

            def __init__(self, source: torch.Tensor) -> None:
                self.source, self.wanted = source, source.clone()
                self.passed = False
                issued.append(self)

            def query(self) -> bool:
                return self.passed

            def synchronize(self) -> None:
                for copy in issued[: issued.index(self) + 1]:
                    if not copy.passed:
                        assert torch.equal(copy.source, copy.wanted), "overwritten too early"
                        copy.passed = True

        monkeypatch.setattr(torch.cuda, "Event", Copy)
        ring, images, params = self.images()
        for number, unit in enumerate([0, 1, 2, 3, 4, 3, 2, 1, 0, 0, 1, 4, 4, 2] * 3):
            staged = images[unit].bytes_for_copy()
            ((_, view),) = images[unit].views(staged)
            assert torch.equal(view, params[unit])
            images[unit].copied(Copy(staged))
            if number % 7 == 0:
                issued[max(0, number - 1)].synchronize()
        assert len(issued) == 42
        issued[-1].synchronize()
        assert ring.hits > 10

    def test_a_failed_read_is_raised_and_forgotten(self) -> None:
        _, images, params = self.images()
        memory = images[2].buffer
        original = memory.will_need
        memory.will_need = lambda: _full()
        with pytest.raises(OSError, match="No space"):
            images[2].bytes_for_copy()
        memory.will_need = original
        ((_, view),) = images[2].views(images[2].bytes_for_copy())
        assert torch.equal(view, params[2])

    def test_a_larger_unit_joins(self) -> None:
        from test_window import Ref, parameter

        ring, images, _ = self.images()
        images[0].bytes_for_copy()
        images[0].copied(object())
        store = HostStore(CPU, ring=ring)
        param = parameter(9, 300, 70)
        image = store.adopt([Ref(param)], staged=True)
        assert image is not None
        ((_, view),) = image.views(image.bytes_for_copy())
        assert torch.equal(view, param)


def test_a_mapping_under_a_data_limit_is_read_only(tmp_path: Path) -> None:
    file = tmp_path / "data"
    content = os.urandom(8 << 20)
    file.write_bytes(content)

    def read() -> bool:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (2 << 20), -1))
        buffer = MappedBuffer(file, start=4096, nbytes=7 << 20)
        return buffer.view() == memoryview(content)[4096 : 4096 + (7 << 20)]

    assert in_child(read) == 0


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def in_child(work: Callable[[], bool], *, before: Callable[[], object] = lambda: None) -> int:
    """Run ``work`` in a child process; return 0 if it returned True, and its signal if killed."""
    child = os.fork()
    if child == 0:
        status = 70
        with contextlib.suppress(BaseException):
            before()
            status = 0 if work() else 1
        os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


WIDE = {**TINY, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 24}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {**TINY, "hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 32}
    return write_checkpoint(tmp_path_factory.mktemp("deep"), shape)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "nf4"])
def test_training_with_less_data_memory_than_the_base(
    deep: Path, tmp_path: Path, precision: str
) -> None:
    if precision == "nf4":
        deep = write_checkpoint(tmp_path / "wide", WIDE)
    options: dict[str, Any] = {"precision": precision, "cache": tmp_path, "device": "cpu"}
    pinned: Any = poros.load(deep, **options)
    base = pinned.__dict__["_poros_store"].nbytes
    wanted = train(adapted(pinned, streamed=True), steps=1)
    del pinned

    found = tmp_path / "found"
    given = (str(deep), precision, str(tmp_path), str(base // 2), str(found))
    # large tensors never from what the heap has free, which would be more than the limit says
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    script = "import sys, test_host_modes; test_host_modes.train_under_a_limit(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", script, *given], env=environment, check=True)
    assert equal(torch.load(found), wanted)


def train_under_a_limit(deep: str, precision: str, cache: str, more: str, found: str) -> None:
    """Load and train in this process, which may have so many more bytes once the base is loaded
    and what training takes has been there once; write what came of it to a file."""
    options: dict[str, Any] = {"precision": precision, "cache": cache, "device": "cpu"}
    for _ in range(2):
        model = poros.load(deep, host="mmap", **options)
        kept = train(adapted(model, streamed=True), steps=1)
        del model, kept
        gc.collect()
    model = poros.load(deep, host="mmap", **options)
    limit = data_bytes() + int(more)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(2 * int(more), dtype=torch.uint8)
    torch.save(train(adapted(model, streamed=True), steps=1), found)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a control group with a memory limit, or skip the test."""
    root = Path("/sys/fs/cgroup")
    name, file = ("memory", "memory.limit_in_bytes"), "memory.max"
    parent, file = (root / "memory", name[1]) if (root / "memory").is_dir() else (root, file)
    group = parent / f"poros-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def drop_from_page_cache(files: list[str]) -> None:
    """Have files read inside a control group, so that they count there."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


IN_A_GROUP = """
import gc, os, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import poros
from test_host_modes import adapted, drop_from_page_cache, train

def run(path, **where):
    gc.collect()
    model = poros.load(path, precision={precision!r}, device="cpu", **where)
    return train(adapted(model, streamed=True), steps=1)

run({warm!r}, **{warm_where!r})
gc.collect()
drop_from_page_cache({files!r})
with open({group!r} + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
torch.save([run({deep!r}, **{where!r}) for _ in range(2)], {result!r})
"""


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "nf4"])
def test_training_in_a_container_that_is_smaller_than_the_base(
    checkpoint: Path, deep: Path, tmp_path: Path, precision: str
) -> None:
    if precision == "nf4":
        deep = write_checkpoint(tmp_path / "wide", WIDE)
    cache = tmp_path / "cache"
    # quantising on a CPU, and computing, need more memory than this base has bytes: both are done
    # once outside the group
    first = cache if precision == "nf4" else False
    pinned: Any = poros.load(deep, precision=precision, device="cpu", cache=first)
    base = pinned.__dict__["_poros_store"].nbytes
    wanted = train(adapted(pinned, streamed=True), steps=1)
    del pinned
    result = tmp_path / "result"
    kept = {"cache": str(cache)}
    share = 0.8 if first else 2 / 3
    # memory that dequantising frees on a CPU goes back to the system, and does not count
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    with memory_group(int(base * share)) as group:

        def run(where: dict[str, Any]) -> int:
            warm = deep if first else checkpoint
            names = {"tests": Path(__file__).parent, "warm": warm, "deep": deep}
            paths = {name: str(path) for name, path in names.items()}
            read = [*deep.glob("*.safetensors"), *cache.glob("*/*.safetensors")]
            settings = {
                "where": where,
                "precision": precision,
                "warm_where": {"host": "mmap", **kept} if first else {},
                "files": list(map(str, read)),
            }
            code = IN_A_GROUP.format(group=str(group), result=str(result), **settings, **paths)
            command = [sys.executable, "-c", code]
            return subprocess.run(command, env=environment, check=False).returncode

        pinned_where = {"host": "pinned", **(kept if first else {})}
        assert run(pinned_where) == -signal.SIGKILL, "the limit limits nothing"
        assert run({"host": "mmap", **kept}) == 0
    for noted in torch.load(result):
        assert equal(noted, wanted)


def test_pageable_memory_is_not_locked() -> None:
    buffer = HostBuffer(4096, device=torch.device("cuda", 0), locked=False)
    assert not buffer.locked
    assert buffer.bytes.device.type == "cpu"


@pytest.mark.slow
def test_a_gate_takes_the_way() -> None:
    options = GateOptions(family="qwen2", shape="tiny", steps=2, host="mmap", plant_fault=True)
    result = run_gate(options)
    assert result.verdict == "diverged", "the planted bit is in the mapped file's copy"
    assert result.record["settings"]["host"] == "mmap"
    assert run_gate(attrs.evolve(options, plant_fault=False)).verdict == "exact"
