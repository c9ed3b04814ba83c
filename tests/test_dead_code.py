"""What a recompute need not compute: how it is found and proved, and that it is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import torch._dynamo.utils
from helpers_graphs import (
    CPU,
    DEVICES,
    RunningCapturer,
    batch,
    counted_run,
    handle_of,
    later,
    make,
    plain,
    run,
)
from torch.utils._python_dispatch import TorchDispatchMode

from poros_families.gemma3 import GEMMA3
from poros_families.gemma4 import GEMMA4
from poros_families.qwen2 import QWEN2
from poros_families.qwen3_5 import QWEN3_5
from poros_runtimes.streamed.dead_code import DeadCode, Leaving, Recording

MM, MUL, ADD = "aten.mm.default", "aten.mul.Tensor", "aten.add.Tensor"
LAST_LINEAR = [MM, MM, MUL, ADD, ADD]
"""A block's last matrix, the adapter's second, its scaling, their sum and the residual's."""


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by an earlier test either."""
    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", Counter())


def dead_names(code: DeadCode) -> list[str]:
    return [code.names[number] for number in sorted(code.dead)]


def recorded(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> DeadCode:
    recording = Recording()
    with recording.recompute():
        function(*tensors)
    return recording.dead_code()


def of_model(model: Any) -> list[DeadCode]:
    """Return what was proved, of each block in turn."""
    proved = handle_of(model).units.graphs._proofs._proved
    found = {block.layers.start: codes for block, codes in proved.items()}
    return [code for start in sorted(found) for code in found[start]]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls[str(func)] += not (isinstance(found, torch.Tensor) and found.is_meta)
        return found


def calls_in_a_step(model: Any) -> Counter[str]:
    with Counting() as counting:
        loss = model(**batch(3, CPU)).loss
        loss.backward()
    return counting.calls


# what is found


def test_what_comes_after_the_last_that_is_saved() -> None:
    x, w, v = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    code = recorded(lambda x, w, v: torch.tanh(x @ w) @ v, x, w, v)
    assert code.names[-1] == MM
    assert dead_names(code) == [MM], "of the second product only what it reads is saved"
    assert not recorded(lambda x, w, v: torch.tanh(x @ w @ v), x, w, v).dead


def test_a_value_in_memory_that_had_another_one() -> None:
    def reuses(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        where = set()
        for _ in range(50):
            passing = x.detach() @ w.detach()
            where.add(passing.data_ptr())
            del passing
        assert len(where) < 50, "memory is used again"
        return torch.tanh(x @ w)

    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    code = recorded(reuses, x, w)
    assert len(code.dead) == 50
    assert code.names[-2:] == (MM, "aten.tanh.default")
    assert not code.dead & {len(code.names) - 1, len(code.names) - 2}


def test_what_is_written_to_later_is_not_dead() -> None:
    def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = (x + 1).mul_(2)
        return found @ w

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    code = recorded(in_place, x, w)
    assert dead_names(code) == [MM]


def test_what_draws_random_numbers_is_not_dead() -> None:
    code = recorded(lambda x: torch.rand_like(x) + x * 2, torch.randn(4))
    assert dead_names(code) == [MUL, ADD]


def test_what_the_host_reads_is_not_dead() -> None:
    code = recorded(lambda x: x * 2 if (x + 1).sum().item() > 0 else x * 3, torch.ones(4))
    assert dead_names(code) == [MUL]


def test_views_of_what_is_dead_are_dead_too() -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    code = recorded(lambda x, w: (x.view(6, 4) @ w).view(2, 3, 4).transpose(0, 1) + 1, x, w)
    assert dead_names(code) == [MM, ADD]


def test_other_operations_than_expected_are_run() -> None:
    x = torch.randn(4)
    code = recorded(lambda x: (x + 1) * 2, x)
    assert len(code.dead) == 2
    for function, held in (
        (lambda x: (x + 1) * 2, True),
        (lambda x: (x * 2) + 1, False),
        (lambda x: x + 1, False),
        (lambda x: ((x + 1) * 2) / 3, False),
    ):
        leaving = Leaving(code, poison=True)
        with leaving:
            found = function(x)
        assert leaving.held == held
        del found
    with Leaving(code, poison=True):
        assert torch.equal(x * 2, 2 * x)


def test_what_nobody_can_say_the_shape_of_is_run() -> None:
    """An operation without a meta implementation, of somebody's own."""
    with torch.library._scoped_library("poros_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        x = torch.randn(4)

        def function(x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, torch.ops.poros_test.twice(x))

        code = recorded(function, x)
        assert len(code.dead) == 1
        with Leaving(code, poison=True) as leaving:
            found = function(x)
    assert torch.equal(found, 2 * x)
    assert cast(Leaving, leaving).held


# in a block


@pytest.mark.parametrize(
    ("shape", "dead"),
    [
        (QWEN2.shapes["tiny"], LAST_LINEAR),
        (GEMMA3.shapes["tiny"], [MUL, MUL, ADD]),  # a norm comes last, which saves what it reads
        (GEMMA4.shapes["tiny"], None),
        (QWEN3_5.shapes["tiny"], LAST_LINEAR),
    ],
    ids=["qwen2", "gemma3", "gemma4", "qwen3_5"],
)
def test_replays_do_less(shape: Mapping[str, Any], dead: list[str] | None) -> None:
    eager = make(shape=shape, graphs=False)
    model = make(shape=shape)
    for step in range(3):
        plain(eager, step, CPU)
        plain(model, step, CPU)
    assert [dead_names(code) for code in of_model(model)] == ([] if dead is None else [dead] * 4)
    more, less = calls_in_a_step(eager), calls_in_a_step(model)
    for name in (MM, MUL, ADD):
        assert more[name] - less[name] == 4 * (dead or []).count(name)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2])
def test_gradients_are_the_same(block_size: int, device: torch.device) -> None:
    eager = run(make(device, graphs=False, block_size=block_size), plain, device)
    model = make(device, block_size=block_size)
    found = run(model, plain, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert [dead_names(code) for code in of_model(model)] == [LAST_LINEAR] * (4 // block_size)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_new_length_leaves_it_out_at_once(device: torch.device) -> None:
    eager = run(make(device, graphs=False), later, device, steps=6)
    model = make(device, capturer=RunningCapturer(), settled=True)
    _, found = counted_run(model, later, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    seen = handle_of(model).units.graphs._seen
    for entries in seen.values():
        backwards = [entry.backward[1] for entry in entries.values()]
        assert len(backwards) == 2
        assert all(dead_names(backward.dead) == LAST_LINEAR for backward in backwards)
    guessed = [e.backward[1].guessed for entries in seen.values() for e in entries.values()]
    assert any(guessed)
    proofs = handle_of(model).units.graphs._proofs
    (code, *_), block = of_model(model), next(iter(seen))
    assert proofs.proved(block, code) is code
    assert proofs.proved(next(iter(handle_of(make())._blocks.values())), code) is None


class Hoarding(torch.autograd.Function):
    """Keeps what autograd does not see, and needs it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.kept = tensor * 2
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.kept.sin()


def patched(
    change: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]], layer: int = 2
) -> Callable[[Any], None]:
    def patch(base: Any) -> None:
        changed = base.model.layers[layer]
        changed.forward = change(changed.forward)

    return patch


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_seems_dead_and_is_not_is_kept(device: torch.device) -> None:
    patch = patched(lambda inner: lambda hidden, **kw: Hoarding.apply(inner(hidden, **kw)))
    eager = run(make(device, graphs=False, patch=patch), plain, device)
    model = make(device, patch=patch)
    found = run(model, plain, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert handle_of(model).counters()["graph_replays"] == 3 * 8
    assert len(of_model(model)) == 3, "all but that layer"


def test_a_recompute_that_changes_is_captured_whole() -> None:
    """One operation more in the first step, which does not change a bit."""
    calls: list[int] = []

    def change(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            calls.append(1)
            return inner(hidden.clone() if len(calls) < 5 else hidden, **kwargs)

        return forward

    eager = run(make(graphs=False), plain, CPU)
    capturer = RunningCapturer()
    model = make(patch=patched(change), capturer=capturer)
    found = run(model, plain, CPU)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert handle_of(model).counters()["graph_replays"] == 3 * 8
    assert len(of_model(model)) == 4
    assert capturer.tried == 8 + 1, "once with and once without"


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_random_numbers_that_nobody_uses_are_drawn(device: torch.device) -> None:
    """The next layer of the block draws after them."""

    def change(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            found = inner(hidden, **kwargs)
            torch.rand_like(found)
            return found

        return forward

    patch = patched(change, layer=0)
    eager = run(make(device, graphs=False, block_size=2, patch=patch), plain, device)
    model = make(device, block_size=2, patch=patch)
    found = run(model, plain, device)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert len(of_model(model)) == 2


def test_nothing_is_followed_where_something_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled code does not run as it is while somebody follows operations."""
    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", Counter({"total": 1}))
    model = make()
    for step in range(3):
        plain(model, step, CPU)
    assert handle_of(model).counters()["graph_replays"] == 2 * 8
    assert not of_model(model)


def test_something_is_compiled_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = make(), make(graphs=False)
    plain(model, 0, CPU)
    assert len(of_model(model)) == 4
    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", Counter({"total": 1}))
    for step in range(2):
        plain(model, step, CPU)
    for name in (MM, MUL, ADD):
        assert calls_in_a_step(model)[name] == calls_in_a_step(eager)[name]


def test_a_recompute_that_cannot_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory is too short, or an operation does not let itself be followed."""

    def refuses(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no rule for this mode")

    eager = run(make(graphs=False), plain, CPU)
    monkeypatch.setattr(Recording, "__torch_dispatch__", refuses)
    model = make()
    found = run(model, plain, CPU)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert not of_model(model)
    assert handle_of(model).counters()["graph_replays"] == 3 * 8
