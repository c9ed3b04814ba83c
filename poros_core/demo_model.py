"""The demo's model and data: made on the spot from a sample of our own, nothing downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

__all__ = ["demo_batches", "demo_tokenizer", "sample", "write_demo_checkpoint"]

_VOCABULARY = 512
_PAD, _END = "<pad>", "<end>"
_IGNORED = -100


def sample() -> list[tuple[str, str]]:
    """Return the instruction sample as (instruction, answer) pairs."""
    text = resources.files("poros_core").joinpath("demo_sample.jsonl").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in text.splitlines()]
    return [(entry["instruction"], entry["answer"]) for entry in entries]


def demo_tokenizer() -> Any:
    """Train a small byte-pair tokenizer on the sample; return it as Transformers uses it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PAD, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_prompt(q) + a for q, a in sample()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END)


def write_demo_checkpoint(path: Path, *, seed: int) -> Any:
    """Write a small Qwen2 model with random weights, and its tokenizer.

    Args:
        path: the folder; made if it is not there.
        seed: of the weights. The caller's random state is left alone.

    Returns:
        The tokenizer.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = demo_tokenizer()
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return tokenizer


def demo_batches(
    tokenizer: Any, *, batch: int, seed: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield padded batches of the sample without end, with a loss on the answers only."""
    rows = [_row(tokenizer, question, answer) for question, answer in sample()]
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(rows) - batch + 1, batch):
            chosen = [rows[index] for index in order[start : start + batch]]
            yield _collate(chosen, pad=tokenizer.pad_token_id, device=device)


def _prompt(question: str) -> str:
    return f"Instruction: {question}\nAnswer: "


def _row(tokenizer: Any, question: str, answer: str) -> tuple[list[int], int]:
    prompt: list[int] = tokenizer.encode(_prompt(question), add_special_tokens=False)
    reply: list[int] = tokenizer.encode(answer, add_special_tokens=False)
    return [*prompt, *reply, tokenizer.eos_token_id], len(prompt)


def _collate(
    rows: Sequence[tuple[list[int], int]], *, pad: int, device: torch.device
) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    padded = {
        "input_ids": [ids + [pad] * (width - len(ids)) for ids, _ in rows],
        "attention_mask": [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows],
        "labels": [
            [_IGNORED] * prompt + ids[prompt:] + [_IGNORED] * (width - len(ids))
            for ids, prompt in rows
        ],
    }
    return {name: torch.tensor(value, device=device) for name, value in padded.items()}
