"""The batches that every arm of a gate gets: the same ones, made from the seed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from attrs import frozen

from poros_core.errors import GateError
from poros_core.gate.options import Subject
from poros_core.gate.tensor_file import read_tensors

__all__ = ["Record", "make_batches"]

_IGNORED = -100
Batch = dict[str, torch.Tensor]


@frozen(eq=False)
class Record:
    """One training example: its tokens, and how many of them are the prompt, which has no loss."""

    ids: torch.Tensor
    prompt: int


def make_batches(
    subject: Subject, *, data: Path | None, seed: int, device: torch.device
) -> Iterator[Batch]:
    """Yield micro-batches without end.

    Random tokens come at exactly ``seq_len`` with a batch of one, and in lengths that differ from
    row to row with a larger one. The first part of every row is a prompt without loss.

    Args:
        subject: what the gate runs on.
        data: a file with ``ids``, ``offsets`` and ``prompt_len``; None means random tokens.
        seed: of the tokens, or of the records' order.
        device: where batches go.

    Raises:
        GateError: the file does not fit the model.
    """
    generator = torch.Generator().manual_seed(seed)
    records = (
        _random_records(subject, generator)
        if data is None
        else _endless(read_records(data, subject), generator)
    )
    while True:
        rows = [next(records) for _ in range(subject.batch)]
        yield _collate(rows, subject=subject, device=device)


def read_records(path: Path, subject: Subject) -> list[Record]:
    """Read tokenised records, truncated to the sequence length.

    Records whose prompt alone fills the sequence have no loss and are left out.

    Raises:
        GateError: the file does not fit the model, or no record is left.
    """
    tensors = read_tensors(path)
    missing = {"ids", "offsets", "prompt_len"} - tensors.keys()
    if missing:
        raise GateError(
            f"'{path}' lacks {', '.join(sorted(missing))}. A data file holds ids (int32), offsets "
            "(int64, one more than there are records) and prompt_len (int64)."
        )
    ids = tensors["ids"].long()
    largest = int(ids.max()) if ids.numel() else 0
    if largest >= subject.vocabulary:
        raise GateError(
            f"'{path}' has token {largest}, and the vocabulary of {subject.shape} ends at "
            f"{subject.vocabulary - 1}. Give a shape or model with the tokenizer that the records "
            "were made with, or leave --data out for random tokens."
        )
    offsets = tensors["offsets"].tolist()
    prompts = tensors["prompt_len"].tolist()
    broken = len(offsets) != len(prompts) + 1 or (offsets[0], offsets[-1]) != (0, len(ids))
    if broken or offsets != sorted(offsets):
        raise GateError(
            f"'{path}' contradicts itself: {len(prompts)} prompts, {len(offsets)} offsets that end "
            f"at {offsets[-1] if offsets else None}, {len(ids)} tokens. Write it again: offsets "
            "has one entry more than there are records, begins at 0, never falls, and ends at the "
            "number of tokens."
        )
    if min([int(ids.min()) if len(ids) else 0, *prompts]) < 0:
        raise GateError(
            f"'{path}' has tokens or prompt lengths below 0. Write it again: ids are what the "
            "tokenizer gives, prompt_len counts the tokens of each record that have no loss."
        )
    records = [
        Record(ids[start:end][: subject.seq_len], prompt)
        for start, end, prompt in zip(offsets[:-1], offsets[1:], prompts, strict=True)
        if max(prompt, 1) < min(end - start, subject.seq_len)
    ]
    if not records:
        raise GateError(
            f"No record of '{path}' has a token with a loss within --seq-len {subject.seq_len}. "
            "Give a longer --seq-len."
        )
    return records


def _endless(records: Sequence[Record], generator: torch.Generator) -> Iterator[Record]:
    while True:
        for index in torch.randperm(len(records), generator=generator).tolist():
            yield records[index]


def _random_records(subject: Subject, generator: torch.Generator) -> Iterator[Record]:
    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    while True:
        longest = subject.seq_len
        length = longest if subject.batch == 1 else between(max(4, longest // 2), longest)
        ids = torch.randint(0, subject.vocabulary, (length,), generator=generator)
        yield Record(ids, between(1, length // 2))


def _collate(rows: Sequence[Record], *, subject: Subject, device: torch.device) -> Batch:
    width = subject.pad_to or max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), subject.pad_token)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, _IGNORED)
    for index, row in enumerate(rows):
        length = len(row.ids)
        start = 0 if subject.padding == "right" else width - length
        ids[index, start : start + length] = row.ids
        mask[index, start : start + length] = 1
        labels[index, start + row.prompt : start + length] = row.ids[row.prompt :]
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}
