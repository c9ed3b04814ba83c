"""The model of each method that training's cost is measured for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from cost_work import Work, bf16_bytes

import poros
from poros_core.gate.packed_checkpoint import write_packed_checkpoint
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.machine import available_memory
from poros_core.prepare import prepared_of

_ALPHA = 2


class Refused(Exception):
    """The method cannot do this, in its own words or for want of a package."""


def compute_device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def write_checkpoint(work: Work, path: Path) -> None:
    """Write the seeded random checkpoint that every method of a run loads."""
    if work.weights == "rolled":
        path.mkdir()
        write_packed_checkpoint(
            work.subject().config,
            path,
            seed=work.seed,
            device=compute_device(),
            load=lambda plain: _from_pretrained(work, plain, device_map={"": compute_device()}),
        )
        return
    write_random_checkpoint(
        work.subject().config,
        path,
        seed=work.seed,
        dtype=torch.bfloat16,
        device=compute_device(),
    )


class Builder:
    """Makes the models that one process measures, one after the other; see ``cost_work.groups``.

    Between two of them ``strip`` takes everything off the base but its weights.

    Attributes:
        base_bytes: device memory that was allocated when the base was built.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._base: Any = None
        self._model: Any = None
        self._checkpointed = False
        self.base_bytes = 0

    def build(self, work: Work) -> Any:
        """Return the model of a method, with adapters, ready to train.

        Raises:
            Refused: the method cannot train this.
        """
        torch.manual_seed(work.seed)
        if work.method == "unsloth":
            return _unsloth(work, self._path)
        if work.method == "accelerate-offload":
            return _accelerate(work, self._path, self._device)
        if self._base is None:
            home: Any = "store" if work.method == "poros" else "device"
            self._base = _base(work, self._path, self._device, home=home)
            if self._device.type == "cuda":
                self.base_bytes = torch.cuda.memory_allocated(self._device)
        self._model = model = _with_adapters(work, self._base)
        self._checkpointed = work.method == "peft-checkpointing"
        if self._checkpointed:
            _checkpoint(model)
        if work.method == "poros":
            poros.prepare(
                model,
                block_size=work.block_size,
                vram_budget=work.vram_budget,  # type: ignore[arg-type]
                graphs=work.graphs,
                offload_activations=work.offload_activations,
                verbose=False,
                **work.prepare,
            )
        return model.train()

    def strip(self) -> None:
        """Take runtime and adapters off the base."""
        model, self._model = self._model, None
        if prepared_of(model) is not None:
            poros.unprepare(model)
        if self._checkpointed:
            model.gradient_checkpointing_disable()
        self._base = model.unload()


def _base(work: Work, path: Path | None, device: torch.device, *, home: Any) -> Any:
    if path is None:
        from direct_weights import direct_model

        return direct_model(
            work.subject().config,
            precision=work.precision,
            seed=work.seed,
            device=device,
            home=home,
        )
    if home == "store":
        return poros.load(path, precision=work.precision, device=device)
    return _from_pretrained(work, path, device_map={"": device if home == "device" else "cpu"})


def _from_pretrained(work: Work, path: Path, *, device_map: Any) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    return AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        device_map=device_map,
        quantization_config=nf4 if work.precision == "nf4" else None,
    )


def _with_adapters(work: Work, model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(work.seed)
    rank = work.subject().rank
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=_ALPHA * rank,
        lora_dropout=work.dropout,
        target_modules="all-linear",
    )
    return get_peft_model(model, config)


def _checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _accelerate(work: Work, path: Path | None, device: torch.device) -> Any:
    """Every frozen weight in host memory behind Accelerate's hooks, with checkpointing."""
    from accelerate import cpu_offload

    if work.precision == "nf4":
        _ask_transformers(work)
    needed, free = bf16_bytes(work.subject()), available_memory()
    if free is not None and needed > free:
        raise Refused(
            f"the base takes {needed / 1e9:.0f} GB of host memory, and {free / 1e9:.0f} GB are free"
        )
    model = _with_adapters(work, _base(work, path, device, home="host"))
    _checkpoint(model)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        own = list(module.parameters(recurse=False))
        if own and not any(param.requires_grad for param in own):
            cpu_offload(module, execution_device=device)
    return model.train()


def _ask_transformers(work: Work) -> None:
    """Ask whether NF4 layers may stand in host memory beside others on the device.

    Raises:
        Refused: they may not, in Transformers' words.
    """
    from direct_weights import nf4_quantizer

    layers = int(work.subject().text_config["num_hidden_layers"])
    places: dict[str, Any] = {f"model.layers.{index}": "cpu" for index in range(layers)}
    places |= {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    try:
        nf4_quantizer().validate_environment(device_map=places)
    except ValueError as error:
        raise Refused(f"from_pretrained with a device_map: {error}") from error


def _unsloth(work: Work, path: Path | None) -> Any:
    if importlib.util.find_spec("unsloth") is None:
        raise Refused("unsloth is not installed")
    if path is None:
        raise Refused("unsloth loads a checkpoint, and these weights were drawn in place")
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]

    subject = work.subject()
    model, _ = FastLanguageModel.from_pretrained(
        str(path), max_seq_length=subject.seq_len, load_in_4bit=work.precision == "nf4"
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=subject.rank,
        lora_alpha=_ALPHA * subject.rank,
        lora_dropout=work.dropout,
        target_modules=[
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        ],
        use_gradient_checkpointing="unsloth",
        random_state=work.seed,
    ).train()
