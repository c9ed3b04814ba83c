"""What ``prepare`` refuses, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

import poros
from poros_core.prepare import prepared_of
from poros_families.qwen2 import QWEN2


def base() -> Any:
    torch.manual_seed(0)
    settings = {k: v for k, v in QWEN2.shapes["tiny"].items() if k != "model_type"}
    return AutoModelForCausalLM.from_config(Qwen2Config(**settings))


def adapted() -> Any:
    return get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def ids() -> torch.Tensor:
    return torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(1))


def test_a_merged_adapter_is_refused_until_it_is_unmerged() -> None:
    model = poros.prepare(adapted(), verbose=False)
    model.base_model.merge_adapter()
    with pytest.raises(poros.StateError, match="unmerge_adapter"):
        model(ids())
    with pytest.raises(poros.StateError, match="unmerge_adapter"):
        poros.unprepare(model)
    model.base_model.unmerge_adapter()
    model(ids())
    poros.unprepare(model)


def test_a_replaced_base_weight_is_refused() -> None:
    model = poros.prepare(adapted(), verbose=False)
    layer = model.get_base_model().model.layers[1].self_attn.k_proj
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight), requires_grad=False)
    with pytest.raises(poros.StateError, match="layer 1 was replaced"):
        model(ids())


def test_a_base_weight_that_is_unfrozen_is_refused() -> None:
    model = poros.prepare(adapted(), verbose=False)
    model.get_base_model().model.layers[1].self_attn.k_proj.weight.requires_grad_(True)
    with pytest.raises(poros.StateError, match="was set to require gradients"):
        model(ids())


def test_a_filled_cache_with_gradients_is_refused() -> None:
    model = poros.prepare(adapted(), verbose=False)
    with torch.no_grad():
        cache = model(ids(), use_cache=True).past_key_values
    with pytest.raises(poros.StateError, match=r"torch\.no_grad"):
        model(ids(), past_key_values=cache)


@pytest.mark.parametrize("block_size", [0, -1, 1.5, True, "some", 99])
def test_a_block_size_that_cannot_be_is_refused(block_size: Any) -> None:
    with pytest.raises(poros.SettingsError, match="block_size"):
        poros.prepare(adapted(), block_size=block_size, verbose=False)


def test_what_this_version_cannot_do_is_refused() -> None:
    with pytest.raises(poros.SettingsError, match="vram_budget"):
        poros.prepare(adapted(), vram_budget=10**9, verbose=False)
    with pytest.raises(poros.SettingsError, match="graphs"):
        poros.prepare(adapted(), graphs="sometimes", verbose=False)  # type: ignore[arg-type]
    with pytest.raises(poros.SettingsError, match="No runtime is named 'magic'"):
        poros.prepare(adapted(), runtime="magic", verbose=False)


def test_the_resident_runtime_moves_nothing() -> None:
    model = adapted()
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    poros.prepare(model, runtime="resident", verbose=False)
    model(ids())
    assert {name: param.data_ptr() for name, param in model.named_parameters()} == before
    prepared = prepared_of(model)
    assert prepared is not None
    assert prepared.handle.counters()["resident_units"] == 4
    poros.unprepare(model)


def test_unprepare_of_a_model_that_is_not_prepared() -> None:
    with pytest.raises(poros.PrepareError, match="not prepared"):
        poros.unprepare(adapted())


def test_something_that_is_no_model() -> None:
    with pytest.raises(poros.PrepareError, match="takes a model"):
        poros.prepare("Qwen/Qwen2.5-7B", verbose=False)  # type: ignore[type-var]


def test_deterministic_puts_back_what_it_found() -> None:
    found = torch.are_deterministic_algorithms_enabled()
    with poros.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == found


def test_deterministic_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("poros_core.determinism._cuda_used", lambda: True)
    with pytest.raises(poros.StateError, match="CUBLAS_WORKSPACE_CONFIG"), poros.deterministic():
        pass
