"""The graph executor, with a capturer that runs the captured function again instead of a graph.

What it checks holds on any device: which calls are replayed, that buffers are filled and emptied
right, that random numbers are those of the eager run, and that nothing stays alive. On a CUDA
device the same scripts run with real graphs too.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from typing import Any, cast

import pytest
import torch
from helpers_graphs import (
    CPU,
    DEVICES,
    FunctionCapturer,
    Script,
    batch,
    graphs_kept,
    handle_of,
    make,
    plain,
    run,
)

import poros
from poros_core.family import Family
from poros_families.gemma3 import GEMMA3
from poros_families.gemma4 import GEMMA4
from poros_families.qwen3_5 import QWEN3_5
from poros_runtimes.streamed.arena import GraphArena, PlainArena
from poros_runtimes.streamed.buffers import Buffer, Pages, copied, span_of
from poros_runtimes.streamed.capture import CudaCapturer, LostGraphs
from poros_runtimes.streamed.first_steps import FirstSteps
from poros_runtimes.streamed.graphs import SIGNATURES
from poros_runtimes.streamed.pools import Pool, drawing
from poros_runtimes.streamed.residency import Residency
from poros_runtimes.streamed.signature import layout_of
from poros_runtimes.streamed.streams import own_stream


def accumulated(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    losses = []
    for part in range(2):
        loss = model(**batch(2 * step + part, device)).loss / 2
        loss.backward()
        losses.append(loss.detach())
    return losses


def two_forwards(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    first = model(**batch(step, device)).loss
    second = model(**batch(step + 50, device)).loss
    (first + 2 * second).backward()
    return [first.detach(), second.detach()]


def autocast(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(**batch(step, device)).loss
    loss.backward()
    return [loss.detach()]


def autocast_around_both(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(**batch(step, device)).loss
        loss.backward()
    return [loss.detach()]


def lengths(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    loss = model(**batch(step, device, length=8 + 4 * (step % 3))).loss
    loss.backward()
    return [loss.detach()]


def rates_change(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1 + 0.1 * (step // 2)
    return plain(model, step, device)


def evaluated_between(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    loss = model(**batch(step, device)).loss
    model.eval()
    with torch.no_grad():
        logits = model(**batch(step + 9, device)).logits
    model.train()
    loss.backward()
    return [loss.detach(), logits]


SCRIPTS: list[Any] = [
    plain, accumulated, two_forwards, autocast, lengths, rates_change, evaluated_between,
    pytest.param(autocast_around_both, marks=pytest.mark.slow),
]  # fmt: skip


@cache
def eager_run(script: Script, device: torch.device, *, steps: int = 4) -> list[torch.Tensor]:
    """Return what a run without graphs gives; tests share it, and none writes to it."""
    return run(make(device, graphs=False), script, device, steps=steps)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_replays_equal_the_eager_run(script: Script, device: torch.device) -> None:
    steps = 6 if script in (lengths, rates_change) else 4  # each comes twice
    eager = eager_run(script, device, steps=steps)
    model = make(device)
    replayed = run(model, script, device, steps=steps)
    assert handle_of(model).counters()["graph_replays"] > 0
    assert len(eager) == len(replayed)
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    ("family", "name", "replayed"),
    [
        pytest.param(GEMMA3, "tiny", 4, marks=pytest.mark.slow),
        pytest.param(GEMMA4, "tiny", 4, marks=pytest.mark.slow),
        (GEMMA4, "tiny-e2b", 6),
        (QWEN3_5, "tiny", 4),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_families_replay(family: Family, name: str, replayed: int, device: torch.device) -> None:
    """Layers that are given, or hand on, what layers share are no exception."""
    shape = family.shapes[name]
    eager = run(make(device, graphs=False, shape=shape), plain, device)
    model = make(device, shape=shape)
    found = run(model, plain, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert handle_of(model).counters()["graph_replays"] == 3 * 2 * replayed


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    ("script", "replays"),
    [(two_forwards, 2 * 2 * 6), (evaluated_between, 6)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_enters_many_blocks_is_replayed(
    script: Script, replays: int, device: torch.device
) -> None:
    """Inputs of each layer, from embeddings that train, and keys and values that layers share: the
    gradients of one tensor come back from several graphs."""
    several: dict[str, Any] = {
        "shape": GEMMA4.shapes["tiny-e2b"],
        "target": r".*(embed_tokens|embed_tokens_per_layer|[qkv]_proj|per_layer_projection)",
        "block_size": 2,
    }
    eager = run(make(device, graphs=False, **several), script, device, steps=3)
    model = make(device, **several)
    found = run(model, script, device, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    counters = handle_of(model).counters()
    assert counters["graph_replays"] == replays, "all but those before layers moved, and the first"


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_a_call_that_shares_goes_with_its_loss(graphs: bool, backward: bool) -> None:
    model = make(graphs=graphs, shape=GEMMA4.shapes["tiny-e2b"], block_size=2)
    units = handle_of(model).units
    for step in range(3):
        loss = model(**batch(step, CPU)).loss
        if backward:
            loss.backward()
        del loss
        gc.collect()
        assert not units.outstanding
        assert not list(units._tokens)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_replays_read_hidden_states_that_came_back(device: torch.device) -> None:
    eager = eager_run(two_forwards, device)
    model = make(device, offload=True)
    replayed = run(model, two_forwards, device)
    counters = handle_of(model).counters()
    assert counters["graph_replays"] > 0
    assert counters["activation_bytes"] > 0
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


def test_a_call_is_captured_at_its_second_sight() -> None:
    model = make()
    handle = handle_of(model)
    counts = []
    for step in range(4):
        plain(model, 4 * step, CPU)
        counts.append((handle.counters()["graph_replays"], handle.counters()["eager_blocks"]))
    assert counts == [(0, 8), (8, 8), (16, 8), (24, 8)]
    assert handle.units.graphs._capturer.captured == 8
    assert handle.units.graphs._capturer.lendings == 4  # the eager backward of each block
    assert handle.units.graphs._capturer.settled == 12
    assert handle.units.graphs._capturer.reserved


def test_a_failed_capture_runs_eagerly_says_so_once_and_keeps_the_random_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager = eager_run(plain, CPU)
    model = make(capturer=FunctionCapturer(fails=range(100)))
    with caplog.at_level("WARNING", logger="poros.graphs"):
        found = run(model, plain, CPU)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert handle_of(model).counters()["graph_replays"] == 0
    said = [r for r in caplog.records if "graph_capture_failed" in r.getMessage()]
    assert len(said) == 1


def test_a_capture_that_costs_the_graphs_before_it_turns_graphs_off() -> None:
    eager = eager_run(plain, CPU)
    capturer = FunctionCapturer(fails={5}, error=LostGraphs)
    model = make(capturer=capturer)
    found = run(model, plain, CPU)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert (capturer.tried, capturer.captured) == (6, 5)
    counters = handle_of(model).counters()
    assert (counters["graph_replays"], counters["eager_blocks"]) == (5, 4 * 8 - 5)


class Noisy(torch.autograd.Function):
    """Adds noise to gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] + 1e-3 * torch.rand_like(gradients[0])


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_backward_that_draws_random_numbers(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """They are drawn from the state in which the backward was called, and advance it."""

    def patch(base: Any) -> None:
        layer = base.model.layers[2]
        inner = layer.forward
        layer.forward = lambda hidden, **kwargs: inner(Noisy.apply(hidden), **kwargs)

    eager = run(make(device, graphs=False, patch=patch), plain, device)
    model = make(device, patch=patch)
    with caplog.at_level("WARNING", logger="poros.graphs"):
        found = run(model, plain, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert handle_of(model).counters()["graph_replays"] == 3 * 7, "all but that backward"
    (said,) = (r for r in caplog.records if "block_runs_eagerly" in r.getMessage())
    assert "its backward draws random numbers" in said.getMessage()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_that_no_graph_can_take(
    layer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the device inside, which CUDA forbids while it captures."""
    device = torch.device("cuda")

    def with_a_look(*, graphs: bool) -> Any:
        model = make(device, graphs=graphs)
        mlp = model.get_base_model().model.layers[layer].mlp
        inner = mlp.act_fn.forward

        def looks(hidden: torch.Tensor) -> torch.Tensor:
            hidden.sum().item()
            return cast(torch.Tensor, inner(hidden))

        monkeypatch.setattr(mlp.act_fn, "forward", looks)
        return model

    eager = run(with_a_look(graphs=False), plain, device)
    with caplog.at_level("WARNING", logger="poros.graphs"):
        found = run(with_a_look(graphs=True), plain, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert len([r for r in caplog.records if "graph_capture_failed" in r.getMessage()]) == 1
    assert torch.rand(2, device=device).isfinite().all(), "the generator can be used"


@contextmanager
def _filled() -> Iterator[None]:
    """Leave nothing of the device to anybody, as other processes may."""
    driver, held = ctypes.CDLL("libcuda.so.1"), []
    size = 1 << 34
    while size >= 1 << 12:
        pointer = ctypes.c_uint64()
        if driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0:
            held.append(pointer)
        else:
            size >>= 1
    try:
        yield
    finally:
        for pointer in held:
            assert driver.cuMemFree_v2(pointer) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("numbers", [{0}, {3}, {1, 4, 5}, set(range(50))], ids=str)
def test_captures_while_the_device_is_full(
    numbers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it fails then, training goes on, and its bits are the same."""
    device = torch.device("cuda")
    capture, made = CudaCapturer.capture, count()

    def in_a_crowd(self: CudaCapturer, body: Any) -> Any:
        with _filled() if next(made) in numbers else nullcontext():
            return capture(self, body)

    eager = run(make(device, graphs=False), lengths, device)
    monkeypatch.setattr(CudaCapturer, "capture", in_a_crowd)
    found = run(make(device), lengths, device)
    assert next(made) > min(numbers)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert torch.rand(2, device=device).isfinite().all(), "the generator can be used"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "once torch has opened the pool"])
def test_captures_that_cuda_does_not_let_begin(
    late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process lives, training goes on, and its bits are the same."""
    device, made = torch.device("cuda"), count()
    driver = ctypes.CDLL("libcuda.so.1")

    class Refused(torch.cuda.CUDAGraph):
        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            if next(made) not in (0, 3):
                return super().capture_begin(*args, **kwargs)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if late:
                super().capture_begin(*args, **kwargs)
            else:
                assert driver.cuStreamBeginCapture_v2(stream, 1) == 0
            try:
                if late:
                    raise RuntimeError("refused")
                super().capture_begin(*args, **kwargs)
            finally:
                driver.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))

    eager = run(make(device, graphs=False), lengths, device)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Refused)
    model = make(device)
    with caplog.at_level("WARNING", logger="poros.graphs"):
        found = run(model, lengths, device)
    assert next(made) > 0
    assert "graph_capture_failed" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    del model, found
    gc.collect()  # torch would end the process here
    assert torch.rand(2, device=device).isfinite().all(), "the generator can be used"


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_an_arena_is_not_filled(device: torch.device) -> None:
    """The kernel that fills would run beside the streams that use the memory."""
    size = 1 << 30 if device.type == "cuda" else 1 << 24
    torch.use_deterministic_algorithms(True)
    try:
        filled = torch.empty(size, dtype=torch.uint8, device=device)
        assert filled.amin() == 255
        filled.zero_()
        del filled
        if device.type == "cpu":
            assert PlainArena(size, device=device).memory.amin() < 255
            assert torch.utils.deterministic.fill_uninitialized_memory
            return
        arena = GraphArena(size, kept=512, device=torch.device("cuda", 0))
        for _ in range(3):
            arena.memory.zero_()
            arena.lend()
            arena.settle()
            arena.memory.zero_()
            torch.cuda.synchronize()
            assert not arena.memory.any()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_what_runs_once_has_its_temporaries_in_the_arena() -> None:
    device = torch.device("cuda", 0)
    arena = GraphArena(64 << 20, kept=16 << 20, device=device)
    lends = [True]
    capturer = CudaCapturer(arena, device=device, lends=lambda: lends[0])
    start, held = arena.memory.data_ptr(), torch.cuda.memory_allocated()
    with capturer.lent():
        inside = torch.ones(20 << 20, dtype=torch.uint8, device=device)
        assert start + (16 << 20) <= inside.data_ptr() < start + (64 << 20)
    outside = inside.clone()
    assert not start <= outside.data_ptr() < start + (64 << 20)
    del inside
    capturer.settle()
    assert arena.shareable
    assert torch.cuda.memory_allocated() == held + outside.nbytes
    arena.memory.zero_()
    assert outside.amin() == 1
    with capturer.lent():
        lasting = torch.ones(4 << 20, dtype=torch.uint8, device=device)
    reserved = torch.cuda.memory_reserved()
    capturer.settle()
    assert not arena.shareable, "what lasts there must not be overwritten"
    assert torch.cuda.memory_reserved() <= reserved, "and nothing is allocated in its place"
    assert lasting.amin() == 1
    del lasting
    capturer.settle()
    assert arena.shareable
    lends[0] = False
    with capturer.lent():
        outside = torch.ones(20 << 20, dtype=torch.uint8, device=device)
    assert not start <= outside.data_ptr() < start + (64 << 20)


class Counted:
    """Stands in for torch's pool, and says how many there are."""

    made = 0
    alive = 0

    def __init__(self) -> None:
        Counted.made, Counted.alive = Counted.made + 1, Counted.alive + 1
        self.id = (0, Counted.made)

    def __del__(self) -> None:
        Counted.alive -= 1


def test_no_pool_ends_while_somebody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator would end the process."""
    monkeypatch.setattr(torch.cuda, "MemPool", Counted)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: nullcontext())
    device = torch.device("cuda", 0)
    first, second, third = (Pool(device) for _ in range(3))
    assert Counted.alive == 3
    del first
    assert Counted.alive == 2
    with second.used():
        del third
        with drawing():
            pass
        assert Counted.alive == 2
    assert Counted.alive == 1
    with drawing():
        del second
        assert Counted.alive == 1
    assert Counted.alive == 0


@pytest.mark.gpu
def test_a_pool_that_ends_while_another_is_drawn_from() -> None:
    device = torch.device("cuda", 0)
    first, second = Pool(device), Pool(device)
    with first.used():
        kept = torch.ones(1 << 22, device=device)
    with second.used():
        del first
        assert torch.ones(1 << 22, device=device).sum() == 1 << 22
    assert kept.sum() == 1 << 22


def test_a_first_backward_that_finds_too_little_memory_in_the_arena() -> None:
    class Short(FunctionCapturer):
        @contextmanager
        def lent(self) -> Iterator[None]:
            yield
            self.lendings += 1
            raise torch.OutOfMemoryError("out of memory")

    eager = eager_run(plain, CPU)
    capturer = Short()
    found = run(make(capturer=capturer), plain, CPU)
    assert capturer.lendings == 4
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))


def test_copies_have_the_strides_of_their_originals() -> None:
    base = torch.randn(6, 8)
    for tensor in (
        base,
        base.t(),
        base[:, :1].expand(6, 5),
        base[0].expand(3, 8),
        base[:, ::2],
        base[:0],
        torch.tensor(2.0).expand(4, 4),
    ):
        copy = copied(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    overlapping = base.flatten().as_strided((3, 3), (1, 1))
    assert torch.equal(copied(overlapping), overlapping)


@pytest.mark.gpu
def test_a_stream_goes_to_the_next_owner_and_not_to_two() -> None:
    class Owner:
        pass

    gc.collect()
    device = torch.device("cuda", 0)
    owners = [Owner() for _ in range(3)]
    streams = [own_stream(owner, device) for owner in owners]
    handles = {stream.cuda_stream for stream in streams}
    assert len(handles) == 3
    assert torch.cuda.current_stream(device).cuda_stream not in handles
    with torch.cuda.stream(streams[0]):
        assert torch.ones(8, device=device).sum().item() == 8
    del owners
    last = Owner()
    assert own_stream(last, device).cuda_stream in handles


def test_units_that_move_at_a_backward_are_not_replayed_where_they_were() -> None:
    """A loss that does not come through the decoder's output leaves the head where it is."""
    model = make()
    units = handle_of(model).units
    for step in range(3):
        plain(model, step, CPU)
    taken: list[torch.Tensor] = []
    norm = model.get_base_model().model.norm
    norm.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    model(**batch(1, CPU))
    assert units.shared
    before = units.graphs.replays
    assert before > 0
    taken[0].square().mean().backward()
    assert not units.shared
    assert units.graphs.replays == before


def test_units_do_not_move_into_memory_that_goes_with_the_first_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make()
    units = handle_of(model).units
    inside: list[int] = []
    moved: list[int] = []

    @contextmanager
    def first() -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    def move(reason: str) -> None:
        moved.append(len(inside))
        move_layers(reason)

    move_layers = units._move_layers
    monkeypatch.setattr(units, "_move_layers", move)
    monkeypatch.setattr(units.graphs, "_first", first)
    monkeypatch.setattr(units.graphs._capturer, "lent", first)
    taken: list[torch.Tensor] = []
    norm = model.get_base_model().model.norm
    norm.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    model(**batch(1, CPU))
    taken[0].square().mean().backward()
    assert moved == [0]


@pytest.mark.parametrize("signatures", [pytest.param(SIGNATURES, marks=pytest.mark.slow), 2])
def test_old_signatures_are_dropped(signatures: int) -> None:
    model, before = make(), graphs_kept(None)
    executor = handle_of(model).units.graphs
    executor.keep(signatures)
    for length in range(4, 4 + signatures + 1):
        for _ in range(2):
            model(**batch(0, CPU, length=length)).loss.backward()
    assert all(len(entries) == signatures for entries in executor._seen.values())
    assert graphs_kept(model) - before == 2 * 4 * signatures
    executor.keep(1)
    assert graphs_kept(model) - before == 2 * 4


@pytest.mark.slow
def test_a_call_whose_graphs_were_dropped_before_its_backward() -> None:
    """Those that calls still hold are no more than the others."""

    def many(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
        losses = [model(**batch(step, device, length=5 + n)).loss for n in range(4)]
        if handle_of(model).units.graphs is not None:
            assert graphs_kept(model) - before <= 2 * 4 * 3
        torch.stack(losses).sum().backward()
        return [loss.detach() for loss in losses]

    def changing(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
        found = [*many(model, 0, device), *plain(model, 1, device)]
        for _ in range(3):
            found += plain(model, 2, device)
        return found

    eager = run(make(graphs=False), changing, CPU, steps=1)
    model, before = make(), graphs_kept(None)
    handle_of(model).units.graphs.keep(3)
    found = run(model, changing, CPU, steps=1)
    assert handle_of(model).counters()["graph_replays"] > 0
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))


def test_weights_that_moved_before_the_backward_are_not_read_where_they_were() -> None:
    def moving(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
        loss = model(**batch(step, device)).loss
        if step == 3:
            for param in model.parameters():
                if param.requires_grad:
                    param.data = param.data.clone()
        loss.backward()
        return [loss.detach()]

    eager = run(make(graphs=False), moving, CPU)
    model = make()
    found = run(model, moving, CPU)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert handle_of(model).counters()["graph_replays"] == 2 * 8 + 4, "no backward of the last"


def test_an_interrupt_during_a_capture_goes_on() -> None:
    capturer = FunctionCapturer(fails={5}, error=KeyboardInterrupt)
    model = make(capturer=capturer)
    plain(model, 0, CPU)
    with pytest.raises(KeyboardInterrupt):
        plain(model, 1, CPU)
    replays = handle_of(model).counters()["graph_replays"]
    eager = make(graphs=False)
    plain(eager, 0, CPU)
    for each in (model, eager):
        each.zero_grad()
    assert torch.equal(*(run(each, plain, CPU)[-2] for each in (eager, model)))
    assert handle_of(model).counters()["graph_replays"] == replays, "graphs are off"


class Counting:
    """A budget that has room for so many graphs, and notes what it is asked."""

    fixed = True

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked: list[tuple[int, int]] = []

    def start(self) -> None:
        """A step begins."""

    def spare(self, *, own: int, graphs: int, buffers: int) -> int:
        self.asked.append((graphs, buffers))
        return self.room - graphs

    def refuse(self, spare: int) -> Exception:
        return poros.StateError(f"refused {spare}")


@pytest.mark.parametrize(("room", "kept"), [(8 * 4, 4), (8 * 3, 2), (7, 0)])
def test_a_budget_counts_as_many_graphs_as_are_kept(room: int, kept: int) -> None:
    model = make()
    units = handle_of(model).units
    budget = Counting(room)
    units._residency = Residency(budget, units.memory, layers=4)  # type: ignore[arg-type]
    units._residency.counts(units.graphs)
    units._first = FirstSteps(units._plan.model, CPU, optimizer_steps=lambda: None)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    plain(model, 0, CPU)
    optimizer.step()
    optimizer.zero_grad()
    if not kept:
        with pytest.raises(poros.StateError, match="refused -1"):
            plain(model, 1, CPU)
        return
    plain(model, 1, CPU)
    assert budget.asked[-1][0] == kept * 2 * 4
    assert len({buffers / graphs for graphs, buffers in budget.asked}) == 1
    for length in range(4, 4 + kept):
        model(**batch(0, CPU, length=length))
    assert all(len(seen) == kept for seen in units.graphs._seen.values())


def test_what_buffers_take_is_known_before_they_are_there() -> None:
    model = make()
    plain(model, 0, CPU)
    executor = handle_of(model).units.graphs
    assert not executor._buffers._buffers
    executor.keep(3)
    predicted = executor.buffer_bytes(room=0)
    plain(model, 0, CPU)
    taken = {role: 0 for role, _, _ in executor._buffers._buffers}
    for role, _, layout in executor._buffers._buffers:
        taken[role] += span_of(layout)
    assert set(taken) == {"input", "argument", "result", "gradient", "passed on"}
    assert predicted == 3 * sum(taken.values())
    assert executor.buffer_bytes(room=predicted) == 3 * taken["argument"]


def test_gradients_handed_out_are_not_the_graphs_own() -> None:
    model = make()
    params = [p for p in model.parameters() if p.requires_grad]
    for _ in range(2):
        model(**batch(0, CPU)).loss.backward()
        first = [p.grad for p in params]
        kept = [g.clone() for g in first]
        for p in params:
            p.grad = None
    model(**batch(1, CPU)).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_nothing_of_a_step_stays_alive() -> None:
    model = make()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            loss = model(**batch(0, CPU)).loss
            loss.backward()
            optimizer.step()
            grads = [weakref.ref(p.grad.untyped_storage()) for p in params]
            graph = weakref.ref(loss)
            optimizer.zero_grad()
            del loss
        assert graph() is None
        alive = _live_bytes()
        for _ in range(3):
            loss = model(**batch(0, CPU)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        assert _live_bytes() == alive
    finally:
        gc.enable()
    assert grads


def _live_bytes() -> int:
    """Return the bytes of all tensors that Python can reach, each storage once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_part_of_something_larger_is_copied_and_not_kept() -> None:
    whole = torch.randn(2, 5, 7, 8)
    layout = layout_of(whole[:, :, 3], span=8)
    assert layout_of(whole[:, :, 3]) is None
    assert layout_of(whole[:, :, 3], span=6) is None
    assert layout is not None
    buffer = Buffer(layout, CPU)
    for part in (whole[:, :, 3], whole[:, :, 4]):
        buffer.fill(part)
        assert torch.equal(buffer.tensor, part)
        assert buffer.tensor.stride() == part.stride()
    gone = weakref.ref(whole.untyped_storage())
    del whole, part
    assert gone() is None
    overlapping = torch.randn(9).as_strided((3, 4), (2, 1))
    assert layout_of(overlapping, span=64) is None


def test_what_blocks_hand_out_shares_a_page_but_not_a_version() -> None:
    pages = Pages(CPU)
    layout = layout_of(torch.empty(2, 5, 8))
    assert layout is not None
    buffer = Buffer(layout, CPU)
    parts = []
    for value in range(10):
        buffer.tensor.fill_(value)
        parts.append(pages.copy_of(buffer))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 2, "eight on a page"
    assert not any(part._is_view() for part in parts)
    before = [part._version for part in parts]
    parts[3].add_(100)
    changed = [part._version - old for part, old in zip(parts, before, strict=True)]
    assert changed == [0, 0, 0, 1, *[0] * 6]
    expected = [0.0, 1, 2, 103, *range(4, 10)]
    assert [part.unique().item() for part in parts] == expected
    gone = weakref.ref(parts[9].untyped_storage())
    pages.close()
    del parts[8:]
    assert gone() is None
