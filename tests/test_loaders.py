from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from helpers_checkpoint import CPU, TINY, bnb_config, request, strategy, write_checkpoint
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import QuantizationMethod

from poros_core.errors import PrepareError, SettingsError
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_loaders import poros_loaders
from poros_loaders.nf4 import NF4
from poros_loaders.plain import PLAIN

CONFIGS = [
    pytest.param({"double": double, "storage": storage, "compute": compute}, id=name)
    for name, double, storage, compute in [
        ("plain", False, torch.uint8, torch.bfloat16),
        ("double", True, torch.uint8, torch.float32),
        ("bf16-storage", False, torch.bfloat16, torch.bfloat16),
        ("double-bf16-storage", True, torch.bfloat16, torch.float16),
    ]
]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), shards=3)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that decides the numbers: parameters, buffers, quantisation state."""
    found = dict(model.named_buffers())
    for name, param in model.named_parameters():
        for codec in (NF4, PLAIN):
            if codec.claims(param):
                for ref in codec.refs(model, name, param):
                    found[f"{name}:{ref.name}"] = ref.get()
    return found


def assert_same(one: nn.Module, other: nn.Module) -> None:
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys()
    assert len(left) > 20
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        mine = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        theirs = right[name].cpu().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(mine, theirs), name


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(48).view(2, 24) % TINY["vocab_size"]
    device = next(model.parameters()).device
    out: torch.Tensor = model.train()(input_ids=ids.to(device)).logits
    return out


def test_import_needs_no_torch() -> None:
    code = "import sys, poros_loaders; poros_loaders.poros_loaders(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_strategies_of_one_precision_share_a_codec() -> None:
    offered = {(s.precision, s.strategy): s.codec for s in poros_loaders()}
    assert set(offered) == {(p, s) for p in ("nf4", "bf16") for s in ("streamed", "standard")}
    assert offered["nf4", "streamed"] is offered["nf4", "standard"]
    assert offered["bf16", "streamed"] is offered["bf16", "standard"]


@pytest.mark.parametrize("asked", CONFIGS)
def test_streamed_nf4_is_the_standard_load_byte_for_byte(
    checkpoint: Path, asked: dict[str, Any]
) -> None:
    asks = request(checkpoint, quantization_config=bnb_config(**asked))
    streamed = strategy("nf4", "streamed").load(asks)
    assert_same(streamed, strategy("nf4", "standard").load(asks))
    assert_same(streamed, strategy("nf4", "streamed").load_resident(asks))


@pytest.mark.parametrize("asked", CONFIGS)
def test_streamed_nf4_honours_the_users_config(checkpoint: Path, asked: dict[str, Any]) -> None:
    config = bnb_config(**asked)
    before = config.to_dict()
    model = strategy("nf4", "streamed").load(request(checkpoint, quantization_config=config))
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.weight.quant_state.nested is asked["double"]
    assert layer.weight.dtype == asked["storage"]
    assert layer.compute_dtype == asked["compute"]
    assert config.to_dict() == before
    assert model.config.quantization_config.to_dict() == before


def test_default_config_is_nf4_without_double_quantisation(checkpoint: Path) -> None:
    for dtype, compute in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        model: Any = strategy("nf4", "streamed").load(request(checkpoint, dtype=dtype))
        layer = model.model.layers[0].mlp.down_proj
        assert layer.weight.quant_type == "nf4"
        assert not layer.weight.quant_state.nested
        assert layer.compute_dtype == compute
        assert model.model.norm.weight.dtype == (dtype or torch.bfloat16)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_streamed_nf4_computes_as_resident(
    checkpoint: Path, double: bool, dtype: torch.dtype
) -> None:
    config = bnb_config(double=double, storage=torch.uint8, compute=torch.bfloat16)
    asks = request(checkpoint, quantization_config=config, dtype=dtype)
    loader = strategy("nf4", "streamed")
    assert torch.equal(logits(loader.load(asks)), logits(loader.load_resident(asks)))


@pytest.mark.parametrize("tied", [False, True])
def test_bf16_streamed_standard_and_resident_agree(tmp_path: Path, tied: bool) -> None:
    write_checkpoint(tmp_path, {**TINY, "tie_word_embeddings": tied}, dtype=torch.float32)
    asks = request(tmp_path)
    streamed: Any = strategy("bf16", "streamed").load(asks)
    assert streamed.model.norm.weight.dtype == torch.bfloat16
    assert (streamed.lm_head.weight is streamed.model.embed_tokens.weight) is tied
    assert_same(streamed, strategy("bf16", "standard").load(asks))
    resident = strategy("bf16", "standard").load_resident(asks)
    assert_same(streamed, resident)
    assert torch.equal(logits(streamed), logits(resident))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", ["streamed", "standard"])
def test_prequantised_checkpoint(checkpoint: Path, tmp_path: Path, double: bool, name: str) -> None:
    config = bnb_config(double=double, storage=torch.uint8, compute=torch.bfloat16)
    first: Any = strategy("nf4", "streamed").load(request(checkpoint, quantization_config=config))
    first.save_pretrained(tmp_path)
    for given in (None, config):
        again = strategy("nf4", name).load(request(tmp_path, quantization_config=given))
        assert_same(first, again)
        assert torch.equal(logits(first), logits(again))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(first, plain)


def test_prequantised_checkpoint_refuses_another_config(checkpoint: Path, tmp_path: Path) -> None:
    first: Any = strategy("nf4", "streamed").load(request(checkpoint))
    first.save_pretrained(tmp_path)
    config = bnb_config(double=True, storage=torch.uint8, compute=torch.bfloat16)
    with pytest.raises(SettingsError, match="double_quant"):
        strategy("nf4", "streamed").load(request(tmp_path, quantization_config=config))


def test_streamed_model_is_an_ordinary_bitsandbytes_model(checkpoint: Path) -> None:
    streamed: Any = strategy("nf4", "streamed").load(request(checkpoint))
    plain: Any = strategy("nf4", "streamed").load_resident(request(checkpoint))
    assert type(streamed.hf_quantizer) is Bnb4BitHfQuantizer
    assert streamed.hf_quantizer.quantization_config is streamed.config.quantization_config
    assert streamed.is_loaded_in_4bit
    assert streamed.is_quantized
    assert streamed.quantization_method == QuantizationMethod.BITS_AND_BYTES
    assert streamed.config.quantization_config.quant_method == QuantizationMethod.BITS_AND_BYTES
    assert streamed.config.to_dict() == plain.config.to_dict()
    assert set(vars(streamed)) == set(vars(plain))
    assert vars(streamed.hf_quantizer).keys() == vars(plain.hf_quantizer).keys()
    for name, parameter in streamed.named_parameters():
        other = plain.get_parameter(name)
        assert type(parameter) is type(other)
        assert parameter.requires_grad == other.requires_grad
        assert vars(parameter).keys() == vars(other).keys()
    layer = streamed.model.layers[1].mlp.up_proj
    assert layer.weight.module is layer
    assert layer.quant_state is layer.weight.quant_state


def test_loading_leaves_no_global_state(checkpoint: Path) -> None:
    registry, environment = dict(AUTO_QUANTIZER_MAPPING), dict(os.environ)
    torch_random, python_random = torch.get_rng_state(), random.getstate()
    for offered in poros_loaders():
        offered.load(request(checkpoint))
    assert registry == AUTO_QUANTIZER_MAPPING
    assert environment == dict(os.environ)
    assert torch.equal(torch_random, torch.get_rng_state())
    assert python_random == random.getstate()


def test_a_failure_while_staging_is_raised_as_it_was(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(bnb.functional, "quantize_4bit", out_of_memory)
    registry = dict(AUTO_QUANTIZER_MAPPING)
    with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        strategy("nf4", "streamed").load(request(checkpoint))
    assert registry == AUTO_QUANTIZER_MAPPING


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "llm_int8"),
        (BitsAndBytesConfig(load_in_4bit=True), "fp4"),
        (BitsAndBytesConfig(bnb_4bit_quant_type="nf4"), "no quantisation"),
        ("nf4", "BitsAndBytesConfig"),
    ],
)
@pytest.mark.parametrize("name", ["streamed", "standard"])
def test_another_quantisation_is_refused(
    checkpoint: Path, config: Any, match: str, name: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        strategy("nf4", name).load(request(checkpoint, quantization_config=config))


def test_streamed_names_why_it_cannot(checkpoint: Path) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_enable_fp32_cpu_offload=True
    )
    asks = request(checkpoint, quantization_config=config)
    assert "llm_int8_enable_fp32_cpu_offload" in str(strategy("nf4", "streamed").cannot(asks))
    with pytest.raises(SettingsError, match="llm_int8_enable_fp32_cpu_offload"):
        strategy("nf4", "streamed").load(asks)
    assert strategy("nf4", "streamed").cannot(request(checkpoint)) is None


def test_the_loaders_own_arguments_are_refused(checkpoint: Path) -> None:
    for offered in poros_loaders():
        with pytest.raises(SettingsError, match="device_map"):
            offered.load(request(checkpoint, from_pretrained={"device_map": "auto"}))


def test_further_arguments_reach_transformers(checkpoint: Path) -> None:
    for offered in poros_loaders():
        model: Any = offered.load(
            request(checkpoint, from_pretrained={"attn_implementation": "eager"})
        )
        assert model.config._attn_implementation == "eager"


class TestCodecs:
    def layer(self, *, double: bool = False, kind: str = "nf4") -> Any:
        layer: Any = bnb.nn.Linear4bit(
            64, 128, bias=True, compress_statistics=double, quant_type=kind
        )
        return layer

    def test_claims(self) -> None:
        layer = self.layer()
        assert NF4.claims(layer.weight)
        assert not NF4.claims(layer.bias)
        assert PLAIN.claims(layer.bias)
        assert not PLAIN.claims(layer.weight)
        assert not PLAIN.claims(nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False))

    @pytest.mark.parametrize("double", [False, True])
    def test_refs_cover_every_tensor_of_a_weight(self, double: bool) -> None:
        layer = self.layer(double=double).to("cpu")
        refs = NF4.refs(layer, "weight", layer.weight)
        state = layer.weight.quant_state
        held = [v for v in vars(state).values() if isinstance(v, torch.Tensor)]
        if double:
            held += [v for v in vars(state.state2).values() if isinstance(v, torch.Tensor)]
        assert len({ref.key for ref in refs}) == len(refs) == len(held) + 1
        pointers = {tensor.data_ptr() for tensor in [layer.weight.data, *held]}
        assert {ref.get().data_ptr() for ref in refs} == pointers

    @pytest.mark.parametrize("double", [False, True])
    def test_set_rebinds_in_place(self, double: bool) -> None:
        layer = self.layer(double=double).to("cpu")
        inputs = torch.randn(3, 64)
        with torch.no_grad():
            layer.train()
            wanted = layer(inputs)
            weight, state = layer.weight, layer.weight.quant_state
            refs = [*NF4.refs(layer, "weight", weight), *PLAIN.refs(layer, "bias", layer.bias)]
            kept = [ref.get().clone() for ref in refs]
            for ref in refs:
                ref.set(torch.empty_like(ref.get()).fill_(1))
            assert not torch.equal(layer(inputs), wanted)
            for ref, tensor in zip(refs, kept, strict=True):
                ref.set(tensor)
                assert ref.get().data_ptr() == tensor.data_ptr()
            assert torch.equal(layer(inputs), wanted)
        assert layer.weight is weight
        assert weight.quant_state is state
        assert weight.bnb_quantized

    def test_keys_name_places(self) -> None:
        layer, other = self.layer().to("cpu"), self.layer().to("cpu")
        keys = {ref.key for ref in NF4.refs(layer, "weight", layer.weight)}
        assert keys == {ref.key for ref in NF4.refs(nn.Module(), "w", layer.weight)}
        assert keys.isdisjoint(ref.key for ref in NF4.refs(other, "weight", other.weight))

    def test_unquantised_is_refused(self) -> None:
        layer = self.layer()
        with pytest.raises(PrepareError, match="not quantised yet"):
            NF4.refs(layer, "weight", layer.weight)

    def test_fp4_is_refused(self) -> None:
        layer = self.layer(kind="fp4").to("cpu")
        with pytest.raises(PrepareError, match="fp4"):
            NF4.refs(layer, "weight", layer.weight)

    def test_repacked_is_refused(self) -> None:
        layer = self.layer().to("cpu")
        packed, _ = bnb.functional._convert_weight_packed_for_cpu(
            layer.weight.data, layer.weight.quant_state
        )
        layer.weight.data = packed
        with pytest.raises(PrepareError, match="eval"):
            NF4.refs(layer, "weight", layer.weight)

    def test_keep_layout_and_its_undo(self) -> None:
        layer = self.layer().to("cpu")
        layer.support_avx512bf16_for_cpu = True
        undo = NF4.keep_layout(layer)
        with torch.no_grad():
            layer.eval()(torch.randn(3, 64))
        assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
        undo()
        assert layer.support_avx512bf16_for_cpu is True
        NF4.keep_layout(nn.Linear(2, 2))()


class TestRandomCheckpoint:
    def write(self, path: Path, **changes: Any) -> Path:
        options: dict[str, Any] = {"seed": 3, "dtype": torch.bfloat16, "device": CPU, **changes}
        write_random_checkpoint(options.pop("shape", TINY), path, **options)
        return path

    def test_loads_and_does_not_depend_on_shards(self, tmp_path: Path) -> None:
        one = self.write(tmp_path / "one")
        many = self.write(tmp_path / "many", max_shard_bytes=30_000)
        assert len(list(many.glob("*.safetensors"))) > 3
        assert not (one / "model.safetensors.index.json").exists()
        first = strategy("bf16", "streamed").load(request(one))
        assert_same(first, strategy("bf16", "streamed").load(request(many)))
        assert logits(first).isfinite().all()
        assert AutoConfig.from_pretrained(one).dtype == torch.bfloat16

    def test_seed_and_name_decide_the_values(self, tmp_path: Path) -> None:
        state = torch.get_rng_state()
        first: Any = strategy("bf16", "streamed").load(request(self.write(tmp_path / "a")))
        other: Any = strategy("bf16", "streamed").load(request(self.write(tmp_path / "b", seed=4)))
        assert torch.equal(state, torch.get_rng_state())
        attention = first.model.layers[0].self_attn
        assert not torch.equal(attention.k_proj.weight, attention.v_proj.weight)
        assert not torch.equal(
            attention.k_proj.weight, other.model.layers[0].self_attn.k_proj.weight
        )

    def test_moments(self, tmp_path: Path) -> None:
        model: Any = strategy("bf16", "streamed").load(request(self.write(tmp_path)))
        weight = model.model.layers[0].mlp.gate_proj.weight.float()
        norms = torch.stack([layer.input_layernorm.weight for layer in model.model.layers]).float()
        biases = torch.stack([layer.self_attn.q_proj.bias for layer in model.model.layers]).float()
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert norms.mean().item() == pytest.approx(1.0, abs=0.05)
        assert norms.std().item() == pytest.approx(0.1, rel=0.25)
        assert biases.std().item() == pytest.approx(0.02, rel=0.25)

    def test_tied_weights_are_written_once(self, tmp_path: Path) -> None:
        shape = {**TINY, "tie_word_embeddings": True}
        tied: Any = strategy("nf4", "streamed").load(
            request(self.write(tmp_path / "tied", shape=shape))
        )
        assert tied.lm_head.weight is tied.model.embed_tokens.weight
        free = self.write(tmp_path / "free")
        size = (tmp_path / "tied" / "model.safetensors").stat().st_size
        assert size < (free / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {**TINY, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    return write_checkpoint(tmp_path_factory.mktemp("gpu"), shape, shards=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    DEVICE = torch.device("cuda", 0)

    @pytest.mark.parametrize("asked", CONFIGS)
    def test_streamed_is_the_standard_load(self, big: Path, asked: dict[str, Any]) -> None:
        asks = request(big, quantization_config=bnb_config(**asked), device=self.DEVICE)
        streamed = strategy("nf4", "streamed").load(asks)
        assert {t.device.type for t in tensors_of(streamed).values()} == {"cpu"}
        assert streamed.hf_device_map == {"": 0}
        standard = strategy("nf4", "standard").load_resident(asks)
        assert {t.device.type for t in tensors_of(standard).values()} == {"cuda"}
        assert_same(streamed, standard)

    def test_one_weight_at_a_time_is_on_the_device(self, big: Path) -> None:
        strategy("nf4", "streamed").load(request(big, device=self.DEVICE))
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        random_state = torch.cuda.get_rng_state()
        strategy("nf4", "streamed").load(request(big, device=self.DEVICE))
        largest = 1024 * 4096 * 2
        peak = torch.cuda.max_memory_allocated() - before
        assert largest <= peak < 2 * largest
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert torch.equal(random_state, torch.cuda.get_rng_state())
