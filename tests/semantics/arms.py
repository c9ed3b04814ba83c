"""Two arms of one training script: a resident model that Poros never touched, and a streamed one.

A test writes its script once, as a function of an :class:`Arm`. ``twins`` runs it with either
arm from the same seed, and compares everything that the script noted, bit for bit.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from attrs import define, evolve, field, frozen
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

import poros
from poros_core.prepare import prepared_of
from semantics.mold import Mold

os.environ["POROS_POISON"] = "1"
torch.set_num_threads(1)

LAYERS = 5
"""Blocks of two layers leave an odd one, and more units than slots."""
FEW_LAYERS = 3
"""As many say the same of blocks of one layer."""
VOCAB = 96
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME_LINEAR = ("q_proj", "v_proj", "up_proj", "down_proj")

Batch = dict[str, torch.Tensor]


@frozen(kw_only=True)
class Recipe:
    """How an arm's model is built.

    Attributes:
        precision: ``nf4`` (bf16 compute and the rest in bf16), ``bf16`` or ``fp32``.
        tied: whether the head shares the embedding's table.
        layers: how many; None for as many as the block sizes need.
        lora: what differs from the usual ``LoraConfig``.
        before_peft: called with the Transformers model; returns the model to wrap.
        peft: False gives the bare Transformers model.
    """

    precision: str = "nf4"
    tied: bool = False
    layers: int | None = None
    lora: Mapping[str, Any] = field(factory=dict)
    before_peft: Callable[[nn.Module], nn.Module] | None = None
    peft: bool = True

    def with_lora(self, **lora: Any) -> Recipe:
        """Return a recipe with further differences in its ``LoraConfig``."""
        return evolve(self, lora={**self.lora, **lora})


NF4 = Recipe()
BF16 = Recipe(precision="bf16")
FP32 = Recipe(precision="fp32")


def lora_config(**changes: Any) -> LoraConfig:
    """LoRA with dropout, and with B that is not zero, so that every gradient counts at once."""
    usual: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": list(SOME_LINEAR),
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**{**usual, **changes})


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="poros-semantics-")


@functools.cache
def checkpoint(*, tied: bool = False, layers: int = LAYERS) -> Path:
    """Write the tiny checkpoint once per session; biases and norms are not trivial."""
    path = Path(_folder().name) / f"{'tied' if tied else 'untied'}-{layers}"
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.05)
            elif parameter.ndim == 1:
                nn.init.normal_(parameter, mean=1.0, std=0.1)
            else:
                nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    return path


def load_plain(path: Path, *, precision: str = "nf4") -> nn.Module:
    """Load a checkpoint as an ordinary script does."""
    if precision != "nf4":
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
    )


@functools.cache
def _pristine(precision: str, tied: bool, layers: int) -> Mold:
    return Mold(load_plain(checkpoint(tied=tied, layers=layers), precision=precision))


def base_model(recipe: Recipe) -> nn.Module:
    """Return a fresh Transformers model of a recipe."""
    model: nn.Module = _pristine(recipe.precision, recipe.tied, recipe.layers or LAYERS).cast()
    for module in model.modules():
        # In evaluation, a CPU that has AVX512-BF16 repacks 4-bit weights in place.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _build(recipe: Recipe) -> nn.Module:
    model = base_model(recipe)
    if recipe.before_peft is not None:
        model = recipe.before_peft(model)
    if not recipe.peft:
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(model, lora_config(**recipe.lora)).train()


_BUILT: dict[str, Mold] = {}


def build(recipe: Recipe) -> nn.Module:
    """Return a fresh model with its adapters, the same for the same recipe."""
    if recipe.before_peft is not None:
        return _build(recipe)
    key = repr(recipe)
    if key not in _BUILT:
        _BUILT[key] = Mold(_build(recipe))
    return _BUILT[key].cast()


def batches(count: int, *, seed: int = 0, size: int = 2, padding: str = "right") -> list[Batch]:
    """Return padded batches whose lengths differ, with labels that are partly -100."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = 9 + (5 * number + seed) % 11
        ids = torch.randint(3, VOCAB, (size, length), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(1, size):
            short = 1 + (row + number) % 5
            mask[row, -short:] = 0
            if padding == "left":
                mask[row] = mask[row].flip(0)
        ids[mask == 0] = 0
        labels = ids.clone()
        labels[mask == 0] = -100
        labels[:, : 2 + number % 3] = -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


@define(eq=False)
class Arm:
    """What a script gets.

    Attributes:
        model: the model; its ``prepare`` line is run before the script unless ``late``.
        streamed: whether this is the arm that Poros runs.
        options: what the script's ``prepare`` line passes.
        notes: what the script noted, in order.
    """

    model: Any
    streamed: bool
    options: Mapping[str, Any] = field(factory=dict)
    notes: list[tuple[str, torch.Tensor | None]] = field(factory=list)

    def prepare(self) -> None:
        """Run the one line: streams the model in one arm, does nothing in the other."""
        if self.streamed:
            assert poros.prepare(self.model, verbose=False, **self.options) is self.model

    def unprepare(self) -> None:
        """Undo the one line."""
        if self.streamed:
            poros.unprepare(self.model)

    def note(self, name: str, value: Any) -> None:
        """Note a tensor, a number, a nested structure of them, or None."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.note(f"{name}.{key}", item)
        elif isinstance(value, list | tuple):
            self.note(f"{name}.count", len(value))
            for index, item in enumerate(value):
                self.note(f"{name}.{index}", item)
        elif value is None:
            self.notes.append((name, None))
        else:
            self.notes.append((name, torch.as_tensor(value).detach().clone()))

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def note_grads(self, name: str = "grad") -> None:
        """Note the gradient of everything that trains, absent ones included."""
        self.note(name, {key: param.grad for key, param in self.trainable().items()})

    def note_weights(self, name: str = "weight") -> None:
        """Note everything that trains."""
        self.note(name, self.trainable())

    def optimizer(self, lr: float = 0.01) -> torch.optim.Optimizer:
        """Return AdamW over what trains."""
        return torch.optim.AdamW(self.trainable().values(), lr=lr, weight_decay=0.01)

    def step(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool = True) -> None:
        """Note gradients, step, and note weights and optimizer state."""
        params = self.trainable()
        self.note("grad", {name: param.grad for name, param in params.items()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        self.note("weight", params)
        self.note("optimizer", {name: optimizer.state[param] for name, param in params.items()})

    def train(self, data: Iterable[Batch], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Run the plainest loop: forward, backward, step."""
        optimizer = optimizer or self.optimizer()
        for batch in data:
            loss = self.model(**batch).loss
            loss.backward()
            self.note("loss", loss)
            self.step(optimizer)


Script = Callable[[Arm], None]


def play(script: Script, recipe: Recipe, *, streamed: bool, late: bool, **options: Any) -> Arm:
    """Run a script with one arm from the seed."""
    arm = Arm(build(recipe), streamed, options)
    if not late:
        arm.prepare()
    torch.manual_seed(5)
    script(arm)
    arm.note("rng", torch.get_rng_state())
    if streamed and (prepared := prepared_of(arm.model)) is not None:
        assert prepared.handle.counters()["bytes_streamed"] > 0, "nothing streamed"
    return arm


def twins(
    script: Script,
    recipe: Recipe = NF4,
    *,
    late: bool = False,
    sizes: Sequence[int | Literal["all"]] = (1,),
) -> Arm:
    """Run a script with both arms and compare everything noted.

    Args:
        script: the script.
        recipe: how the model is built.
        late: the script itself calls ``arm.prepare()``.
        sizes: the block sizes to run the streamed arm with.

    Returns:
        The last streamed arm.
    """
    if recipe.layers is None:
        recipe = evolve(recipe, layers=FEW_LAYERS if set(sizes) == {1} else LAYERS)
    resident = play(script, recipe, streamed=False, late=late)
    for size in sizes:
        streamed = play(script, recipe, streamed=True, late=late, block_size=size)
        compare(resident.notes, streamed.notes, label=f"block_size={size}: ")
    return streamed


def _differs(left: torch.Tensor | None, right: torch.Tensor | None) -> str | None:
    if left is None or right is None:
        return None if left is right else f"{_word(left)} resident, {_word(right)} streamed"
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{left.dtype} {tuple(left.shape)} / {right.dtype} {tuple(right.shape)}"
    if torch.equal(left, right):
        return None
    count = int((left != right).sum())
    nans = int(right.isnan().sum()) if right.is_floating_point() else 0
    gap = float((left.double() - right.double()).abs().max())
    return f"{count} of {left.numel()} elements differ, by up to {gap:.3g} ({nans} NaN)"


def _word(value: torch.Tensor | None) -> str:
    return "absent" if value is None else "present"


def compare(
    resident: Sequence[tuple[str, torch.Tensor | None]],
    streamed: Sequence[tuple[str, torch.Tensor | None]],
    *,
    label: str = "",
) -> None:
    """Fail unless both arms noted the same things, bit for bit."""
    assert len(resident) > 1, "the script noted nothing"
    assert [name for name, _ in resident] == [name for name, _ in streamed]
    found = [
        f"#{index} {name}: {text}"
        for index, ((name, left), (_, right)) in enumerate(zip(resident, streamed, strict=True))
        if (text := _differs(left, right)) is not None
    ]
    if found:
        pytest.fail(
            f"{label}{len(found)} of {len(resident)} notes differ. The first:\n  "
            + "\n  ".join(found[:6]),
            pytrace=False,
        )


def find(root: nn.Module, ending: str) -> nn.Module:
    """Return the one module whose name ends like this."""
    (module,) = [m for n, m in root.named_modules() if n.endswith(ending)]
    return module


def layers_of(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a model, wrapped by PEFT or not."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.get_decoder().layers


def frozen_places(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the frozen base, quantisation state included."""
    for name, param in model.named_parameters():
        if param.requires_grad or "lora_" in name:
            continue
        yield name, param
        state = getattr(param, "quant_state", None)
        if state is not None:
            for key in ("absmax", "code", "offset"):
                if getattr(state, key, None) is not None:
                    yield f"{name}.{key}", getattr(state, key)
            if state.state2 is not None:
                yield f"{name}.state2.absmax", state.state2.absmax
                yield f"{name}.state2.code", state.state2.code


def tiny_tokenizer() -> Any:
    """Make a word-level tokenizer whose words are the numbers of the tiny vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCAB))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
