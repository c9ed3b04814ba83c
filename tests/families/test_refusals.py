"""What is not covered is refused with an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from conftest import PluginSite
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import poros
from poros_core.errors import PluginError, PrepareError, UnsupportedModelError
from poros_core.plugins import plugins
from poros_families.gemma4 import GEMMA4
from poros_families.qwen3 import QWEN3


def tiny() -> Any:
    config = AutoConfig.for_model(**QWEN3.shapes["tiny"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}},
        {**GEMMA4.shapes["31b"], "enable_moe_block": True, "num_experts": 128},
        {
            "model_type": "gemma4",
            "text_config": {**GEMMA4.shapes["tiny"], "enable_moe_block": True, "num_experts": 8},
        },
    ],
    ids=["qwen3_moe", "qwen3_5_moe", "gemma4_text", "gemma4"],
)
def test_a_mixture_of_experts_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mixture-of-experts .* Choose a dense"):
        plugins().family_for(config)


@pytest.mark.parametrize("shape", ["tiny", "tiny-e2b", "tiny-multimodal", "31b", "e2b"])
def test_a_dense_gemma_4_is_not_refused(shape: str) -> None:
    config = AutoConfig.for_model(**GEMMA4.shapes[shape]).to_dict()
    assert plugins().family_for(config).value is GEMMA4


@pytest.mark.parametrize(
    "config",
    [
        AutoConfig.for_model("t5").to_dict(),
        AutoConfig.for_model("bart").to_dict(),
        {"model_type": "qwen2", "is_encoder_decoder": True},
        {"model_type": "gemma3", "text_config": {"is_encoder_decoder": True}},
    ],
    ids=["t5", "bart", "qwen2", "nested"],
)
def test_an_encoder_decoder_model_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"encoder-decoder .* decoder-only"):
        plugins().family_for(config)


def test_prepare_refuses_an_encoder_decoder_model() -> None:
    config = AutoConfig.for_model(
        "t5", d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, vocab_size=96
    )
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        poros.prepare(model, verbose=False)


def test_an_offloaded_model_is_refused() -> None:
    model = tiny()
    accelerate.cpu_offload(model.get_base_model(), execution_device=torch.device("cpu"))
    with pytest.raises(PrepareError, match=r"dispatched over host memory .* poros\.load"):
        poros.prepare(model, verbose=False)


def test_a_model_that_is_merely_dispatched_to_one_device_is_taken() -> None:
    model = tiny()
    accelerate.dispatch_model(
        model.get_base_model(), device_map={"": "cpu"}, main_device="cpu", force_hooks=True
    )
    poros.unprepare(poros.prepare(model, verbose=False))


@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_is_refused() -> None:
    model = tiny()
    fully_shard(model.get_base_model().model.layers[1], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PrepareError, match=r"sharded .* DTensors.* Load the model whole"):
        poros.prepare(model, verbose=False)


def test_a_zero_3_model_is_refused() -> None:
    model = tiny()
    for number, param in enumerate(model.parameters()):
        param.ds_id = number
    with pytest.raises(PrepareError, match="ZeRO-3"):
        poros.prepare(model, verbose=False)


@pytest.mark.usefixtures("one_process")
def test_a_wrapped_model_is_refused() -> None:
    with pytest.raises(PrepareError, match=r"wrapped by DistributedDataParallel .* Prepare it"):
        poros.prepare(DistributedDataParallel(tiny()), verbose=False)


def test_a_family_that_two_plugins_claim_is_an_error(plugin_site: PluginSite) -> None:
    plugin_site.install(
        "other-qwen",
        plugin="other-qwen",
        module="other_qwen",
        source=(
            "from poros_core.hookspecs import hookimpl\n"
            "from poros_core.family import Family\n"
            "@hookimpl\n"
            "def poros_families():\n"
            "    return [Family(name='mine', title='Mine', model_types=('qwen3',),\n"
            "                   shapes={'tiny': {'model_type': 'qwen3'}})]\n"
        ),
    )
    with pytest.raises(PluginError, match=r"model_type qwen3") as error:
        poros.prepare(tiny(), verbose=False)
    assert {"other-qwen", "poros-families"} <= set(str(error.value).replace("'", " ").split())
    assert "POROS_DISABLE_PLUGINS" in str(error.value)
