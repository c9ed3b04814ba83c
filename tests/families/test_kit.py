"""The contract kit as a plugin author meets it: five lines pass, and a wrong family fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import PluginSite

from poros_core import conformance
from poros_core.conformance import ConformanceError, check_family, tensor_manifest
from poros_core.errors import GateError, PrepareError
from poros_core.family import decoder_layers, decoder_of
from poros_core.gate.arms import Arm
from poros_core.host_store import UnitImage
from poros_loaders.nf4 import Nf4Streamed

LLAMA = """
from poros_core.family import Family, decoder_layers
from poros_core.hookspecs import hookimpl

TINY = {{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}}

@hookimpl
def poros_families():
    return [Family(name="llama", title="Llama", model_types=("llama",),
                   shapes={{"tiny": TINY}}, {more})]
"""


def install_llama(site: PluginSite, more: str = "") -> None:
    site.install(
        "poros-llama", plugin="poros-llama", module="poros_llama", source=LLAMA.format(more=more)
    )


@pytest.mark.slow
def test_a_third_party_family_passes(plugin_site: PluginSite) -> None:
    install_llama(plugin_site)
    check_family("llama")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("layers=lambda d: decoder_layers(d)[:2]", r"returns 2 layers .* asks for 3"),
        ("layers=lambda d: [x.mlp for x in d.layers]", r"streamed.* fails .* Check that"),
        ("layers=lambda d: list(d.layers)[::-1]", r"streamed.* fails .* Check that"),
    ],
    ids=["too-few", "parts", "reversed"],
)
def test_a_family_with_wrong_layers_fails(plugin_site: PluginSite, more: str, message: str) -> None:
    install_llama(plugin_site, more)
    with (
        pytest.raises(ConformanceError, match=message),
        conformance.bench("llama", block_sizes=(2,)) as opened,
    ):
        conformance.check_training(opened)


def test_an_unknown_family_or_shape_is_named() -> None:
    with pytest.raises(GateError, match=r"no family 'nope'.*list-families"):
        check_family("nope")
    with pytest.raises(GateError, match="no shape 'huge'"):
        check_family("qwen3", shapes=("huge",))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"model_type": "lama"}, r"'tiny' of family 'llama' has model_type 'lama'.*: llama\."),
        ({"model_type": "llama", "vocab_size": 96}, r"does not say num_hidden_layers\. Write"),
    ],
    ids=["model_type", "layers"],
)
def test_a_shape_that_is_no_config_of_the_family(
    plugin_site: PluginSite, shape: dict[str, Any], message: str
) -> None:
    source = LLAMA.format(more="").replace('{"tiny": TINY}', f'{{"tiny": {shape}}}')
    plugin_site.install("poros-llama", plugin="poros-llama", module="poros_llama", source=source)
    with pytest.raises(GateError, match=message):
        check_family("llama")


def test_a_model_whose_parts_have_other_names_is_told_what_to_give() -> None:
    with pytest.raises(PrepareError, match=r"Module has no layers.*layers=lambda decoder:"):
        decoder_layers(torch.nn.Module())
    with pytest.raises(PrepareError, match=r"Module has no get_decoder.*decoder=lambda model:"):
        decoder_of(torch.nn.Module())


def test_a_loader_that_changes_a_byte_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Nf4Streamed.load

    def tampered(self: Nf4Streamed, request: Any) -> Any:
        model: Any = original(self, request)
        model.model.layers[1].mlp.up_proj.weight.quant_state.absmax[3] *= 1.001
        return model

    monkeypatch.setattr(Nf4Streamed, "load", tampered)
    with (
        conformance.bench("qwen3") as opened,
        pytest.raises(ConformanceError, match=r"'streamed'.* 1 of .*up_proj\.weight:absmax"),
    ):
        conformance.check_load_bytes(opened)


def test_an_evaluation_that_differs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with conformance.bench("qwen3", block_sizes=(1,)) as opened:
        opened.build()
        head = opened.streamed[1].prepared
        assert head is not None
        assert head.plan.head is not None
        head.plan.head.refs[0].get().view(-1)[:64].zero_()
        with pytest.raises(ConformanceError, match="evaluation"):
            conformance.check_evaluation(opened)


def test_an_unprepare_that_loses_bytes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = UnitImage.restore

    def lossy(self: UnitImage, device: torch.device | None) -> None:
        original(self, device)
        self.entries[0].ref.get().view(torch.uint8).view(-1)[0] ^= 1

    monkeypatch.setattr(UnitImage, "restore", lossy)
    with (
        conformance.bench("qwen3", block_sizes=(1,)) as opened,
        pytest.raises(ConformanceError, match="bytes of the base are not as they were"),
    ):
        conformance.check_unprepare(opened)


def test_a_fault_that_nothing_shows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with conformance.bench("qwen3", block_sizes=(1,)) as opened:
        opened.step("training")
        (_, reference) = opened.trace[0]
        monkeypatch.setattr(Arm, "step", lambda self, batches: reference)
        with pytest.raises(ConformanceError, match="was flipped and nothing differed"):
            conformance.check_planted_fault(opened)


def test_a_bench_puts_back_what_it_found() -> None:
    threads = torch.get_num_threads()
    found = torch.are_deterministic_algorithms_enabled()
    with conformance.bench("qwen3"):
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads
    assert torch.are_deterministic_algorithms_enabled() is found


def test_a_manifest_tells_tensors_apart_by_dtype_shape_and_bytes() -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    before = tensor_manifest(module)
    assert before.keys() == {".weight:data"}
    with torch.no_grad():
        module.weight[0, 0] += 1
    assert tensor_manifest(module) != before
    assert tensor_manifest(module, frozen=True) == {}


@pytest.mark.parametrize("left_out", ["shared=()", "breaks=lambda decoder: ()"])
@pytest.mark.slow
def test_gemma_4_fails_without_what_it_says_of_its_layers(
    plugin_site: PluginSite, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    monkeypatch.setenv("POROS_DISABLE_PLUGINS", "poros-families")
    plugin_site.install(
        "broken-gemma",
        plugin="broken-gemma",
        module="broken_gemma",
        source=(
            "from attrs import evolve\n"
            "from poros_core.hookspecs import hookimpl\n"
            "from poros_families.gemma4 import GEMMA4\n"
            "@hookimpl\n"
            f"def poros_families():\n    return [evolve(GEMMA4, {left_out})]\n"
        ),
    )
    with (
        pytest.raises(ConformanceError, match="block_size=3"),
        conformance.bench("gemma4", shape="tiny-e2b", block_sizes=(3,)) as opened,
    ):
        conformance.check_training(opened)
