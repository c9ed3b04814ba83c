"""Units that wait on the device for a slot, in memory that is idle between two losses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poros
from poros_core.host_store import HostStore
from poros_core.prepare import prepared_of
from poros_core.ring import StagingRing
from poros_core.schedule import upcoming_backward
from poros_core.settings import Settings
from poros_runtimes.streamed import activations, ahead, units
from poros_runtimes.streamed.ahead import Ahead, IdleMemory
from poros_runtimes.streamed.lane import HostLane
from poros_runtimes.streamed.runtime import _check_copy_ahead
from semantics.arms import FP32, NF4, Arm, Recipe, batches, compare, play
from semantics.lanes import EarlyLane, LateLane

CPU = torch.device("cpu")


class Lent:
    """Memory for so many units, as many more after a backward, and whether it is out."""

    count = 3
    more = 2
    made: ClassVar[list[Lent]] = []

    def __init__(self, device: torch.device) -> None:
        self.out: list[weakref.ref[Any]] = []
        self.times = 0
        Lent.made.append(self)

    def borrow(self, nbytes: int, *, tokens: int, after: bool = False) -> list[torch.Tensor]:
        count = self.more if after else self.count
        memory = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        self.out += [weakref.ref(each.untyped_storage()) for each in memory]
        self.times += not after
        return memory

    def returned(self) -> None:
        assert not self.there
        self.out.clear()

    @property
    def there(self) -> int:
        return sum(each() is not None for each in self.out)


@pytest.fixture(autouse=True)
def lent(monkeypatch: pytest.MonkeyPatch) -> type[Lent]:
    monkeypatch.setattr(Lent, "made", [])
    monkeypatch.setattr(units, "IdleMemory", Lent)
    monkeypatch.setattr(
        "poros_runtimes.streamed.first_steps.FirstSteps.going_on", lambda self: False
    )
    return Lent


def handle_of(arm: Arm) -> Any:
    prepared = prepared_of(arm.model)
    assert prepared is not None
    return prepared.handle


def both(script: Callable[[Arm], None], recipe: Recipe = FP32, **options: Any) -> Arm:
    """Run a script resident and with copies ahead, and compare all that it noted."""
    resident = play(script, recipe, streamed=False, late=False)
    streamed = play(script, recipe, streamed=True, late=False, copy_ahead=True, **options)
    compare(resident.notes, streamed.notes)
    return streamed


def several(arm: Arm) -> None:
    """Plain steps, several forwards before a backward, an evaluation, several backwards of one."""
    optimizer = arm.optimizer()
    for seed in range(3):
        arm.train(batches(1, seed=seed), optimizer)
    arm.train(batches(2, seed=3), optimizer)
    losses = [arm.model(**batch).loss for batch in batches(2, seed=4)]
    torch.stack(losses).sum().backward()
    arm.model.eval()
    with torch.no_grad():
        arm.note("between", arm.model(**batches(1, seed=5)[0]).logits)
    arm.model.train()
    loss = arm.model(**batches(1, seed=6)[0]).loss
    loss.backward(retain_graph=True)
    loss.backward()
    arm.step(optimizer)
    arm.train(batches(1, seed=7), optimizer)


def plain(arm: Arm) -> None:
    optimizer = arm.optimizer()
    for _ in range(3):
        arm.train(batches(1), optimizer)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize(
    "lanes",
    [(HostLane, HostLane), (LateLane, LateLane), (LateLane, EarlyLane), (EarlyLane, LateLane)],
    ids=["at once", "late", "ahead early", "ahead late"],
)
def test_the_bits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, lanes: tuple[type[Any], type[Any]], count: int
) -> None:
    """Whichever of the two streams runs first."""
    monkeypatch.setattr(Lent, "count", count)
    kinds = iter([*lanes, *lanes])
    monkeypatch.setattr(units, "make_lane", lambda device: next(kinds)())
    arm = both(several)
    window = handle_of(arm).units.window
    assert window.ahead.copies > 0


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("which", [0, 1])
def test_an_interrupt_in_a_copy(monkeypatch: pytest.MonkeyPatch, which: int, number: int) -> None:
    """Of the copies into slots, or of those into what is borrowed, so many are issued."""
    left = [0]

    class Breaking(LateLane):
        def copy(self, *args: Any, **kwargs: Any) -> Any:
            if self is lanes[which] and left[0]:
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            return super().copy(*args, **kwargs)

    lanes: list[Breaking] = []
    monkeypatch.setattr(units, "make_lane", lambda device: lanes.append(Breaking()) or lanes[-1])

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(2), optimizer)
        left[0] = number if arm.streamed else 0
        broke = False
        try:
            arm.model(**batches(1)[0]).loss.backward()
        except KeyboardInterrupt:  # nothing keeps its frames, and what they refer to
            broke = True
        assert broke is arm.streamed
        arm.model.zero_grad()
        torch.manual_seed(5)
        with torch.no_grad():
            arm.note("after", arm.model(**batches(1)[0]).logits)
        arm.train(batches(1, seed=1), optimizer)

    both(script)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (NF4, {}),
        (FP32, {"block_size": 2}),
        (FP32, {"offload_activations": True}),
        (FP32, {"vram_budget": "400kB"}),
    ],
    ids=["nf4", "blocks", "activations", "budget"],
)
def test_with_other_settings(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(units, "make_lane", lambda device: LateLane())
    monkeypatch.setattr(activations, "make_lane", lambda device: LateLane())
    arm = both(several, recipe, **options)
    assert handle_of(arm).units.window.ahead.copies > 0


def test_what_waits_is_copied_from_the_host_once() -> None:
    without = play(plain, FP32, streamed=True, late=False)
    arm = both(plain)
    window = handle_of(arm).units.window
    total, usual = (handle_of(each).counters()["copies"] for each in (arm, without))
    assert 0 < window.ahead.copies < total <= usual


def test_memory_is_given_back_before_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()

        def note(*args: Any) -> None:
            found.append(Lent.made[0].there if Lent.made else 0)

        hook = arm.model.get_output_embeddings().register_forward_pre_hook(note)
        for seed in range(3):
            arm.train(batches(1, seed=seed), optimizer)
            found.append(Lent.made[0].there if Lent.made else 0)
        hook.remove()

    both(script)
    assert found[-6:] == [0, 5] * 3
    assert Lent.made[0].times == 3


def test_a_forward_without_gradients_or_with_most_tokens_so_far_gives_memory_back_first() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(1), optimizer)
        there = lambda: [each.there for each in Lent.made]  # noqa: E731
        if Lent.made:
            assert there() == [5]
        seen: list[list[int]] = []
        decoder = arm.model.get_base_model().model
        hook = decoder.layers[0].register_forward_pre_hook(lambda *args: seen.append(there()))
        batch = batches(1, seed=1)[0]
        with torch.no_grad():
            arm.model(**batch)
        arm.train(batches(1), optimizer)
        twice = {name: torch.cat([each, each]) for name, each in batch.items()}
        arm.train([twice], optimizer)
        arm.train(batches(1), optimizer)
        arm.train([twice], optimizer)
        hook.remove()
        if Lent.made:
            # evaluation, the step after it, twice as many tokens, fewer again, as many again
            assert seen == [[0], [0], [0], [5], [5]]

    both(script)


def test_nothing_is_out_at_a_loss_of_several_forwards() -> None:
    found: list[int] = []

    def note(*args: Any) -> None:
        found.extend(each.there for each in Lent.made)

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        hook = arm.model.get_output_embeddings().register_forward_pre_hook(note)
        for _ in range(2):
            losses = []
            for batch in batches(2):
                output = arm.model(**batch)
                output.logits.register_hook(note)
                losses.append(output.loss)
            torch.stack(losses).sum().backward()
            note()
            arm.step(optimizer)
        hook.remove()

    both(script)
    assert found == [0, 0, 0, 0, 5] * 2


def test_an_evaluation_between_forward_and_backward_is_not_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    borrow = Lent.borrow

    def noted(self: Lent, nbytes: int, *, tokens: int, after: bool = False) -> list[torch.Tensor]:
        asked.append(tokens)
        return borrow(self, nbytes, tokens=tokens, after=after)

    monkeypatch.setattr(Lent, "borrow", noted)

    def script(arm: Arm) -> None:
        batch = batches(1)[0]
        loss = arm.model(**batch).loss
        with torch.no_grad():
            arm.model(**{name: torch.cat([each, each]) for name, each in batch.items()})
        loss.backward()
        arm.step(arm.optimizer())

    both(script)
    assert asked == [batches(1)[0]["input_ids"].numel()] * 2


def test_a_model_that_is_dropped_waits_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[LateLane] = []

    def make_lane(device: torch.device) -> LateLane:
        lanes.append(LateLane())
        return lanes[-1]

    monkeypatch.setattr(units, "make_lane", make_lane)
    arm = play(plain, FP32, streamed=True, late=False, copy_ahead=True)
    assert any(lane.queue for lane in lanes)
    assert Lent.made[0].there == 5
    del arm
    gc.collect()
    assert Lent.made[0].there == 0
    assert not lanes[1].queue


def test_a_forward_that_broke_off_leaves_nothing_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A unit is on its way to its slot then, from memory that the next forward gives back."""
    monkeypatch.setattr(units, "make_lane", lambda device: LateLane())

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(1), optimizer)
        mlp = arm.model.get_base_model().model.layers[1].mlp

        def breaks(*args: Any) -> None:
            raise KeyboardInterrupt

        hook = mlp.register_forward_pre_hook(breaks)
        with pytest.raises(KeyboardInterrupt):
            arm.model(**batches(1)[0])
        hook.remove()
        with torch.no_grad():
            arm.note("after", arm.model(**batches(1)[0]).logits)
        arm.train(batches(1), optimizer)

    both(script)


def test_unprepare_gives_memory_back() -> None:
    arm = play(plain, FP32, streamed=True, late=False, copy_ahead=True)
    assert Lent.made[0].there == 5
    poros.unprepare(arm.model)
    assert Lent.made[0].there == 0


def test_an_optimizer_on_the_host_has_the_memory_to_itself() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        if arm.streamed:
            poros.offload_optimizer(optimizer)

        def note(*args: Any) -> None:
            if Lent.made:
                assert [each.there for each in Lent.made] == [0]

        optimizer.register_step_pre_hook(note)
        for seed in range(3):
            arm.train(batches(1, seed=seed), optimizer)

    both(script)


def test_more_is_borrowed_when_a_backward_is_behind_unless_it_was_in_vain() -> None:
    """An optimizer on the host takes the memory before a forward comes."""
    seen: list[tuple[int, ...]] = []

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        handle = None
        if arm.streamed:
            handle = poros.offload_optimizer(optimizer)
        for seed in range(6):
            if seed == 3 and handle is not None:
                handle.remove()
            arm.model(**batches(1, seed=seed)[0]).loss.backward()
            seen.extend((each.there,) for each in Lent.made)
            arm.step(optimizer)
            seen.extend((each.there,) for each in Lent.made)

    both(script)
    # what was lent last time is known to be wanted; without that, one step later it is not
    assert seen == [(5,), (0,), (3,), (0,), (3,), (0,), (3,), (3,), (5,), (5,), (5,), (5,)]


def test_several_forwards_borrow_more_after_the_last_backward() -> None:
    found: list[int] = []

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(1), optimizer)
        losses = [arm.model(**batch).loss for batch in batches(2, seed=1)]
        for loss in reversed(losses):
            loss.backward()
            found.extend(each.there for each in Lent.made)
        arm.step(optimizer)

    both(script)
    assert found == [0, 5]


def test_a_graph_that_is_retained_keeps_the_rest_free() -> None:
    found: list[int] = []

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        loss = arm.model(**batches(1)[0]).loss
        for retain in (True, False):
            loss.backward(retain_graph=retain)
            found.extend(each.there for each in Lent.made)
        arm.step(optimizer)

    both(script)
    assert found == [3, 5]


def test_nothing_is_copied_ahead_where_it_cannot_be() -> None:
    arm = play(plain, FP32, streamed=False, late=False)
    with pytest.raises(poros.SettingsError, match="runtime='streamed'"):
        poros.prepare(arm.model, copy_ahead=True, runtime="resident", verbose=False)
    store = HostStore(CPU, ring=StagingRing(CPU))
    with pytest.raises(poros.SettingsError, match="host='pinned'"):
        _check_copy_ahead(Settings(copy_ahead=True), store)


def test_copy_ahead_is_yes_or_no() -> None:
    with pytest.raises(poros.SettingsError, match="copy_ahead must be True or False"):
        poros.prepare(torch.nn.Linear(1, 1), copy_ahead="yes")  # type: ignore[arg-type]


# -- what is wanted --------------------------------------------------------------------------------


class Image:
    """A unit of one byte."""

    nbytes = 1

    def bytes_for_copy(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def copied(self, event: object) -> None:
        """Nothing is kept."""


class Several:
    def __init__(self, count: int) -> None:
        self.count = count

    def borrow(self, nbytes: int, *, tokens: int, after: bool = False) -> list[torch.Tensor]:
        return [torch.empty(nbytes, dtype=torch.uint8) for _ in range(self.count)]

    def returned(self) -> None:
        """Nothing is noted."""


@given(
    layers=st.integers(3, 12),
    slots=st.integers(2, 4),
    berths=st.integers(1, 6),
    layer=st.integers(0, 12),
)
def test_what_will_be_missing_first_is_wanted(
    layers: int, slots: int, berths: int, layer: int
) -> None:
    """Against a search over which units miss their slot, one after the other."""
    layer = min(layer, layers)
    upcoming = upcoming_backward(layer, lowest=0, layers=layers)
    present = set(range(layer, min(layers, layer + slots)))
    waiting = Ahead(Several(berths), lane=HostLane(), nbytes=1, poison=False)
    waiting.begin_forward(1, outstanding=False)
    waiting.start()
    waiting.fetch(
        upcoming,
        present=present,
        conflicts=lambda unit: [
            n for n in range(layers) if n != unit and n % slots == unit % slots
        ],
        image=lambda unit: Image(),  # type: ignore[arg-type, return-value]
    )
    in_slots = {unit % slots: unit for unit in present}
    misses: list[int] = []
    for unit in upcoming:
        if in_slots.get(unit % slots) != unit:
            in_slots[unit % slots] = unit
            if unit not in misses:
                misses.append(unit)
    assert {unit for unit in range(layers) if waiting.take(unit)} == set(misses[:berths])
    assert waiting.copies == min(berths, len(misses))


SIZE = 64 << 20


@pytest.fixture
def idle() -> torch.device:
    """A device of which the allocator holds twelve times ``SIZE`` that nobody uses."""
    device = torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()
    logits = [torch.empty(3 * SIZE, dtype=torch.uint8, device=device) for _ in range(4)]
    del logits
    return device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_only_idle_memory_is_borrowed(idle: torch.device) -> None:
    reserved = torch.cuda.memory_reserved(idle)
    memory = IdleMemory(idle)
    borrowed = memory.borrow(SIZE, tokens=1)
    assert len(borrowed) == int(ahead._SHARE * 12)
    assert torch.cuda.memory_reserved(idle) == reserved
    del borrowed
    memory.returned()
    held = [torch.empty(3 * SIZE, dtype=torch.uint8, device=idle) for _ in range(4)]
    assert torch.cuda.memory_reserved(idle) == reserved, "nothing is left in pieces"
    assert not memory.borrow(SIZE, tokens=2), "nothing is idle"
    del held
    memory.returned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_less_is_borrowed_once_more_had_to_be_reserved(idle: torch.device) -> None:
    memory = IdleMemory(idle)
    borrowed = memory.borrow(SIZE, tokens=1)
    more = torch.empty(12 * SIZE, dtype=torch.uint8, device=idle)
    del borrowed, more
    memory.returned()
    assert torch.cuda.memory_reserved(idle) < 12 * SIZE, "what was reserved is given back"
    again = torch.empty(12 * SIZE, dtype=torch.uint8, device=idle)
    del again
    assert len(memory.borrow(SIZE, tokens=1)) == int(ahead._LESS * int(ahead._SHARE * 12))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_idle_is_looked_up_for_each_length_and_when_more_is_reserved(
    idle: torch.device,
) -> None:
    memory = IdleMemory(idle)
    held = [torch.empty(3 * SIZE, dtype=torch.uint8, device=idle) for _ in range(2)]
    assert len(memory.borrow(SIZE, tokens=1)) == int(ahead._SHARE * 6)
    del held
    assert len(memory.borrow(SIZE, tokens=1)) == int(ahead._SHARE * 6)
    assert len(memory.borrow(SIZE, tokens=2)) == int(ahead._SHARE * 12)
    memory.returned()
    more = [torch.empty(3 * SIZE, dtype=torch.uint8, device=idle) for _ in range(6)]
    del more
    assert len(memory.borrow(SIZE, tokens=1)) == int(ahead._SHARE * 18)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_could_not_be_reserved_again_is_not_lent(idle: torch.device) -> None:
    """An optimizer that finds too little must be able to have more."""
    total = torch.cuda.mem_get_info(idle)[1]
    reserved = torch.cuda.memory_reserved(idle)
    try:
        for spare, count in ((0, 0), (3 * SIZE, 3)):
            torch.cuda.set_per_process_memory_fraction((reserved + spare + SIZE // 2) / total)
            memory = IdleMemory(idle)
            borrowed = memory.borrow(SIZE, tokens=1)
            assert len(borrowed) == count
            assert not memory.borrow(SIZE, tokens=1, after=True)
            del borrowed
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_is_borrowed_after_a_backward(idle: torch.device) -> None:
    memory = IdleMemory(idle)
    borrowed = memory.borrow(SIZE, tokens=1)
    left = 12 - len(borrowed)
    more = memory.borrow(SIZE, tokens=1, after=True)
    assert len(more) == int(ahead._SHARE_AFTER * left)
    del borrowed, more
    memory.returned()
    borrowed = memory.borrow(SIZE, tokens=1)
    beyond = torch.empty(12 * SIZE, dtype=torch.uint8, device=idle)
    assert not memory.borrow(SIZE, tokens=1, after=True), "others had to reserve memory meanwhile"
    del borrowed, beyond
    memory.returned()
    assert len(memory.borrow(SIZE, tokens=1)) <= int(ahead._LESS * int(ahead._SHARE * 12))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_graph_reserves_does_not_count(idle: torch.device) -> None:
    memory = IdleMemory(idle)
    memory.borrow(SIZE, tokens=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()  # torch.cuda.graph would empty the allocator's cache
        torch.empty(3 * SIZE, dtype=torch.uint8, device=idle).fill_(1)
        graph.capture_end()
    memory.returned()
    assert len(memory.borrow(SIZE, tokens=1)) == int(ahead._SHARE * 12)
