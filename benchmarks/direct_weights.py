"""Models at any shape with seeded random weights that never stand on a disk.

[Note: Direct weights]
A 32B checkpoint in bf16 is 65 GB, and a 72B one does not fit beside its NF4 copy. So NF4 weights
are drawn as they are stored: random packed bytes and random absmax, blocks of 64, no double
quantisation. Every tensor has a generator of its own, seeded by the seed and its place, so that
methods that run on the same kind of device train on the same weights. Values are drawn on the
compute device and moved unit by unit: device and host hold one unit at most besides the result.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Literal

import bitsandbytes as bnb
import torch
import transformers
from accelerate import init_empty_weights
from bitsandbytes.functional import QuantState, get_4bit_type
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from poros_core.configs import auto_class
from poros_core.host_store import HostStore
from poros_core.plan import BlockPlan, build_plan, config_mapping
from poros_core.plugins import plugins
from poros_core.prepare import STORE
from poros_core.protocols import TensorRef
from poros_loaders.nf4 import NF4
from poros_loaders.pretrained import mark_device

BLOCK = 64
_STD = 0.02
_NORM_STD = 0.1
_ABSMAX = (0.03, 0.06)

Home = Literal["store", "device", "host"]


def direct_model(
    config: Mapping[str, Any], *, precision: str, seed: int, device: torch.device, home: Home
) -> Any:
    """Return a frozen Transformers model with random weights; see [Note: Direct weights].

    Args:
        config: a Transformers config as a mapping.
        precision: ``"nf4"`` or ``"bf16"``.
        seed: of all values.
        device: where the model will compute.
        home: where the base is put: ``"store"`` is Poros' host store, as ``poros.load`` leaves it,
            ``"device"`` the device, as ``from_pretrained`` leaves it, ``"host"`` pageable memory.
    """
    model = _skeleton(config, precision=precision)
    for module in model.modules():
        NF4.keep_layout(module)
    model.requires_grad_(False)
    family = plugins().family_for(config_mapping(model)).value
    plan = build_plan(model, family=family, codecs=plugins().codecs(), device=device)
    target = torch.device("cpu") if home == "host" else device
    store = HostStore(device, home=True) if home == "store" else None
    names = {id(param): name for name, param in model.named_parameters()}
    code = get_4bit_type("nf4", device=device)
    for unit in plan.units():
        for number, ref in enumerate(unit.refs):
            drawn = (
                code
                if ref.name == "code"
                else _draw(ref, f"{seed}:{unit.name}:{number}", names=names, device=device)
            )
            ref.set(drawn if store is not None else drawn.to(target))
            del drawn
        if store is not None:
            store.adopt(unit.refs)
    _place_the_rest(model, plan, seed=seed, names=names, device=device, target=target)
    if store is not None:
        model.__dict__[STORE] = store
    if home != "host":
        mark_device(model, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def _skeleton(config: Mapping[str, Any], *, precision: str) -> Any:
    """Return the model with placeholders that take address space only: nothing has touched them."""
    model_config = AutoConfig.for_model(**config)
    model_class = getattr(transformers, auto_class(config))
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(model_config, dtype=torch.bfloat16)
    if precision == "nf4":
        quantizer = nf4_quantizer()
        quantizer.preprocess_model(model, device_map={"": "cpu"})
        model.hf_quantizer = quantizer
        model.is_loaded_in_4bit = True
        model.config.quantization_config = quantizer.quantization_config
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and param.device.type == "meta":
                if id(param) not in placed:
                    placed[id(param)] = _placeholder(module, name, param)
                module._parameters[name] = placed[id(param)]
    return model


def nf4_quantizer() -> Any:
    """Return Transformers' quantizer for NF4 as the benchmarks use it."""
    asked = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    return Bnb4BitHfQuantizer(asked, pre_quantized=False)


def _placeholder(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
    if not (isinstance(module, bnb.nn.Linear4bit) and name == "weight"):
        return nn.Parameter(torch.empty(param.shape, dtype=torch.bfloat16), requires_grad=False)
    shape = torch.Size((module.out_features, module.in_features))
    if shape.numel() % (2 * BLOCK):
        raise ValueError(f"a weight of shape {tuple(shape)} is no whole number of NF4 blocks")
    state = QuantState(
        absmax=torch.empty(shape.numel() // BLOCK, dtype=torch.float32),
        shape=shape,
        code=torch.empty(16, dtype=torch.float32),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    weight: nn.Parameter = bnb.nn.Params4bit(
        torch.empty((shape.numel() // 2, 1), dtype=torch.uint8),
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=False,
        quant_type="nf4",
        module=module,
        bnb_quantized=True,
    )
    module.quant_state = state  # type: ignore[assignment]
    return weight


def _draw(
    ref: TensorRef, seed: str, *, names: Mapping[int, str], device: torch.device
) -> torch.Tensor:
    here = ref.get()
    generator = _generator(seed, device)
    if here.dtype == torch.uint8:
        packed = torch.empty(here.shape, dtype=here.dtype, device=device)
        return packed.random_(0, 256, generator=generator)
    if ref.name == "absmax":
        scales = torch.empty(here.shape, dtype=here.dtype, device=device)
        return scales.uniform_(*_ABSMAX, generator=generator)
    return _normal(names[ref.key[0]], here, generator=generator, device=device)


def _normal(
    name: str, like: torch.Tensor, *, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Draw a plain weight as a random checkpoint has it: norms around 1, all else around 0."""
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    norm = like.dim() <= 1 and "bias" not in name.rpartition(".")[2]
    return tensor.normal_(float(norm), _NORM_STD if norm else _STD, generator=generator)


def _generator(seed: str, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(seed.encode()))  # the CPU's reads 32 bits of a seed only
    return generator


def _place_the_rest(
    model: nn.Module,
    plan: BlockPlan,
    *,
    seed: int,
    names: Mapping[int, str],
    device: torch.device,
    target: torch.device,
) -> None:
    for param in plan.on_device:
        name = names[id(param)]
        generator = _generator(f"{seed}:{name}", device)
        param.data = _normal(name, param, generator=generator, device=device).to(target)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(target)
