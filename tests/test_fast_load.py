"""What makes a load fast and small: memory made in huge pages, large tensors read straight to their
place, berths made before there is a skeleton, files hashed in chunks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import resource
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from helpers_checkpoint import CPU, TINY, request, strategy, write_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import poros
from poros_core import berths as berths_module
from poros_core import (
    file_tensors,
    host_memory,
    host_mode,
    load_base,
    machine,
    packed_file,
    page_locking,
)
from poros_core.berths import Berths
from poros_core.conformance.manifest import tensor_manifest
from poros_core.errors import CheckpointError, PrepareError
from poros_core.file_tensors import FileSpan, MappedFiles, read_span
from poros_core.host_memory import HostBuffer
from poros_core.host_store import HostStore
from poros_core.packed_file import (
    DamagedFile,
    OpenedFile,
    Piece,
    check_packed,
    read_chunk,
    read_packed,
    write_packed,
)
from poros_core.prepare import STORE
from poros_core.switching import short_turns, without_collections
from poros_families.qwen2 import QWEN2
from poros_loaders import weight_reader
from poros_loaders.checkpoint import read_checkpoint
from poros_loaders.code_table import one_table
from poros_loaders.estimate import layer_matrices, unit_sizes
from poros_loaders.skeleton import NoInitOfMeta
from poros_loaders.stage import Stage

WIDE = {**TINY, "vocab_size": 64_000, "num_hidden_layers": 3}
"""Two tables of 8 MB beside small layers."""
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wide"), WIDE, shards=2)


def resident(folder: Path) -> int:
    """Return bytes of files in a folder that this process has looked at through a mapping."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split(None, 5)
        if not first.endswith(":"):
            counts = len(rest) == 5 and rest[4].startswith(f"{folder.resolve()}/")
        elif counts and first == "Rss:":
            found += int(rest[0]) * 1024
    return found


class TestFiles:
    @pytest.fixture
    def mapped(self, tmp_path: Path) -> tuple[Path, torch.Tensor]:
        path = tmp_path / "x y.safetensors"
        save_file({"a": torch.randn(3000).bfloat16(), "b": torch.randn(700, 1000)}, path)
        with safe_open(path, "pt", device="cpu") as file:
            return path, file.get_slice("b")[...]

    def test_the_bytes_are_read_where_the_tensor_stands(
        self, mapped: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_tensors, "_PIECE", 300_000)
        path, tensor = mapped
        span = MappedFiles().span_of(tensor)
        assert span is not None
        assert (span.file, span.nbytes) == (path.resolve(), 2_800_000)
        content = bytearray(span.nbytes)
        read_span(span, memoryview(content))
        assert resident(path.parent) < 1_000_000, "the mapping was looked at"
        assert torch.equal(torch.frombuffer(content, dtype=torch.float32).view(700, 1000), tensor)

    def test_what_was_written_to_is_not_the_file_s(self, mapped: tuple[Path, torch.Tensor]) -> None:
        _, tensor = mapped
        tensor[699, 999] = 0
        assert MappedFiles().span_of(tensor) is None
        assert MappedFiles().span_of(tensor[:300]) is not None

    def test_what_is_no_view_of_a_file(self, mapped: tuple[Path, torch.Tensor]) -> None:
        path, tensor = mapped
        assert MappedFiles().span_of(torch.zeros(100_000)) is None
        assert MappedFiles().span_of(tensor.T) is None
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.replace(path)
        assert MappedFiles().span_of(tensor) is None, "the path leads to another file now"

    def test_a_file_that_ends_early_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "short").write_bytes(bytes(50))
        span = FileSpan(file=tmp_path / "short", begin=20, nbytes=31)
        with pytest.raises(CheckpointError, match="short' ended while it was read"):
            read_span(span, memoryview(bytearray(31)))


@pytest.mark.parametrize("precision", ["nf4", "bf16"])
def test_large_tensors_of_a_checkpoint_are_read_and_not_looked_at(
    wide: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    place = HostStore.place

    def placed(self: HostStore, *args: Any, **kwargs: Any) -> Any:
        looked.append(resident(wide))  # before the unit's tensors let go of the mapping
        return place(self, *args, **kwargs)

    monkeypatch.setattr(HostStore, "place", placed)
    model = poros.load(wide, device="cpu", precision=precision)
    assert len(looked) == 5
    assert max(looked) < 4_000_000, "a table was held twice"
    report = model.__dict__[STORE].report
    assert report.host_bytes > 16_000_000
    with safe_open(wide / read_checkpoint(wide).tensors["lm_head.weight"].file.name, "pt") as file:
        assert torch.equal(file.get_tensor("lm_head.weight"), model.lm_head.weight)


def test_what_is_read_into_is_given_back_at_once(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[HostBuffer]] = []

    def noted(nbytes: int, **kwargs: Any) -> HostBuffer:
        buffer = HostBuffer(nbytes, **kwargs)
        made.append(weakref.ref(buffer))
        return buffer

    place = load_base.place_units

    def placed(*args: Any, **kwargs: Any) -> None:
        assert made
        assert [ref() for ref in made] == [None] * len(made)
        place(*args, **kwargs)

    monkeypatch.setattr(weight_reader, "HostBuffer", noted)
    monkeypatch.setattr(load_base, "place_units", placed)
    gc.disable()
    try:
        poros.load(wide, device="cpu")
    finally:
        gc.enable()


class TestEarlyBerths:
    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**WIDE), dtype=torch.bfloat16
            )
        return model

    def test_what_headers_say_is_what_the_skeleton_says(
        self, wide: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[int] = []

        def counted(nbytes: int, **kwargs: Any) -> HostBuffer:
            made.append(nbytes)
            return HostBuffer(nbytes, **kwargs)

        monkeypatch.setattr(berths_module, "HostBuffer", counted)
        for double in (False, True):
            config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            poros.load(
                wide,
                device="cpu",
                quantization_config={**config, "bnb_4bit_use_double_quant": double},
            )
            sizes = unit_sizes(read_checkpoint(wide), dtype=None, item=1, double=double)
            assert sorted(made) == sorted(sizes.values()), "one was made twice"
            assert sizes.keys() == {"layer 0", "layer 1", "layer 2", "head", "embedding"}
            made.clear()
        assert len(layer_matrices(read_checkpoint(wide))) == 7 * 3

    def test_a_tied_table_is_the_head_s(self, tmp_path: Path) -> None:
        tied = write_checkpoint(tmp_path, {**TINY, "tie_word_embeddings": True})
        sizes = unit_sizes(read_checkpoint(tied), dtype=torch.float32, item=1, double=False)
        assert sizes["head"] == TINY["vocab_size"] * TINY["hidden_size"] * 4
        assert "embedding" not in sizes

    @pytest.mark.parametrize(("early", "taken"), [(0, True), (1 << 20, True), (-1, False)])
    def test_one_of_about_the_right_size_is_taken(self, early: int, taken: bool) -> None:
        model = self.skeleton()
        capacity = sum(
            -(-p.nbytes // 256) * 256 for p in model.get_submodule("model.layers.0").parameters()
        )
        with Berths(QWEN2, CPU, locked=False) as berths:
            berths.begin({"layer 0": capacity + early, "layer 9": 5000})
            berths.expect(model, {"model.layers.0.mlp.up_proj.weight": 64 * 128 * 2})
            buffer = berths._berths["layer 0"].buffer.result()
            assert (buffer.nbytes == capacity + early) == taken
            assert buffer.nbytes >= capacity
            assert not berths._early

    def test_a_wrong_file_costs_time_only(self, wide: Path) -> None:
        right = tensor_manifest(poros.load(wide, device="cpu"))
        expect = Berths.expect

        def elsewhere(self: Berths, model: nn.Module, sizes: Any, files: Any) -> None:
            spans = {name: files[other] for name, other in zip(files, reversed(files), strict=True)}
            assert spans != files
            expect(self, model, sizes, spans)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Berths, "expect", elsewhere)
            assert tensor_manifest(poros.load(wide, device="cpu")) == right


class TestPageLocking:
    def test_a_forked_child_gets_zeros_and_no_copies(self) -> None:
        memory = page_locking.lockable_memory(3 << 20)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        page_locking.populate(address, 3 << 20)
        memory[:4] = b"base"
        child = os.fork()
        if not child:
            os._exit(0 if memory[:4] == bytes(4) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert memory[:4] == b"base"

    @pytest.mark.parametrize(
        ("large", "cores", "others", "several"),
        [
            (1 << 30, 16, 0, False),
            (1 << 30, 6, 0, True),
            (1 << 30, 6, 1, False),
            (1 << 20, 6, 1, True),
        ],
    )
    def test_all_of_a_stretch_is_made(
        self,
        monkeypatch: pytest.MonkeyPatch,
        large: int,
        cores: int,
        others: int,
        several: bool,
    ) -> None:
        """By several threads if it has more pieces than there would be, and nobody else makes any,
        or if it is large."""
        pools: list[int] = []

        def pool(count: int, **kwargs: Any) -> ThreadPoolExecutor:
            pools.append(count)
            return ThreadPoolExecutor(count, **kwargs)

        monkeypatch.setattr(page_locking, "ThreadPoolExecutor", pool)
        monkeypatch.setattr(page_locking, "_LARGE", large)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(page_locking, "_PIECE", 1 << 20)
        nbytes = (7 << 20) + 5
        memory = page_locking.lockable_memory(nbytes)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        pages = -(-nbytes // mmap.PAGESIZE)
        made = (ctypes.c_uint8 * pages)()

        def count() -> int:
            mincore = ctypes.CDLL(None).mincore
            assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), made) == 0
            return sum(page & 1 for page in made)

        assert count() == 0
        with contextlib.ExitStack() as making:
            for _ in range(others):
                making.enter_context(page_locking._making)
            page_locking.populate(address, nbytes)
        assert count() == pages
        assert bool(pools) is several
        assert page_locking._making._count == 0

    @pytest.fixture
    def locked(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Note the sizes of what would be page-locked."""
        found: list[int] = []

        def lock(pointer: int, nbytes: int, device: torch.device) -> Any:
            found.append(nbytes)
            return list

        monkeypatch.setattr(host_memory, "lock", lock)
        return found

    def test_a_stretch_that_is_locked_later(self, locked: list[int]) -> None:
        buffer = HostBuffer(8192, device=GPU, later=True)
        assert not buffer.locked
        assert not locked
        for _ in range(2):
            buffer.lock()
            assert buffer.locked
        HostBuffer(4096, device=GPU).lock()
        for elsewhere in (
            HostBuffer(512, device=GPU, locked=False, later=True),
            HostBuffer(512, device=CPU, later=True),
        ):
            elsewhere.lock()
            assert not elsewhere.locked
        assert locked == [8192, 4096]

    def test_locking_that_failed_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        left = [PrepareError("cannot be page-locked")]

        def lock(pointer: int, nbytes: int, device: torch.device) -> Any:
            if left:
                raise left.pop()
            return list

        monkeypatch.setattr(host_memory, "lock", lock)
        buffer = HostBuffer(8192, device=GPU, later=True)
        with pytest.raises(PrepareError):
            buffer.lock()
        assert not buffer.locked
        buffer.lock()
        assert buffer.locked

    def test_a_berth_is_locked_when_something_lands(self, locked: list[int]) -> None:
        with Berths(QWEN2, GPU, locked=True) as berths:
            berths.begin({"layer 0": 4096, "layer 1": 8192, "head": 16384})
            for berth in berths._early.values():
                berth.buffer.result()
            assert locked == [16384]
            for _ in range(2):
                assert berths.land("layer 1", torch.arange(16)).tolist() == list(range(16))
                assert locked == [16384, 8192]

    def test_where_nothing_lands_a_berth_is_locked_as_it_is_made(
        self, wide: Path, locked: list[int]
    ) -> None:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDE))
        name = "model.layers.1.mlp.up_proj.weight"
        with Berths(QWEN2, GPU, locked=True) as berths:
            berths.expect(model, {name: 4096})
            sizes = {title: b.buffer.result().nbytes for title, b in berths._berths.items()}
            assert sorted(locked) == sorted(n for t, n in sizes.items() if t != "layer 1")

    def test_only_the_process_that_locked_gives_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []

        class Runtime:
            def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
                calls.append(f"registered {nbytes}")
                return 0

            def cudaHostUnregister(self, pointer: int) -> None:
                calls.append("unregistered")

        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        give_up = page_locking.lock(4096, 8192, torch.device("cuda", 0))
        monkeypatch.setattr(os, "getpid", lambda: -1)
        give_up()
        assert calls == ["registered 8192"]
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        give_up()
        assert calls == ["registered 8192", "unregistered"]


@pytest.mark.parametrize("bound", [False, True])
def test_a_limit_is_tried_with_little_memory(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    tried: list[tuple[int, int]] = []

    def locked(nbytes: int, **kwargs: Any) -> None:
        tried.append((nbytes, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
        if bound:
            raise PrepareError("it cannot be page-locked")

    monkeypatch.setattr(host_mode, "HostBuffer", locked)
    monkeypatch.setattr(machine, "page_lock_limit", lambda: 5 << 30)
    device = torch.device("cuda", 0)
    assert host_mode.read_limits(device, wanted=6 << 30).locked == (5 << 30 if bound else None)
    assert tried == [(1 << 20, 0)]
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
    assert host_mode.read_limits(device, wanted=4 << 30).locked == 5 << 30
    assert len(tried) == 1


class TestChunks:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packed_file, "CHUNK", 1000)

    @pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 4500])
    def test_threads_and_parts_make_no_difference(self, tmp_path: Path, size: int) -> None:
        content = memoryview(random.Random(size).randbytes(size))
        pieces = [Piece("a", "U8", (size,), 0, size)]
        parts = [content[:300], content[300:1700], content[1700:]]
        with ThreadPoolExecutor(3) as pool:
            records = [
                write_packed(tmp_path / "x", pieces, chunks, unit="a", nbytes=size, hashers=hashers)
                for chunks in ([content], parts)
                for hashers in (None, pool)
            ]
        assert len({record.sha256 for record in records}) == 1
        read = bytearray(size)
        read_packed(tmp_path / "x", records[0], memoryview(read))
        assert read == content
        read_packed(tmp_path / "x", records[0], None)

    def test_no_byte_may_differ_or_stand_elsewhere(self, tmp_path: Path) -> None:
        path, size = tmp_path / "x", 3500
        content = random.Random(0).randbytes(size)
        record = write_packed(path, [], [memoryview(content)], unit="a", nbytes=size)
        whole = path.read_bytes()
        start = record.start
        swapped = [start + 1000, start + 2000, start, start + 3000]
        moved = b"".join(whole[begin : begin + 1000] for begin in swapped)
        wrong = [whole[:start] + moved]
        for at in (3, start, start + 999, start + 1000, start + size - 1):
            wrong.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for changed in wrong:
            assert len(changed) == len(whole)
            path.write_bytes(changed)
            with pytest.raises(DamagedFile, match="other bytes"):
                read_packed(path, record, None)
        path.write_bytes(whole[:-1])
        with pytest.raises(DamagedFile, match="ended while it was read"):
            read_chunk(OpenedFile(path), record, 3000, None)
        with pytest.raises(DamagedFile, match="bytes instead of"):
            check_packed(path, record, [])


def test_turns_are_short_while_a_load_runs() -> None:
    before = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    with first:
        assert sys.getswitchinterval() < before / 2
        second.__enter__()
    assert sys.getswitchinterval() < before / 2, "another load still runs"
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_what_has_no_memory_is_not_drawn() -> None:
    drawn: list[Any] = []

    class Noted(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            drawn.append(func)
            return func(*args, **(kwargs or {}))

    with Noted(), NoInitOfMeta():
        with torch.device("meta"):
            empty = nn.Linear(8, 8)
        assert nn.init.kaiming_uniform_ not in drawn
        assert torch.Tensor.uniform_ not in drawn
        full = nn.Linear(8, 8)
    assert empty.weight.is_meta
    assert nn.init.kaiming_uniform_ in drawn
    assert len(full.weight.unique()) > 1


def test_layers_that_keep_their_weight_transposed(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    asked = request(tmp_path / "plain")
    models: list[Any] = [
        strategy("nf4", "streamed").load(asked),
        strategy("nf4", "standard").load(asked),
    ]
    models[0].save_pretrained(tmp_path / "packed")
    models.append(strategy("nf4", "streamed").load(request(tmp_path / "packed")))
    state = models[0].transformer.h[0].attn.c_attn.weight.quant_state
    assert tuple(state.shape) == (192, 64)
    manifests = [tensor_manifest(model) for model in models]
    assert manifests[0] == manifests[1] == manifests[2]


def test_no_garbage_is_looked_for_while_a_model_is_built(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    enabled: list[bool] = []
    begin, disable = Stage.begin, gc.disable

    def built(self: Stage, model: Any) -> None:
        enabled.append(gc.isenabled())
        begin(self, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "begin", built)
        patch.setattr(gc, "disable", lambda: (enabled.append(False), disable()))
        strategy("nf4", "streamed").load(request(tmp_path))
    assert enabled == [False, True]
    first, second = without_collections(), without_collections()
    with first:
        second.__enter__()
    assert not gc.isenabled(), "another model is still built"
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    with without_collections():
        pass
    found = gc.isenabled()
    gc.enable()
    assert not found, "somebody else turned it off"


class TestOneTable:
    def test_it_is_built_once_a_load_and_never_shared(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built: list[Any] = []
        build = bnb.functional.get_4bit_type

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            built.append(args)
            return build(*args, **kwargs)

        monkeypatch.setattr(bnb.functional, "get_4bit_type", counted)
        write_checkpoint(tmp_path)
        model = strategy("nf4", "streamed").load(request(tmp_path))
        codes = [
            module.weight.quant_state.code
            for module in model.modules()
            if isinstance(module, bnb.nn.Linear4bit)
        ]
        assert len(codes) > 1 == len(built)
        assert len({code.data_ptr() for code in codes}) == len(codes)
        assert all(code.equal(build("nf4", device="cpu")) for code in codes)
        assert bnb.functional.get_4bit_type is counted

    def test_two_loads_at_once_put_it_back(self) -> None:
        build = bnb.functional.get_4bit_type
        entered = [threading.Event(), threading.Event()]

        def load() -> None:
            with one_table():
                entered[0].set()
                assert entered[1].wait(10)
                bnb.functional.get_4bit_type("nf4", device=CPU)

        other = threading.Thread(target=load)
        with one_table():
            other.start()
            assert entered[0].wait(10)
        assert bnb.functional.get_4bit_type is not build
        assert bnb.functional.get_4bit_type("nf4", device=CPU).equal(build("nf4", device=CPU))
        entered[1].set()
        other.join()
        assert bnb.functional.get_4bit_type is build
