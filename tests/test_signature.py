"""What a graph is keyed on: whatever a replay bakes in must change the key, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import attrs
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import DoraCaching
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

import poros
from poros_core.call_state import capture
from poros_core.prepare import prepared_of
from poros_families.qwen2 import QWEN2
from poros_runtimes.streamed.block import LayerCall
from poros_runtimes.streamed.block_call import make_call
from poros_runtimes.streamed.caches import IsolatedCache, isolated
from poros_runtimes.streamed.signature import (
    BackwardKey,
    BlockConstants,
    ForwardKey,
    Layout,
    backward_key,
    forward_key,
    layout_of,
)


class Subject:
    """One block of a prepared model, and the call that a test varies."""

    def __init__(self, **lora: Any) -> None:
        config = Qwen2Config(**{k: v for k, v in QWEN2.shapes["tiny"].items() if k != "model_type"})
        config.attention_dropout = 0.1
        base = AutoModelForCausalLM.from_config(config)
        settings = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], **lora)
        self.model: Any = get_peft_model(base, settings).train()
        poros.prepare(self.model, verbose=False)
        prepared = prepared_of(self.model)
        assert prepared is not None
        handle: Any = prepared.handle
        self.block = handle._blocks[1]
        self.layer: Any = handle._layers[1]
        self.hidden = torch.randn(2, 8, 64)
        self.kwargs: dict[str, Any] = {
            "attention_mask": torch.zeros(2, 1, 8, 8),
            "position_embeddings": (torch.ones(1, 8, 16), torch.ones(1, 8, 16)),
            "use_cache": True,
        }
        self.wanted = True

    def key(self) -> ForwardKey | None:
        call = isolated(
            LayerCall(1, (), dict(self.kwargs)), training=True, device=torch.device("cpu")
        )
        self.block.refresh()
        made, entering = make_call(self.block, [call], shared_names=(), thread=False)
        made.state = capture(torch.device("cpu"), self.block.modules)
        tensors = [self.hidden, *entering]
        wanted = [self.wanted, *(t.requires_grad for t in entering)]
        return forward_key(made, tensors, wanted, BlockConstants(self.block))


@pytest.fixture
def subject() -> Subject:
    return Subject()


def test_equal_calls_have_equal_keys(subject: Subject) -> None:
    first = subject.key()
    torch.rand(3)
    subject.hidden = torch.randn(2, 8, 64)
    subject.kwargs["attention_mask"] = torch.ones(2, 1, 8, 8)
    assert first is not None
    assert subject.key() == first
    assert hash(subject.key()) == hash(first)


def _shape(s: Subject) -> None:
    s.hidden = torch.randn(2, 9, 64)


def _stride(s: Subject) -> None:
    s.hidden = torch.randn(8, 2, 64).transpose(0, 1)


def _dtype(s: Subject) -> None:
    s.hidden = s.hidden.bfloat16()


def _wanted(s: Subject) -> None:
    s.wanted = False


def _mask_left_out(s: Subject) -> None:
    s.kwargs["attention_mask"] = None


def _mask_expanded(s: Subject) -> None:
    s.kwargs["attention_mask"] = torch.zeros(1, 1, 8, 8).expand(2, 1, 8, 8)


def _mask_carries_gradients(s: Subject) -> None:
    s.kwargs["attention_mask"] = torch.zeros(2, 1, 8, 8, requires_grad=True)


def _argument_value(s: Subject) -> None:
    s.kwargs["use_cache"] = False


def _argument_type(s: Subject) -> None:
    s.kwargs["use_cache"] = 1


def _argument_more(s: Subject) -> None:
    s.kwargs["position_ids"] = torch.arange(8)[None]


def _cache(s: Subject) -> None:
    s.kwargs["cache"] = DynamicCache()


def _eval(s: Subject) -> None:
    s.layer.self_attn.eval()


def _dropout_rate(s: Subject) -> None:
    s.layer.self_attn.q_proj.lora_dropout["default"].p = 0.2


def _attention_dropout(s: Subject) -> None:
    s.layer.self_attn.attention_dropout = 0.2


def _scaling(s: Subject) -> None:
    s.layer.self_attn.q_proj.scaling["default"] = 3.0


def _adapters_off(s: Subject) -> None:
    s.model.base_model.disable_adapter_layers()


def _frozen(s: Subject) -> None:
    s.layer.self_attn.q_proj.lora_A["default"].weight.requires_grad_(False)


def _moved(s: Subject) -> None:
    weight = s.layer.self_attn.q_proj.lora_A["default"].weight
    weight.data = weight.data.clone()


def _parameter_dtype(s: Subject) -> None:
    weight = s.layer.self_attn.q_proj.lora_A["default"].weight
    weight.data = weight.data.bfloat16()


def _implementation(s: Subject) -> None:
    s.layer.self_attn.config._attn_implementation = "eager"


def _second_adapter(s: Subject) -> None:
    s.model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))


CHANGES: list[Callable[[Subject], None]] = [
    _shape, _stride, _dtype, _wanted, _mask_left_out, _mask_expanded, _mask_carries_gradients,
    _argument_value, _argument_type, _argument_more, _cache, _eval, _dropout_rate,
    _attention_dropout, _scaling, _adapters_off, _frozen, _moved, _parameter_dtype,
    _implementation, _second_adapter,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_that_a_graph_bakes_in_changes_the_key(
    subject: Subject, change: Callable[[Subject], None]
) -> None:
    first = subject.key()
    change(subject)
    second = subject.key()
    assert first is not None
    assert second is not None
    assert second != first


@pytest.mark.parametrize(
    "enter",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: _deterministic(),
    ],
    ids=["autocast", "attention kernels", "deterministic"],
)
def test_the_state_around_a_call_is_in_the_key(subject: Subject, enter: Callable[[], Any]) -> None:
    first = subject.key()
    with enter():
        inside = subject.key()
    assert inside != first
    assert subject.key() == first


class _deterministic:
    def __enter__(self) -> None:
        self.found = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(not self.found)

    def __exit__(self, *exc: object) -> None:
        torch.use_deterministic_algorithms(self.found)


def test_a_hooked_module_inside_makes_the_block_eager(subject: Subject) -> None:
    handle = subject.layer.mlp.register_forward_hook(lambda *args: None)
    assert subject.key() is None
    handle.remove()
    assert subject.key() is not None


def test_a_hook_on_the_layer_itself_runs_outside(subject: Subject) -> None:
    subject.layer.register_forward_hook(lambda *args: None)
    assert subject.key() is not None


def test_an_argument_of_unknown_kind_makes_the_block_eager(subject: Subject) -> None:
    subject.kwargs["extra"] = object()
    assert subject.key() is None


def test_a_tensor_on_another_device_makes_the_block_eager(subject: Subject) -> None:
    """A number on the host is no argument of a kernel, and its copy on the device would be."""
    subject.kwargs["attention_mask"] = torch.zeros(2, 1, 8, 8, device="meta")
    assert subject.key() is None


def test_adapters_that_keep_tensors_make_the_block_eager() -> None:
    subject = Subject(use_dora=True)
    with DoraCaching():
        assert subject.key() is not None, "it keeps none in training"
        subject.model.eval()
        assert subject.key() is None
    assert subject.key() is not None


def test_a_cache_that_the_caller_goes_on_with_makes_the_block_eager(subject: Subject) -> None:
    cache = DynamicCache()
    call = isolated(LayerCall(1, (), {"cache": cache}), training=False, device=torch.device("cpu"))
    made, _ = make_call(subject.block, [call], shared_names=(), thread=False)
    made.state = capture(torch.device("cpu"), subject.block.modules)
    constants = BlockConstants(subject.block)
    assert isinstance(made.leaves[0], IsolatedCache)
    assert forward_key(made, [subject.hidden], [True], constants) is None
    made.drop_caches()
    assert forward_key(made, [subject.hidden], [True], constants) is not None


def _backward(subject: Subject, gradient: torch.Tensor | None) -> BackwardKey | None:
    made, _ = make_call(subject.block, [LayerCall(1, (), {})], shared_names=(), thread=False)
    made.state = capture(torch.device("cpu"), subject.block.modules)
    return backward_key(made, [True, True], [gradient], BlockConstants(subject.block))


def test_a_backward_depends_on_its_gradients_and_on_the_state_around_it(subject: Subject) -> None:
    first = _backward(subject, torch.ones(2, 8, 64))
    assert first is not None
    assert _backward(subject, torch.zeros(2, 8, 64)) == first
    assert _backward(subject, torch.ones(2, 8, 64).bfloat16()) != first
    assert _backward(subject, None) != first
    with torch.autocast("cpu", torch.bfloat16):
        assert _backward(subject, torch.ones(2, 8, 64)) != first
    _moved(subject)
    assert _backward(subject, torch.ones(2, 8, 64)) != first


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda: torch.ones(3, 4), True),
        (lambda: torch.ones(4, 3).t(), True),
        (lambda: torch.ones(1, 3).expand(5, 3), True),
        (lambda: torch.ones(3, 8)[:, :4], False),
        (lambda: torch.ones(9)[1:5], False),
    ],
    ids=["dense", "transposed", "repeated", "gaps", "misaligned"],
)
def test_only_tensors_that_a_buffer_can_stand_in_for_have_a_layout(
    make: Callable[[], torch.Tensor], known: bool
) -> None:
    assert (layout_of(make()) is not None) == known


def test_every_field_of_the_key_is_varied_here() -> None:
    """Adding a field without a test of it fails here."""
    assert [f.name for f in attrs.fields(ForwardKey)] == [
        "layers", "inputs", "arguments", "structure", "places", "flags", "constants",
    ]  # fmt: skip
    names = [f.name for f in attrs.fields(BackwardKey)]
    assert names == ["gradients", "wanted", "places", "ambient"]
    assert [f.name for f in attrs.fields(Layout)] == ["shape", "stride", "dtype", "wanted"]


def test_graphs_on_needs_cuda(subject: Subject) -> None:
    if torch.cuda.is_available():
        context: Any = nullcontext()
    else:
        context = pytest.raises(poros.SettingsError, match="needs a CUDA device")
    model: nn.Module = poros.unprepare(subject.model)
    with context:
        poros.prepare(model, graphs="on", verbose=False)
