"""How many parameters a prepared model has, beside Transformers' own count."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import poros
from poros_families.qwen2 import QWEN2

LORA = LoraConfig(r=4, target_modules="all-linear")


def prepared() -> Any:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN2.shapes["tiny"]))
    return poros.prepare(get_peft_model(base, LORA), verbose=False)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that Transformers counts."""
    times: list[None] = []
    own = PreTrainedModel.num_parameters

    def num_parameters(*args: Any, **kwargs: Any) -> int:
        times.append(None)
        return own(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "num_parameters", num_parameters)
    return times


def own_count(model: Any, **asked: bool) -> int:
    base = model.get_base_model()
    return int(type(base).num_parameters(base, **asked))


def check(model: Any) -> None:
    for asked in ({}, {"exclude_embeddings": True}, {"only_trainable": True}):
        for _ in range(2):
            assert model.num_parameters(**asked) == own_count(model, **asked)


def test_it_is_counted_once(counted: list[None]) -> None:
    model = prepared()
    first = model.num_parameters(exclude_embeddings=True)
    assert len(counted) == 1
    assert model.num_parameters(exclude_embeddings=True) == first > 0
    assert len(counted) == 1
    assert model.num_parameters() > first
    assert len(counted) == 2
    model.num_parameters(only_trainable=True)
    model.num_parameters(only_trainable=True)
    assert len(counted) == 4
    check(model)


def test_training_does_not_count_again(counted: list[None]) -> None:
    model = prepared()
    batch = torch.arange(8)[None]
    for _ in range(3):
        model(input_ids=batch, labels=batch).loss.backward()
        model.num_parameters()
        model.zero_grad()
        model.train()
    assert len(counted) == 1


def layer(model: Any) -> Any:
    return model.get_base_model().model.layers[1]


def swap(model: Any, old: str, new: str) -> None:
    """Give a child another name."""
    children = layer(model)._modules
    children[new] = children.pop(old)


def replace(model: Any) -> None:
    """Put a larger child where one was, gone at once, so that its address may come again."""
    for width in (3, 5):
        layer(model).extra = nn.Linear(width, width)
        check(model)


def resize(model: Any) -> None:
    param = next(p for p in layer(model).parameters() if p.requires_grad)
    param.data = torch.zeros(3, 3)


def move(model: Any) -> None:
    """Move a child to the module that comes next in the walk: the same children in a row."""
    layer(model).first, layer(model).second = nn.Sequential(), nn.Sequential()
    layer(model).first.part = nn.Embedding(2, 2)
    check(model)
    layer(model).second.part = layer(model).first._modules.pop("part")


class Hides(nn.Module):
    """Has a parameter that no walk finds."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 2)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())


def walk(model: Any) -> None:
    """Set a walk on an instance, and take it away again."""
    module = layer(model).mlp
    module.named_modules = lambda *args, **kwargs: iter(())
    check(model)
    del module.named_modules


def quantise(model: Any) -> None:
    """Replace a weight's bytes by quantised ones: the same object, of another size."""
    layer(model).extra = bnb.nn.Linear4bit(64, 64, bias=False)
    check(model)
    layer(model).extra.to("cpu")


def become(model: Any) -> None:
    """Give a parameter another class, whose elements count twice."""
    base = model.get_base_model()
    base.is_loaded_in_4bit = True
    layer(model).extra = nn.Linear(3, 3)
    check(model)
    layer(model).extra.weight.__class__ = bnb.nn.Params4bit


def on_the_root(name: str) -> Callable[[Any], None]:
    """Set a method of the model itself."""

    def change(model: Any) -> None:
        setattr(model.get_base_model(), name, lambda *args, **kwargs: iter(()))

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter is added": lambda m: layer(m).register_parameter("x", nn.Parameter(torch.ones(7))),
    "a parameter is None": lambda m: layer(m).register_parameter("x", None),
    "a module is added": lambda m: setattr(layer(m), "extra", nn.Embedding(2, 3)),
    "modules are replaced": replace,
    "a name changes": lambda m: swap(m, "mlp", "other"),
    "a child moves": move,
    "a size changes": resize,
    "an adapter is added": lambda m: m.add_adapter("second", LORA),
    "an adapter goes": lambda m: (m.add_adapter("second", LORA), m.delete_adapter("second")),
    "a module with its own walk": lambda m: setattr(layer(m), "extra", Hides()),
    "an instance with its own walk": walk,
    "a class changes": lambda m: setattr(layer(m).mlp, "__class__", Hides),
    "a weight is quantised": quantise,
    "a parameter's class changes": become,
    "a script": lambda m: setattr(layer(m), "extra", torch.jit.script(nn.Linear(2, 2))),
    "its named_modules": on_the_root("named_modules"),
    "its named_parameters": on_the_root("named_parameters"),
    "its _named_members": on_the_root("_named_members"),
    "its modules": on_the_root("modules"),
    "what it says of itself": lambda m: setattr(m.get_base_model(), "is_loaded_in_4bit", True),
    "gradients are wanted": lambda m: m.get_base_model().lm_head.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change: Callable[[Any], Any]) -> None:
    model = prepared()
    check(model)
    change(model)
    check(model)


def test_a_parameter_can_be_swapped() -> None:
    model = prepared()
    check(model)
    param = next(p for p in layer(model).parameters() if p.requires_grad)
    torch.utils.swap_tensors(param, nn.Parameter(torch.zeros(3, 3)))
    check(model)


def test_threads_count_beside_each_other() -> None:
    model = prepared()
    layer(model).extra = nn.Identity()
    expected = own_count(model)

    def count(_: int) -> int:
        layer(model).extra = nn.Identity()  # what is remembered holds no more
        return int(model.num_parameters())

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(count, range(40))) == {expected}


def test_nothing_is_kept_alive() -> None:
    model = prepared()
    layer(model).extra = nn.Linear(3, 3)
    check(model)
    gone = weakref.ref(layer(model).extra.weight)
    del layer(model).extra
    gc.collect()
    assert gone() is None
    check(model)
    gone = weakref.ref(layer(model))
    del model
    gc.collect()
    assert gone() is None


def test_it_is_taken_off() -> None:
    model = prepared()
    base = model.get_base_model()
    assert "num_parameters" in base.__dict__
    poros.unprepare(model)
    assert "num_parameters" not in base.__dict__
    check(model)
