"""Walks over a prepared model beside torch's own: the same names, objects and order."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import poros
from poros_families.gemma3 import GEMMA3
from poros_families.qwen2 import QWEN2

WALKS = ("named_modules", "named_parameters", "train")
LORA = LoraConfig(r=4, target_modules="all-linear")


def adapted(shape: Mapping[str, Any] = QWEN2.shapes["tiny"], lora: LoraConfig = LORA) -> Any:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    return get_peft_model(base, lora)


def prepared(shape: Mapping[str, Any] = QWEN2.shapes["tiny"], lora: LoraConfig = LORA) -> Any:
    return poros.prepare(adapted(shape, lora), verbose=False)


@pytest.fixture(scope="module")
def shared() -> Any:
    """A model that tests leave as they found it."""
    return prepared()


def below(module: nn.Module) -> Iterator[nn.Module]:
    """Every module of a tree, found without a walk."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from below(child)


def take_away(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Take the walks off a model's instances; return what was taken."""
    ours = [
        (module, name)
        for module in {id(m): m for m in below(model)}.values()
        for name in WALKS
        if getattr(module.__dict__.get(name), "__module__", None) == "poros_runtimes.streamed.walks"
    ]
    return [(module, name, module.__dict__.pop(name)) for module, name in ours]


@contextmanager
def torchs_own(model: nn.Module) -> Iterator[None]:
    taken = take_away(model)
    assert len(taken) == 5, "two walks of each root, and train of what keeps the layers"
    try:
        yield
    finally:
        for module, name, walk in taken:
            module.__dict__[name] = walk


@contextmanager
def calls_of(code: CodeType) -> Iterator[list[None]]:
    """Note how often a function is entered; a generator, how often it goes on."""
    calls: list[None] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            calls.append(None)

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def everything(root: Any, around: list[nn.Module]) -> list[list[Any]]:
    """What each walk gives, with ordinary and with odd arguments, and from what is around."""
    first = next(iter(root._modules.values()))
    deep = next(m for m in below(root) if m._parameters)
    filled: set[Any] = set()
    found: list[Any] = [
        root.named_modules(),
        root.named_modules(None, "above", True),
        root.named_modules(prefix="above", remove_duplicate=False),
        root.named_modules(remove_duplicate=False),
        root.named_modules({deep}),
        root.named_modules({root, first}),
        root.named_modules(memo=filled, prefix="a.b"),
        root.modules(),
        root.modules(remove_duplicate=False),
        root.named_parameters(),
        root.named_parameters("above"),
        root.named_parameters("", False),
        root.named_parameters(remove_duplicate=False),
        root.parameters(),
        root.parameters(recurse=False),
        root.named_buffers(),
        *(module.named_modules() for module in around),
        *(module.named_parameters() for module in around),
    ]
    return [*(list(each) for each in found), sorted(map(id, filled))]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return a[0] == b[0] and a[1] is b[1]
    return a == b if isinstance(a, int) else a is b


def check(model: Any) -> None:
    """All walks of a prepared model and of the one that it wraps are torch's."""
    for root in (model, model.get_base_model(), model.base_model):
        first = next(iter(root._modules.values()))
        around: list[nn.Module] = [
            nn.Sequential(nn.Linear(2, 2), root),
            nn.ModuleList([first, root]),
        ]
        with torchs_own(model):
            wanted = everything(root, around)
        found = everything(root, around)
        assert len(wanted[0]) > 80
        for a, b in zip(wanted, found, strict=True):
            assert len(a) == len(b)
            assert all(map(same, a, b))


def flags(model: nn.Module) -> list[Any]:
    return [module.__dict__.get("training") for module in below(model)]


def check_train(model: Any) -> None:
    """``train`` and ``eval`` leave what torch's leave, from whatever was there."""
    for mode in (True, False):
        results = []
        for own in (True, False):
            for number, module in enumerate(below(model)):
                module.__dict__["training"] = bool(number % 3)
            if own:
                with torchs_own(model):
                    assert model.train(mode) is model
            else:
                assert (model.train() if mode else model.eval()) is model
            results.append(flags(model))
        assert results[0] == results[1]
        assert set(results[0]) == {mode}


# -- the same as torch's -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [QWEN2.shapes["tiny"], GEMMA3.shapes["tiny"]], ids=["q", "g"])
def test_walks_are_torchs(shape: Mapping[str, Any]) -> None:
    model = prepared({**shape, "tie_word_embeddings": True})
    base = model.get_base_model()
    assert base.lm_head.weight is base.get_input_embeddings().weight
    check(model)
    check_train(model)
    count = model.num_parameters(exclude_embeddings=True)
    with torchs_own(model):
        assert model.num_parameters(exclude_embeddings=True) == count
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    model.set_adapter("second")
    check(model)
    model.delete_adapter("default")
    check(model)
    check_train(model)


def test_dora_and_modules_to_save() -> None:
    """DoRA's layers have a ``train`` of their own, which drops what they keep for inference."""
    lora = LoraConfig(r=2, target_modules=["v_proj"], use_dora=True, modules_to_save=["lm_head"])
    model = prepared(lora=lora)
    check(model)
    check_train(model)
    magnitude = model.get_base_model().model.layers[1].self_attn.v_proj.lora_magnitude_vector
    magnitude["default"]._cache_store("weight-norm", 1)
    model.train()
    assert magnitude["default"]._cache_get("weight-norm", None) is None


def test_a_model_without_peft_above_it() -> None:
    """The two roots are one. Nothing is left of the walks, and what was there is there again."""
    base = adapted().get_base_model()
    before = [set(module.__dict__) for module in below(base)]
    poros.prepare(base, verbose=False)
    assert {"named_modules", "named_parameters"} <= set(base.__dict__)
    assert "train" in base.model.layers.__dict__
    found = [id(param) for param in base.parameters()]
    poros.unprepare(base)
    assert [id(param) for param in base.parameters()] == found
    assert [set(module.__dict__) for module in below(base)] == before


def test_changes_deep_inside_are_seen() -> None:
    model = prepared()
    layers = model.get_base_model().model.layers
    mlp, attention = layers[2].mlp, layers[1].self_attn
    mlp.act_fn = nn.Sequential(mlp.act_fn, nn.Dropout(0.0))
    check(model)
    mlp.act_fn[1] = nn.BatchNorm1d(3)
    check(model)
    attention.q_proj.lora_A["default"].weight = nn.Parameter(torch.zeros(4, 64))
    attention.q_proj.lora_B["default"].weight.requires_grad_(False)
    attention.extra = mlp.act_fn
    attention.again = attention.extra[1]
    attention.none = None
    attention.register_module("nothing", None)
    attention.register_parameter("missing", None)
    attention.tied = attention.q_proj.lora_A["default"].weight
    check(model)
    check_train(model)
    first = attention._modules.pop("q_proj")
    check(model)
    attention.q_proj = first
    del mlp.act_fn
    layers[3].mlp._modules = dict(reversed(layers[3].mlp._modules.items()))
    check(model)
    check_train(model)


ANOTHER = nn.Linear(1, 1)


class Walker(nn.Module):
    """Has walks and a ``train`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.modes: list[bool] = []

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        for name, module in super().named_modules(*args, **kwargs):
            yield name + "!", module
        yield "another", ANOTHER  # each time that it is asked

    def train(self, mode: bool = True) -> Any:
        self.modes.append(mode)
        return super().train(mode)


class Sets(nn.Module):
    """Does something of its own when an attribute is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, (value, "told") if name == "training" else value)


class Mirrors(nn.Module):
    """Keeps its flag elsewhere."""

    @property  # type: ignore[override]
    def training(self) -> bool:
        return bool(self.__dict__["kept"])

    @training.setter
    def training(self, value: bool) -> None:
        self.__dict__["kept"] = value


class Hides(nn.Module):
    """Has a child that ``train`` does not reach."""

    def children(self) -> Iterator[nn.Module]:
        return iter(())


def test_classes_with_a_walk_of_their_own() -> None:
    model = prepared()
    layers = model.get_base_model().model.layers
    walker, hides, sets, mirrors = Walker(), Hides(), Sets(), Mirrors()
    hides.inner = nn.Linear(2, 2)
    for name, module in (("a", walker), ("b", hides), ("c", sets), ("d", mirrors)):
        layers[1].mlp.add_module(name, module)
    layers[1].mlp.again = layers[2].mlp.again = walker
    check(model)
    assert any(name.endswith("mlp.a.inner!.weight") for name, _ in model.named_parameters())

    def told() -> list[bool]:
        walker.modes.clear()
        model.eval()
        assert hides.inner.training
        assert not hides.training
        assert sets.__dict__["training"] == (False, "told")
        assert mirrors.__dict__["kept"] is False
        return list(walker.modes)

    assert told() == [False, False], "once in each of its parents"
    with torchs_own(model):
        assert told() == [False, False]


def test_attributes_that_somebody_set() -> None:
    """Before and after the model was prepared, on a child, and around a walk."""
    model = adapted()
    layers = model.get_base_model().model.layers
    said: list[Any] = []

    def train(mode: bool = True) -> Any:
        said.append(mode)
        return layers

    layers.train = train
    poros.prepare(model, verbose=False)
    model.train()
    assert said == [True]
    poros.unprepare(model)
    assert layers.__dict__.pop("train") is train

    poros.prepare(model, verbose=False)
    layers[1].mlp.train = train
    layers[2].mlp.named_modules = lambda memo, prefix, remove: iter([(prefix + "?", layers[2])])
    layers[3].mlp.named_children = lambda: iter(())
    layers[3].mlp.act_fn.training = "kept"
    check(model)
    said.clear()
    model.eval()
    assert said == [False]
    assert layers[3].mlp.act_fn.training == "kept"
    for module, name in ((layers[2].mlp, "named_modules"), (layers[3].mlp, "named_children")):
        delattr(module, name)
    whole = list(model.named_modules())
    walk = model.named_modules
    model.named_modules = lambda *args, **kwargs: list(walk(*args, **kwargs))[:40]
    assert model.named_modules() == whole[:40]
    wanted = {id(p) for _, m in whole[:40] for p in m._parameters.values() if p is not None}
    assert {id(p) for p in model.parameters()} == wanted


def test_a_mode_that_is_none(shared: Any) -> None:
    layers = shared.get_base_model().model.layers
    for module in (shared, layers):
        with pytest.raises(ValueError, match="boolean"):
            module.train(1)
    assert layers.train(mode=False) is layers
    assert not layers[0].training
    shared.train()


def test_a_tree_that_holds_itself() -> None:
    model = prepared()
    layer = model.get_base_model().model.layers[3]
    layer.mlp._modules["loop"] = layer
    assert len(list(model.modules())) == len({id(m) for m in model.modules()})
    with pytest.raises(RecursionError):
        model.train()
    del layer.mlp._modules["loop"]
    check(model)


def test_a_tree_that_changes_under_a_walk() -> None:
    """The walk goes on through what is there when it comes to it."""

    def walked(walk: str, *, own: bool) -> list[str]:
        model = prepared()
        if own:
            take_away(model)
        names = []
        for name, found in getattr(model, walk)():
            names.append(f"{name} {type(found).__name__} {tuple(getattr(found, 'shape', ()))}")
            if name.endswith("layers.1.self_attn") or "layers.1.self_attn.q_proj.lora_B" in name:
                layers = model.get_base_model().model.layers
                layers[1].mlp = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
                layers[3] = nn.Linear(5, 5)
                layers[2].input_layernorm.weight = nn.Parameter(torch.zeros(7))
        return names

    for walk in ("named_modules", "named_parameters"):
        assert walked(walk, own=False) == walked(walk, own=True)
    model = prepared()
    walk = iter(model.named_modules())
    while not next(walk)[0].endswith("layers.1.mlp"):
        pass
    model.get_base_model().model.layers.append(nn.Tanh())
    with pytest.raises(RuntimeError, match="changed size"):
        list(walk)


def test_gradients_and_flags_through_the_walks(shared: Any) -> None:
    trained = [p for p in shared.parameters() if p.requires_grad]
    for param in trained:
        param.grad = torch.ones_like(param)
    shared.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in trained)
    shared.zero_grad()
    assert all(p.grad is None for p in trained)
    layer = shared.get_base_model().model.layers[0]
    layer.requires_grad_(False)
    assert len([p for p in shared.parameters() if p.requires_grad]) == len(trained) * 3 // 4
    for param in trained:
        param.requires_grad_(True)


# -- used, and gone ----------------------------------------------------------------------------


def test_torchs_walks_are_not_used(shared: Any) -> None:
    for root in (shared.get_base_model(), shared):
        for torchs in (nn.Module.named_modules, nn.Module._named_members):
            with calls_of(torchs.__code__) as calls:
                count = len(list(root.modules()))
                root.zero_grad()
            assert not calls
    wrapper = nn.Sequential(shared)
    with calls_of(nn.Module.named_modules.__code__) as calls:
        assert len(list(wrapper.modules())) == count + 1
    assert len(calls) < 1.1 * count, "each passes the wrapper's walk alone"
    with calls_of(nn.Module.train.__code__) as calls:
        shared.train()
    assert 0 < len(calls) < 10
    with torchs_own(shared), calls_of(nn.Module.train.__code__) as calls:
        shared.train()
    assert len(calls) > 300


def test_a_compiler_does_not_trace_a_walk(shared: Any) -> None:
    base = shared.get_base_model()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        base.model.layers.train(False)
        return x + 1, len(list(base.named_parameters()))

    found, count = torch.compile(step, backend="eager")(torch.zeros(2))
    assert torch.equal(found, torch.ones(2))
    assert count == len(list(shared.named_parameters()))
    assert not base.model.layers[1].mlp.training
    for walk in (base.model.layers.train, base.named_modules, base.named_parameters):
        whole = torch.compile(lambda x, walk=walk: (x, walk()), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            whole(torch.zeros(2))
    shared.train()


def test_a_model_that_is_dropped_is_gone() -> None:
    model = prepared()
    list(model.parameters())
    model.train()
    layers = model.get_base_model().model.layers
    extra = layers[2].extra = nn.Linear(2, 2)
    list(model.parameters())
    model.train()
    gone = weakref.ref(extra)
    del layers[2].extra, extra
    assert gone() is None, "a walk keeps nothing"
    left = [weakref.ref(module) for module in below(model)]
    with pytest.raises(poros.StateError, match="get_peft_model_state_dict"):
        copy.deepcopy(model)
    del model, layers
    gc.collect()
    assert not any(reference() for reference in left)


def test_nothing_is_left_after_unprepare() -> None:
    model = prepared()
    walks = [walk for _, _, walk in take_away(model)]
    assert len(walks) == 5
    assert all(isinstance(walk, MethodType) for walk in walks)
    model = poros.prepare(poros.unprepare(model), verbose=False)
    poros.unprepare(model)
    assert not any(name in module.__dict__ for module in below(model) for name in WALKS)
    assert not take_away(copy.deepcopy(model))


# -- in a training loop ------------------------------------------------------------------------


def trained(folder: Path, *, own: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train three steps of two micro-batches; return the log and what trains."""
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"])
    model = prepared(lora=lora)
    if own:
        take_away(model)
    rows = [{"input_ids": [3 + i] * 6, "labels": [3 + i] * 6} for i in range(12)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    loop = Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    loop.train()
    kept = ("loss", "grad_norm", "total_flos")
    log = [{k: v for k, v in entry.items() if k in kept} for entry in loop.state.log_history]
    return log, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore")
def test_trainer_gives_the_same_bits(tmp_path: Path) -> None:
    with calls_of(nn.Module.train.__code__) as calls:
        log, ours = trained(tmp_path / "a", own=False)
    with calls_of(nn.Module.train.__code__) as more:
        wanted, theirs = trained(tmp_path / "b", own=True)
    assert log == wanted
    assert any("grad_norm" in entry for entry in log)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(calls) < len(more) / 2
