"""The bytes of a base that was loaded, weight by weight against Transformers' own operation.

[Note: Weight by weight]
Where no machine holds a standard load beside a streamed one, or no disk the checkpoint, each weight
is quantised once more as the standard load does it: its bf16 values go to the device, and
Transformers' operation for bitsandbytes, on a skeleton that Transformers prepared, quantises them
there. dtype, shape and SHA-256 of packed data and of every tensor of the quantisation state are
compared; of what is not quantised, with the checkpoint's tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from poros_core.configs import auto_class
from poros_core.conformance.manifest import tensor_manifest

__all__ = ["checkpoint_source", "verify"]

_THREADS = 8

Source = Callable[[str, torch.Size], torch.Tensor]


def checkpoint_source(folder: Path) -> Source:
    """Return what gives a tensor of a checkpoint by its name."""
    files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), file))

    def source(name: str, shape: torch.Size) -> torch.Tensor:
        if name == "lm_head.weight" and name not in files:
            name = "model.embed_tokens.weight"  # tied
        with safe_open(files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    return source


def verify(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    double: bool,
    weights: Source,
    rest: Source,
    device: torch.device,
) -> dict[str, Any]:
    """Compare a loaded NF4 base; see [Note: Weight by weight].

    Args:
        model: the model.
        config: its Transformers config as a mapping.
        double: whether scales are quantised too.
        weights: gives a weight that is to be quantised, in bf16, by its name.
        rest: gives any other tensor of the checkpoint.
        device: where the standard load quantises.

    Returns:
        How many tensors were compared, how many differ, the first of them, and how long it took.
    """
    start = time.perf_counter()
    skeleton, quantizer = _skeleton(config, double=double)
    operation = Bnb4bitQuantize(quantizer)
    leaves = {path: module for path, module in skeleton.named_modules() if _own(module)}

    def reference(path: str) -> dict[str, str]:
        module = leaves[path]
        kept = _own(module)
        alone = nn.Module()  # without the modules inside it
        for name, param in kept.items():
            full = f"{path}.{name}"
            if isinstance(param, bnb.nn.Params4bit):
                value = weights(full, param.shape).to(device)
                made = operation.convert({full: [value]}, full_layer_name=full, model=skeleton)
                alone._parameters[name] = made[full]
            else:
                alone._parameters[name] = nn.Parameter(rest(full, param.shape), False)
        return {f"{path}{name}": text for name, text in tensor_manifest(alone).items()}

    expected: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for part in pool.map(reference, leaves):
            expected.update(part)
    buffers = {name for name, _ in model.named_buffers()}
    found = {k: v for k, v in tensor_manifest(model).items() if k not in buffers}
    expected = {name: text for name, text in expected.items() if name not in buffers}
    wrong = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
    return {
        "tensors": len({**expected, **found}),
        "mismatched": len(wrong),
        "first": None
        if not wrong
        else {"tensor": wrong[0], "expected": expected.get(wrong[0]), "got": found.get(wrong[0])},
        "verify_seconds": time.perf_counter() - start,
    }


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def _skeleton(config: Mapping[str, Any], *, double: bool) -> tuple[Any, Any]:
    """Return the model on the meta device as the standard load quantises it, and its quantizer."""
    asked = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double,
    )
    model_config = AutoConfig.for_model(**config)
    model_class = getattr(transformers, auto_class(config))
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(model_config, dtype=torch.bfloat16)
    quantizer = Bnb4BitHfQuantizer(asked, pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": "cpu"})
    return model, quantizer
