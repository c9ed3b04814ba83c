"""Several micro-batches block by block: the bits of an ordinary loop, for two copies of a layer."""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import copy
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import poros
from poros_core.plugins import plugins
from poros_core.prepare import prepared_of
from poros_runtimes.streamed.cuts import Cut, Entry
from poros_runtimes.streamed.graphs import GraphExecutor
from poros_runtimes.streamed.routine import Ambient, Routine
from semantics.arms import SOME_LINEAR, Batch, batches, compare, layers_of
from semantics.races import watch

PARTS = 3
LAYERS = 3
Loss = Callable[[Any, Any], torch.Tensor]


def threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("poros micro-batch")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every thread of every test has ended with it."""
    yield
    assert not threads_left()


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


_BUILT: dict[str, nn.Module] = {}


def build(
    family: str = "qwen2",
    shape: str = "tiny",
    *,
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    **lora: Any,
) -> Any:
    """Return a tiny model with LoRA whose B is not zero, the same for the same arguments."""
    key = repr((family, shape, dtype, config, lora))
    if key not in _BUILT:
        entry = plugins().families.get(family)
        assert entry is not None
        fewer = {"num_hidden_layers": LAYERS} if family == "qwen2" else {}
        settings = {**entry.value.shapes[shape], **fewer, **(config or {})}
        kind = settings.pop("model_type")
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
        usual: dict[str, Any] = {
            "target_modules": ["q_proj", "down_proj"],
            "r": 4,
            "init_lora_weights": False,
        }
        _BUILT[key] = get_peft_model(base, LoraConfig(**{**usual, **lora})).train()
    return copy.deepcopy(_BUILT[key])


class Run:
    """One arm: a model, its optimizer, and what was noted."""

    def __init__(self, model: Any, *, streamed: bool, loss: Loss = own_loss, **options: Any):
        self.model = model
        self.streamed = streamed
        self.loss = loss
        self.notes: list[tuple[str, torch.Tensor | None]] = []
        if streamed:
            poros.prepare(model, verbose=False, **options)
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=0.01)

    @property
    def handle(self) -> Any:
        prepared = prepared_of(self.model)
        assert prepared is not None
        return prepared.handle

    def losses(self, data: Sequence[Any], *, scale: float | None = None) -> list[torch.Tensor]:
        """Accumulate; the resident arm by the loop that the streamed one stands for."""
        if self.streamed:
            return poros.accumulate(self.model, data, scale=scale, loss=self.loss)
        found = []
        for batch in data:
            loss = self.loss(self.model, batch)
            (loss / len(data) if scale is None else loss * scale).backward()
            found.append(loss.detach())
        return found

    def note(self, name: str, values: Mapping[str, torch.Tensor | None]) -> None:
        for key, value in values.items():
            kept = None if value is None else value.detach().clone()
            self.notes.append((f"{name} {key}", kept))

    def step(self, losses: Sequence[torch.Tensor]) -> None:
        self.note("loss", {str(i): loss for i, loss in enumerate(losses)})
        self.note("grad", {name: param.grad for name, param in self.params.items()})
        norm = nn.utils.clip_grad_norm_(self.params.values(), 0.05)
        self.note("norm", {"": norm})
        self.optimizer.step()
        for name, param in self.params.items():
            self.note(name, self.optimizer.state.get(param, {}))
        self.optimizer.zero_grad()
        self.note("weight", self.params)

    def train(self, steps: int = 2, *, scale: float | None = None) -> Run:
        for step in range(steps):
            self.step(self.losses(batches(PARTS, seed=step), scale=scale))
        return self


Script = Callable[[Run], object]


def twins(script: Script, model: Any, *, loss: Loss = own_loss, **options: Any) -> Run:
    """Run a script resident and streamed from one model; compare all that they noted."""
    resident = Run(copy.deepcopy(model), streamed=False, loss=loss)
    script(resident)
    streamed = Run(model, streamed=True, loss=loss, **options)
    script(streamed)
    compare(resident.notes, streamed.notes)
    return streamed


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "size"),
    [
        ("qwen2", "tiny", torch.float32, 1),
        ("gemma3", "tiny", torch.bfloat16, 2),
        ("qwen3_5", "tiny", torch.float32, 1),
        ("gemma4", "tiny-e2b", torch.float32, 2),
        pytest.param("qwen2", "tiny", torch.bfloat16, "all", marks=pytest.mark.slow),
        pytest.param("gemma4", "tiny", torch.float32, 2, marks=pytest.mark.slow),
        pytest.param("gemma4", "tiny-e2b", torch.float32, 1, marks=pytest.mark.slow),
    ],
)
def test_families(family: str, shape: str, dtype: torch.dtype, size: Any) -> None:
    model = build(family, shape, dtype=dtype, target_modules=[*SOME_LINEAR, "in_proj_qkv"])
    run = twins(lambda run: run.train(3), model, block_size=size)
    assert all(value.any() for name, value in run.notes if name.startswith("grad"))


def autocast_loss(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return own_loss(model, batch)


def autocast_around(run: Run) -> None:
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=step == 0):
            losses = run.losses(batches(PARTS, seed=step))
        run.step(losses)


@pytest.mark.parametrize("around", [False, True])
def test_autocast(around: bool) -> None:
    model = build(modules_to_save=["lm_head"], config={"tie_word_embeddings": False})
    if around:
        twins(autocast_around, model)
    else:
        twins(Run.train, model, loss=autocast_loss)
    assert not torch.is_autocast_enabled("cpu")


def trained_ends(**config: Any) -> Any:
    return build(
        modules_to_save=["embed_tokens", "lm_head"], config={"tie_word_embeddings": False, **config}
    )


def embedding_adapters() -> Any:
    """Per-layer inputs carry gradients into every block, from one graph before them."""
    return build(
        "gemma4",
        "tiny-e2b",
        target_modules=r".*(embed_tokens|embed_tokens_per_layer|q_proj|per_layer_projection)",
    )


def inputs_that_require_gradients() -> Any:
    model = build()
    model.enable_input_require_grads()
    return model


def late_adapters() -> Any:
    return build(layers_to_transform=[1])


@pytest.mark.parametrize(
    "make", [trained_ends, embedding_adapters, inputs_that_require_gradients, late_adapters]
)
def test_what_trains_outside_of_blocks(make: Callable[[], Any]) -> None:
    twins(Run.train, make(), block_size=2)


def embedded_loss(model: Any, batch: Any) -> torch.Tensor:
    """Like a soft prompt of the user's own: a leaf that all micro-batches share."""
    prompt = model.prompt.expand(len(batch["input_ids"]), -1, -1)
    hidden = model.get_input_embeddings()(batch["input_ids"])
    mask = torch.cat([torch.ones_like(prompt[..., 0]).long(), batch["attention_mask"]], 1)
    labels = torch.cat([torch.full(prompt.shape[:2], -100), batch["labels"]], 1)
    return own_loss(
        model,
        {
            "inputs_embeds": torch.cat([prompt, hidden], 1),
            "attention_mask": mask,
            "labels": labels,
        },
    )


def test_embeddings_of_the_users_own() -> None:
    model = build()
    model.prompt = nn.Parameter(torch.randn(1, 3, 64))
    twins(Run.train, model, loss=embedded_loss)


def hidden_loss(model: Any, batch: Batch) -> torch.Tensor:
    output = model(**batch, output_hidden_states=True)
    return output.loss + sum(hidden.float().square().mean() for hidden in output.hidden_states)


def preference_loss(model: Any, batch: Batch) -> torch.Tensor:
    """A reference without gradients, from the same model, before and after."""
    with torch.no_grad(), model.disable_adapter():
        reference = model(**batch).logits
    policy = model(**batch).logits
    with torch.no_grad():
        generated = model.generate(batch["input_ids"][:1], max_new_tokens=2, do_sample=False)
    return (policy - reference).square().mean() * generated.shape[1]


@pytest.mark.parametrize("loss", [hidden_loss, preference_loss])
def test_losses_of_the_users_own(loss: Loss) -> None:
    twins(Run.train, build(), loss=loss, block_size=2)


def test_scales() -> None:
    twins(lambda run: run.train(1, scale=0.3), build())


def test_a_model_that_evaluates_may_have_dropout() -> None:
    twins(Run.train, build(lora_dropout=0.1).eval())


VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


def test_losses_see_the_state_of_the_callers_thread() -> None:
    packed: dict[bool, list[torch.Size]] = {}

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        assert bool(threads_left()) == (threading.current_thread() is not threading.main_thread())
        assert VARIABLE.get() == 1
        assert torch.get_default_device() == torch.device("meta")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_cache_enabled()
        return own_loss(model, batch)

    def script(run: Run) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.setdefault(run.streamed, []).append(tensor.shape)
            return tensor

        data = batches(2)
        token = VARIABLE.set(1)
        with (
            torch.device("meta"),
            torch.autocast("cpu", torch.float16, enabled=False, cache_enabled=False),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            losses = run.losses(data)
        VARIABLE.reset(token)
        run.step(losses)

    twins(script, build(), loss=loss)
    hidden = (*batches(1)[0]["input_ids"].shape, 64)
    assert packed[True].count(hidden) >= LAYERS, "what blocks save"
    assert any(shape[-1:] == (96,) for shape in packed[True]), "what losses save"


class Stream:
    """Notes which stream waits for which."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_a_stream_of_the_routines_own_is_ordered_with_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    streams, devices = [Stream("side", log)], [1]

    @contextlib.contextmanager
    def entered(stack: list[Any], value: Any) -> Iterator[None]:
        stack.append(value)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered(streams, stream))
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered(devices, device))
    cuda = torch.device("cuda", 1)
    routines = Ambient.of_this_thread(cuda)
    streams[:], devices[:] = [Stream("main", log)], [0]
    with routines.entered(cuda):
        assert (streams[-1].name, devices[-1]) == ("side", 1)
        assert log == ["side waits for main"]
    assert (streams[-1].name, devices[-1]) == ("main", 0)
    assert log == ["side waits for main", "main waits for side"]
    with Ambient.of_this_thread(cuda).entered(cuda):
        assert len(log) == 2, "the same stream is in order as it is"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_losses_on_a_stream_of_their_own(graphs: Any) -> None:
    """Units and head come for the stream on which a loss computes."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            found = own_loss(model, {name: value.cuda() for name, value in batch.items()})
        current.wait_stream(side)
        return found

    model = build(modules_to_save=["lm_head"], config={"tie_word_embeddings": False}).cuda()
    run = twins(lambda run: run.train(4), model, loss=loss, graphs=graphs)
    assert (run.handle.counters()["graph_replays"] > 0) == (graphs == "on")


def test_hooks_and_an_optimizer_inside_of_the_backward() -> None:
    """Hooks on a layer, its parameters and their accumulation fire as in the loop."""

    def script(run: Run) -> None:
        seen: list[torch.Tensor] = []
        layers_of(run.model)[1].register_full_backward_hook(
            lambda module, inputs, outputs: seen.append(outputs[0].clone())
        )
        name, param = next((n, p) for n, p in run.params.items() if "layers.2" in n)
        param.register_hook(lambda gradient: gradient * 2)
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        run.train(2)
        run.note("seen", {f"{name} {i}": value for i, value in enumerate(seen)})
        assert len(seen) == 2 * 2 * PARTS

    def sorted_notes(run: Run) -> list[tuple[str, torch.Tensor | None]]:
        """What different hooks saw, each by itself: between them the order is another."""
        hooked = [v for n, v in run.notes if n.startswith("seen")]
        rest = [(n, v) for n, v in run.notes if not n.startswith("seen")]
        return rest + [("hooked", v) for v in sorted(hooked, key=lambda v: v.ndim)]

    model = build()
    resident, streamed = Run(copy.deepcopy(model), streamed=False), Run(model, streamed=True)
    script(resident)
    script(streamed)
    compare(sorted_notes(resident), sorted_notes(streamed))


def test_the_users_checkpointing_is_left_as_it_is() -> None:
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run = twins(Run.train, model)
    assert run.model.is_gradient_checkpointing


def test_between_ordinary_steps_and_with_the_optimizer_on_the_host() -> None:
    def script(run: Run) -> None:
        if run.streamed:
            poros.offload_optimizer(run.optimizer)
        run.train(1)
        own_loss(run.model, batches(1)[0]).backward()
        run.train(1)  # gradients that are there already are added to
        run.model.eval()
        with torch.no_grad():
            run.note("evaluated", {"": own_loss(run.model, batches(1)[0])})
        run.model.train()
        run.train(1)

    run = twins(script, build(), vram_budget="1GB")
    assert run.handle.counters()["resident_units"] == LAYERS


def test_a_tensor_that_enters_several_blocks_adds_up_from_the_last() -> None:
    factors = [torch.full((1,), value) for value in (1e8, 1.0, -1e8, 3.0)]
    ordinary = torch.ones(1, requires_grad=True)
    hidden = torch.zeros(1)
    shared = ordinary * 1
    for factor in factors:
        hidden = hidden + shared * factor
    hidden.backward()
    leaf = torch.ones(1, requires_grad=True)
    shared = leaf * 1
    entry = Entry()
    cuts = [Cut(entry) for _ in factors]
    hidden = torch.zeros(1)
    for cut, factor in zip(cuts, factors, strict=True):
        hidden, given = cut.enter([hidden, shared])
        (hidden,) = cut.leave([hidden + given * factor])
    hidden.backward()
    assert leaf.grad is None
    for cut in reversed(cuts):
        assert cut.wanted
        cut.backward()
    entry.backward()
    assert torch.equal(leaf.grad, ordinary.grad)
    assert leaf.grad.item() != sum(factor.item() for factor in factors), "the order matters"
    with pytest.raises(poros.StateError, match="joins the hidden state"):
        cuts[0].enter([hidden * leaf])


# -- what it costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_the_base_streams_as_for_one_micro_batch(size: int) -> None:
    def streamed(run: Run, accumulate: Callable[[], object]) -> int:
        before = run.handle.counters()["bytes_streamed"]
        accumulate()
        return int(run.handle.counters()["bytes_streamed"]) - before

    run = Run(build(), streamed=True, block_size=size).train(1)
    one = streamed(run, lambda: own_loss(run.model, batches(1)[0]).backward())
    several = streamed(run, lambda: run.losses(batches(5)))
    assert several == one
    units = run.handle.units
    sizes = units.sizes.layers
    assert one >= 2 * sum(sizes) - 2 * (size + 1) * max(sizes) + units.sizes.head
    assert units.shared, "layers did not have to move out of the head's way"


def test_logits_are_there_of_one_micro_batch_at_a_time() -> None:
    logits: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        output = model(**batch)
        logits.append(weakref.ref(output.logits.untyped_storage()))
        alive.append(sum(ref() is not None for ref in logits))
        return output.loss

    Run(build(), streamed=True, loss=loss).train(1)
    gc.collect()
    assert alive == [1] * PARTS


def test_activations_on_the_host() -> None:
    arriving: list[int] = []

    def script(run: Run) -> None:
        if run.streamed:
            kept = run.handle.units.activations
            bring_back = kept.bring_back

            def counted(*args: Any) -> torch.Tensor:
                found: torch.Tensor = bring_back(*args)
                arriving.append(len(kept._arriving) + 1)
                return found

            kept.bring_back = counted
        run.train(2)
        if run.streamed:
            assert not kept._arriving
            assert not kept._leaving

    run = twins(script, build(), offload_activations=True)
    assert len(arriving) == 2 * PARTS * (LAYERS - 1), "every block's but the last"
    assert max(arriving) == 3, "they come back in the order in which they are needed"
    assert run.handle.counters()["activation_bytes"] > 0


def test_hidden_states_leave_the_device() -> None:
    """Between forward and backward of three micro-batches, the last block's inputs alone."""
    hidden: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        found = own_loss(model, batch)
        alive.append(sum(ref() is not None for ref in hidden))
        return found

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        entered = args[0] if args else kwargs["hidden_states"]
        hidden.append(weakref.ref(entered.untyped_storage()))

    for offload, most in ((True, PARTS), (False, LAYERS * PARTS)):
        hidden.clear()
        alive.clear()
        run = Run(build(), streamed=True, loss=loss, offload_activations=offload)
        for layer in layers_of(run.model):
            layer.register_forward_pre_hook(note, with_kwargs=True)
        run.train(1)
        assert alive == [most] * PARTS


def test_stats_count_it_as_one_step() -> None:
    run = Run(build(), streamed=True).train(3)
    found = poros.stats(run.model)
    assert found.steps == 2
    assert found.tokens_per_second is not None
    assert found.step_seconds is not None
    tokens = sum(batch["input_ids"].numel() for batch in batches(PARTS, seed=1))
    assert found.tokens_per_second * found.step_seconds == pytest.approx(tokens, rel=0.3)


class FunctionCapturer:
    """Runs a captured function again where a device would replay a graph."""

    def capture(self, body: Callable[[], None]) -> Any:
        class Again:
            replay = staticmethod(body)

        return Again

    def has_room(self) -> bool:
        return True

    def lent(self) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        """Nothing was lent."""

    def reserve(self, nbytes: int) -> None:
        """There is nothing to spare."""


def test_graphs_are_replayed_for_every_micro_batch() -> None:
    def script(run: Run) -> None:
        if run.streamed:
            units = run.handle.units
            units.graphs = GraphExecutor(units.eager, units.device, FunctionCapturer())
        for step in range(2):
            (batch,) = batches(1, seed=step)
            run.step(run.losses([batch, *batches(2, seed=0, size=3), batch, batch]))

    run = twins(script, build())
    assert run.handle.counters()["graph_replays"] > LAYERS * 5
    assert run.handle.counters()["eager_blocks"] == 2 * LAYERS * 4, "four shapes, each seen once"


@pytest.mark.parametrize("graphs", [False, True])
def test_no_kernel_races_a_copy(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    lanes = watch(monkeypatch, graphs=graphs)
    twins(Run.train, trained_ends(), block_size=2, offload_activations=True)
    assert lanes[0].checks > 40


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "lora", "named"),
    [({}, 0.1, "lora_dropout"), ({"attention_dropout": 0.1}, 0.0, "self_attn")],
)
def test_dropout_is_refused_before_the_first_kernel(
    config: dict[str, Any], lora: float, named: str
) -> None:
    run = Run(build(config=config, lora_dropout=lora), streamed=True)
    run.model.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(poros.StateError, match=rf"{named}.*Set dropout to 0.*ordinary loop"):
        run.losses(batches(2))


def test_random_numbers_from_elsewhere_are_refused_before_a_gradient_is_there() -> None:
    run = Run(build(), streamed=True)
    embeddings = run.model.get_input_embeddings()
    noise = embeddings.register_forward_hook(lambda m, a, out: out + 0.1 * torch.randn_like(out))
    with pytest.raises(poros.StateError, match="Random numbers were drawn"):
        run.losses(batches(2))
    assert all(param.grad is None for param in run.params.values())
    noise.remove()
    run.train(1)


def tied_ends() -> Any:
    return build(
        modules_to_save=["embed_tokens"],
        config={"tie_word_embeddings": True},
        ensure_weight_tying=True,
    )


def shared_by_blocks() -> Any:
    model = build()
    first, second = (layers_of(model)[i].self_attn.q_proj for i in (0, 2))
    second.lora_A["default"].weight = first.lora_A["default"].weight
    return model


@pytest.mark.parametrize("make", [tied_ends, shared_by_blocks])
def test_a_parameter_with_uses_in_two_places_is_refused(make: Callable[[], Any]) -> None:
    run = Run(make(), streamed=True)
    with pytest.raises(poros.StateError, match=r"'.*' trains, and is used in more than one"):
        run.losses(batches(2))
    assert all(param.grad is None for param in run.params.values())
    own_loss(run.model, batches(1)[0]).backward()


def twice(model: Any, batch: Batch) -> torch.Tensor:
    return own_loss(model, batch) + own_loss(model, batch)


def nested(model: Any, batch: Batch) -> torch.Tensor:
    return poros.accumulate(model, [batch])[0]


def without_labels(model: Any, batch: Batch) -> torch.Tensor:
    return own_loss(model, {k: v for k, v in batch.items() if k != "labels"})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (twice, "calls the model twice with gradients"),
        (nested, "inside of a loss"),
        (without_labels, "Give each micro-batch labels"),
    ],
)
def test_losses_that_cannot_be_taken(loss: Loss, message: str) -> None:
    run = Run(build(), streamed=True, loss=loss)
    with pytest.raises(poros.StateError, match=message):
        run.losses(batches(2))


def test_arguments_that_cannot_be_taken() -> None:
    run = Run(build(), streamed=True)
    (batch,) = batches(1)
    with pytest.raises(poros.SettingsError, match="empty sequence"):
        poros.accumulate(run.model, [])
    with pytest.raises(poros.SettingsError, match="got a dict"):
        poros.accumulate(run.model, batch)  # type: ignore[arg-type]
    with pytest.raises(poros.SettingsError, match="got a int"):
        poros.accumulate(run.model, [7])
    with pytest.raises(poros.SettingsError, match="scale must be a number"):
        poros.accumulate(run.model, [batch], scale="mean")  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(poros.StateError, match="outside of torch.no_grad"):
        poros.accumulate(run.model, [batch])
    with pytest.raises(poros.PrepareError, match="not prepared"):
        poros.accumulate(build(), [batch])


# -- errors on the way -----------------------------------------------------------------------------


class Planned(Exception):
    pass


def fail_at(place: str) -> tuple[Loss, Callable[[Any], Any]]:
    """Return a loss that fails for the second micro-batch, and what plants a failure elsewhere."""
    calls: list[str] = []

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        calls.append("loss")
        if place == "before" and len(calls) == 2:
            raise Planned
        found = own_loss(model, batch)
        calls.append("after")
        if place == "after" and calls.count("after") == 2:
            raise KeyboardInterrupt
        return found

    def hook(*args: Any) -> None:
        calls.append("block")
        if calls.count("block") == {"forward": 2, "backward": PARTS + 2}.get(place):
            raise Planned

    return loss, hook


def plain_notes(*, found: list[tuple[str, torch.Tensor | None]] = []) -> Any:  # noqa: B006
    """Return what two steps of the resident model note."""
    if not found:
        found += Run(build(), streamed=False).train(2).notes
    return found


@pytest.mark.parametrize(
    ("place", "offload"),
    [("before", False), ("forward", True), ("after", False), ("backward", True)],
)
def test_after_an_exception_the_model_is_as_before(place: str, offload: bool) -> None:
    run = Run(build(), streamed=True, offload_activations=offload).train(1)
    run.loss, hook = fail_at(place)
    planted = layers_of(run.model)[1].mlp.register_forward_pre_hook(hook)
    with pytest.raises((Planned, KeyboardInterrupt)) as caught:
        run.losses(batches(PARTS))
    assert not threads_left()
    assert not run.handle.units.outstanding
    planted.remove()
    run.optimizer.zero_grad()
    run.loss = own_loss
    run.step(run.losses(batches(PARTS, seed=1)))
    assert caught.tb is not None, "what it holds is no obstacle"
    compare(plain_notes(), run.notes)
    assert run.handle.units.shared
    poros.unprepare(run.model)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt is raised, also where a shell started this process in the background and so
    made it ignore SIGINT."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_loss_runs() -> None:
    """It reaches the caller's thread, while the micro-batch's goes on beside it."""
    run = Run(build(), streamed=True).train(1)
    calls: list[str] = []

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        calls.append("loss")
        if len(calls) == 2:
            _thread.interrupt_main()
            time.sleep(0.2)
        return own_loss(model, batch)

    run.loss = loss
    with pytest.raises(KeyboardInterrupt):
        run.losses(batches(PARTS))
    assert not threads_left()
    assert len(calls) == 2
    run.optimizer.zero_grad()
    run.loss = own_loss
    run.step(run.losses(batches(PARTS, seed=1)))
    compare(plain_notes(), run.notes)


def test_an_interrupt_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    routine = Routine(lambda: ran.append(1), device=torch.device("cpu"), name="poros micro-batch 0")
    ran: list[int] = []
    start = routine._thread.start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(routine._thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        routine.resume()
    routine.close()
    assert not threads_left()

    def refused() -> None:
        raise RuntimeError("can't start new thread")

    other = Routine(lambda: ran.append(2), device=torch.device("cpu"), name="poros micro-batch 1")
    monkeypatch.setattr(other._thread, "start", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        other.resume()
    other.close()
    assert 2 not in ran


@pytest.mark.parametrize("where", ["loss", "block"])
def test_what_an_exception_held_goes_with_it(where: str) -> None:
    """Without waiting for the collector, which on a device would be too late."""
    held: list[weakref.ref[Any]] = []

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        found = own_loss(model, batch)
        held.append(weakref.ref(found))
        raise Planned

    def fail(module: Any, args: Any) -> None:
        held.append(weakref.ref(args[0]))
        raise Planned

    run = Run(build(), streamed=True, loss=loss if where == "loss" else own_loss)
    if where == "block":
        layers_of(run.model)[1].mlp.register_forward_pre_hook(fail)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(Planned):
            run.losses(batches(2))
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()


def test_nothing_stays_alive() -> None:
    run = Run(build(), streamed=True).train(1)
    gc.collect()
    gc.disable()
    try:
        before = len([o for o in gc.get_objects() if isinstance(o, torch.Tensor)])
        run.losses(batches(PARTS))
        run.optimizer.zero_grad()
        after = len([o for o in gc.get_objects() if isinstance(o, torch.Tensor)])
    finally:
        gc.enable()
    assert after <= before
