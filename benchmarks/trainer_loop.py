"""HF Trainer over real records, measured as the plain loop is."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from cost_figures import Stopwatch, adamw, figures_of, the_loss, totals
from cost_work import Work
from device_figures import DeviceMemory
from transformers import Trainer, TrainerCallback, TrainingArguments

from poros_core.gate.data import Record, read_records


class Collator:
    """Pads records on the right, and notes how wide each batch came out."""

    def __init__(self, *, pad: int, multiple: int | None) -> None:
        self._pad = pad
        self._multiple = multiple or 1
        self.widths: list[int] = []

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self._multiple) * self._multiple
        self.widths.append(width)
        ids = torch.full((len(rows), width), self._pad)
        mask = torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for index, row in enumerate(rows):
            length, prompt = len(row["input_ids"]), row["prompt"]
            ids[index, :length] = row["input_ids"]
            mask[index, :length] = 1
            labels[index, prompt:length] = row["input_ids"][prompt:]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class _Marks(TrainerCallback):
    """Marks the end of every step, and the runtime's totals before and after the timed ones."""

    def __init__(self, work: Work, model: Any, memory: DeviceMemory, watch: Stopwatch) -> None:
        self._work = work
        self._model = model
        self._memory = memory
        self._watch = watch
        self._watching = ExitStack()
        self._steps = 0
        self.start: dict[str, int] = totals(model)
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs before the first step."""
        if self._work.warmup > 1:
            self._watching.enter_context(self._memory.watching())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Runs after the optimizer's step and ``zero_grad``."""
        self._steps += 1
        self._watch.mark()
        if self._steps < self._work.warmup:
            self._memory.look()
            if self._steps == self._work.warmup - 1:
                self._watching.close()
        elif self._steps == self._work.warmup:
            self.first = totals(self._model)
        self.last = totals(self._model)


def train(work: Work, model: Any, device: torch.device, memory: DeviceMemory) -> dict[str, Any]:
    """Train and return the figures, among them the width of every timed batch."""
    assert work.data is not None, "a Trainer's loop needs records"
    subject = work.subject()
    records = read_records(Path(work.data), subject)
    collate = Collator(pad=subject.pad_token, multiple=work.pad_to)
    watch = Stopwatch(device)
    marks = _Marks(work, model, memory, watch)
    optimizer, host_state = adamw(work, model)
    with tempfile.TemporaryDirectory(prefix="poros-trainer-") as folder, the_loss(work, model):
        trainer = Trainer(
            model,
            _arguments(work, folder, cuda=device.type == "cuda"),
            data_collator=collate,
            train_dataset=_rows(records),
            optimizers=(optimizer, None),
            callbacks=[marks],
        )
        done = trainer.train()
        seconds = watch.seconds()[work.warmup - 1 :]
    found = figures_of(
        work,
        model,
        seconds=seconds,
        first=marks.first,
        last=marks.last,
        host_state=host_state,
        memory=memory,
        device=device,
    )
    return {
        **found,
        "widths": collate.widths[work.warmup : work.warmup + work.steps],
        "graph_share": _share(marks.first, marks.last),
        "graph_share_with_warmup": _share(marks.start, marks.last),
        "train_loss": done.training_loss,
    }


def _share(start: dict[str, int], end: dict[str, int]) -> float | None:
    """Return the share of blocks that replayed a graph; None if there were no blocks."""
    replayed, eager = (end.get(k, 0) - start.get(k, 0) for k in ("graph_replays", "eager_blocks"))
    return replayed / (replayed + eager) if replayed + eager else None


def _rows(records: Sequence[Record]) -> Any:
    return [{"input_ids": record.ids, "prompt": record.prompt} for record in records]


def _arguments(work: Work, folder: str, *, cuda: bool) -> TrainingArguments:
    steps = work.warmup + work.steps
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=work.subject().batch,
        learning_rate=2e-4,
        bf16=True,
        use_cpu=not cuda,
        logging_steps=steps + 1,
        logging_nan_inf_filter=work.nan_filter,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=work.seed,
    )
