"""What ``prepare`` refuses, and what it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
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


def test_merging_is_refused_before_a_weight_is_written() -> None:
    model = adapted()
    poros.prepare(model, verbose=False)
    with torch.no_grad():
        wanted = model(ids()).logits
    for merge in (model.base_model.merge_adapter, model.merge_and_unload):
        with pytest.raises(poros.StateError, match="cannot be merged"):
            merge()
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, wanted)
    poros.unprepare(model)
    model.base_model.merge_adapter()


def test_unloading_is_refused_before_anything_is_taken_away() -> None:
    model = adapted()
    poros.prepare(model, verbose=False)
    with torch.no_grad():
        wanted = model(ids()).logits
    for owner in (model, model.base_model):
        with pytest.raises(poros.StateError, match="cannot be taken off"):
            owner.unload()
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, wanted)
    poros.unprepare(model)
    again = get_peft_model(model.unload(), LoraConfig(r=4, target_modules=["q_proj"]))
    poros.unprepare(poros.prepare(again, verbose=False))


def test_a_model_whose_adapters_are_merged_is_refused() -> None:
    model = adapted()
    model.base_model.merge_adapter()
    poros.prepare(model, verbose=False)
    with pytest.raises(poros.StateError, match="unmerge_adapter"):
        model(ids())


def test_a_prepared_model_cannot_be_copied_and_says_what_can() -> None:
    model = poros.prepare(adapted(), verbose=False)
    with pytest.raises(poros.StateError, match="get_peft_model_state_dict"):
        copy.deepcopy(model)
    copy.deepcopy(poros.unprepare(model))


def test_prefix_tuning_is_refused_by_name() -> None:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(poros.PrepareError, match="prefix_tuning"):
        poros.prepare(get_peft_model(base(), config), verbose=False)


def test_a_mask_changed_before_the_backward_is_an_error() -> None:
    model = poros.prepare(adapted().train(), verbose=False)
    positions = torch.arange(6)[None]
    loss = model(ids(), position_ids=positions, labels=ids()).loss
    positions.add_(1)
    with pytest.raises(poros.StateError, match="changed in place"):
        loss.backward()


def test_host_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros_core.host_memory.available_memory", lambda: 1000)
    with pytest.raises(poros.PrepareError, match="are available"):
        poros.prepare(adapted(), verbose=False)


def _swap_ia3(*, streamed: bool) -> list[torch.Tensor]:
    ia3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model: Any = get_peft_model(base(), ia3)
    if streamed:
        poros.prepare(model, verbose=False)
    model(ids(), labels=ids()).loss.backward()
    model.add_adapter("second", ia3)
    model.set_adapter("second")
    model.delete_adapter("default")
    model(ids(), labels=ids()).loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


def test_an_adapter_that_takes_the_place_of_another_trains() -> None:
    """IA3 keeps its vectors in a ParameterDict: one goes, one comes, and the count stays."""
    wanted, found = _swap_ia3(streamed=False), _swap_ia3(streamed=True)
    assert wanted
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.slow
def test_compile_runs_around_the_streamed_decoder() -> None:
    losses = []
    for streamed in (False, True):
        model = adapted()
        if streamed:
            poros.prepare(model, verbose=False)
        compiled = torch.compile(model, backend="eager")
        losses.append(compiled(ids(), labels=ids()).loss)
        losses[-1].backward()
    assert torch.equal(*losses)


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


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "much", "0GB", "AUTO"])
def test_a_budget_that_cannot_be_is_refused(budget: Any) -> None:
    with pytest.raises(poros.SettingsError, match="vram_budget"):
        poros.prepare(adapted(), vram_budget=budget, verbose=False)


def test_a_setting_that_cannot_be_is_refused() -> None:
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
    memory: Any = torch.utils.deterministic

    def settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory

    found = settings()
    with poros.deterministic():
        assert settings() == (True, False)
    assert settings() == found


def test_deterministic_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("poros_core.determinism._cuda_used", lambda: True)
    with pytest.raises(poros.StateError, match="CUBLAS_WORKSPACE_CONFIG"), poros.deterministic():
        pass
