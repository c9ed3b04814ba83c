"""The demo: the whole way once, small enough for a laptop, with nothing downloaded.

A model is written, loaded streamed in NF4, trained and saved; the adapter is read back by plain
PEFT; a short gate compares streamed and resident training.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import nn

from poros_core.demo_model import demo_batches, sample, write_demo_checkpoint
from poros_core.determinism import deterministic
from poros_core.errors import PorosError
from poros_core.gate.options import GateOptions
from poros_core.gate.record import GateResult
from poros_core.gate.run import Observer, run_gate
from poros_core.load import choose_strategy, load
from poros_core.plugins import plugins
from poros_core.prepare import prepare
from poros_core.protocols import LoadRequest

__all__ = ["DemoObserver", "DemoResult", "TrainingStep", "check_output", "run_demo"]

STEPS = 60
GATE_STEPS = 10
_BATCH = 6
_RANK = 16
_DROPOUT = 0.05
_LEARNING_RATE = 4e-3
_WINDOW = 10
_FELL = 0.75
_SEED = 0
_BASE = "base-model"
_MARK = ".poros-demo"
_MARKED = "poros demo wrote this folder, and overwrites it.\n"


@frozen(kw_only=True)
class TrainingStep:
    """How training stands after a step.

    Attributes:
        done: steps so far.
        total: steps in all.
        loss: this step's loss.
        tokens_per_second: over all steps so far.
        peak_bytes: most memory so far: the GPU's, or the process's if there is none.
    """

    done: int
    total: int
    loss: float
    tokens_per_second: float
    peak_bytes: int


@frozen(kw_only=True)
class DemoResult:
    """What the demo found.

    Attributes:
        adapter: the folder with the adapter.
        base: the folder with the base model.
        examples: how many examples were trained on.
        first_loss: mean of the first steps.
        last_loss: mean of the last steps.
        last: the last step.
        on_gpu: whether it ran on a GPU.
        logits_difference: largest difference between the trained model's logits and those of the
            adapter read back by plain PEFT.
        logits_equal: whether they are the same bits.
        gate: how the gate ended.
    """

    adapter: Path
    base: Path
    examples: int
    first_loss: float
    last_loss: float
    last: TrainingStep
    on_gpu: bool
    logits_difference: float
    logits_equal: bool
    gate: GateResult

    @property
    def loss_fell(self) -> bool:
        """Whether the loss fell clearly."""
        return self.last_loss < _FELL * self.first_loss

    @property
    def succeeded(self) -> bool:
        """Whether all went as it should."""
        return self.loss_fell and self.logits_equal and self.gate.verdict == "exact"


class DemoObserver(Protocol):
    """Is told how far the demo is."""

    def phase(self, text: str) -> None:
        """Called when a part begins, with what it is."""
        ...

    def trained(self, step: TrainingStep) -> None:
        """Called after every training step."""
        ...

    def gate(self, options: GateOptions) -> Observer:
        """Called before the gate; returns what the gate is to tell."""
        ...


def check_output(output: Path) -> None:
    """Refuse a folder that holds something else than an earlier demo.

    Raises:
        PorosError: it does, or it is a file.
    """
    if output.is_file():
        raise PorosError(f"'{output}' is a file. Name a folder with --output.")
    known = (output / _MARK).is_file()
    if output.is_dir() and any(output.iterdir()) and not known:
        raise PorosError(
            f"'{output}' holds other files, and the demo writes only into a new folder or one of "
            "its own. Name another with --output."
        )


def run_demo(output: Path, *, observer: DemoObserver) -> DemoResult:
    """Run the demo.

    Args:
        output: where the adapter goes, with the base model in a folder below it.
        observer: is told how far it is.

    Raises:
        PorosError: the folder holds something else.
        StateError: CUDA was used before kernels could be made deterministic.
    """
    check_output(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / _MARK).write_text(_MARKED, encoding="utf-8")
    except OSError as error:
        raise PorosError(
            f"Nothing can be written to '{output}' ({error.strerror or error}). Name another "
            "folder with --output."
        ) from error
    with deterministic():
        return _Demo(output, observer).run()


class _Demo:
    def __init__(self, output: Path, observer: DemoObserver) -> None:
        self.output = output
        self.base = output / _BASE
        self.observer = observer
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda:0" if cuda else "cpu")
        # bfloat16 is many times slower than float32 on most CPUs
        self.dtype = torch.bfloat16 if cuda else torch.float32

    def run(self) -> DemoResult:
        """Do every part in turn."""
        self.observer.phase("Writing a small Qwen2 model with random weights, and its tokenizer")
        tokenizer = write_demo_checkpoint(self.base, seed=_SEED)
        self.observer.phase("Loading it in NF4, with the base in host memory")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            model = self._prepared()
            self.observer.phase(f"Training a LoRA adapter on {len(sample())} examples")
            losses, last = self._train(model, tokenizer)
            self.observer.phase(f"Saving the adapter to {self.output}, reading it by plain PEFT")
            model.save_pretrained(self.output)
            difference, equal = self._compare(model, tokenizer)
        finally:
            torch.set_num_threads(threads)
        self.observer.phase("Gate: streamed and resident training side by side, bit for bit")
        return DemoResult(
            adapter=self.output,
            base=self.base,
            examples=len(sample()),
            first_loss=sum(losses[:_WINDOW]) / _WINDOW,
            last_loss=sum(losses[-_WINDOW:]) / _WINDOW,
            last=last,
            on_gpu=self.device.type == "cuda",
            logits_difference=difference,
            logits_equal=equal,
            gate=self._gate(),
        )

    def _prepared(self) -> Any:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(_SEED)
        base = load(self.base, device=self.device, dtype=self.dtype)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=_RANK,
            lora_alpha=2 * _RANK,
            lora_dropout=_DROPOUT,
            target_modules="all-linear",
        )
        return prepare(get_peft_model(base, config))

    def _train(self, model: Any, tokenizer: Any) -> tuple[list[float], TrainingStep]:
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=_LEARNING_RATE)
        batches = demo_batches(tokenizer, batch=_BATCH, seed=_SEED, device=self.device)
        model.train()
        losses: list[float] = []
        tokens, start = 0, time.perf_counter()
        for done in range(1, STEPS + 1):
            batch = next(batches)
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            tokens += int(batch["attention_mask"].sum())
            step = TrainingStep(
                done=done,
                total=STEPS,
                loss=losses[-1],
                tokens_per_second=tokens / (time.perf_counter() - start),
                peak_bytes=_peak_bytes(self.device),
            )
            self.observer.trained(step)
        return losses, step

    def _compare(self, model: Any, tokenizer: Any) -> tuple[float, bool]:
        """Return how far the adapter, read back by plain PEFT, is from the trained model."""
        from peft import PeftModel

        family = plugins().family_for({"model_type": "qwen2"}).value
        request = LoadRequest(path=self.base, family=family, device=self.device, dtype=self.dtype)
        strategy = choose_strategy("nf4", "standard", request)
        plain = PeftModel.from_pretrained(strategy.load_resident(request), self.output)
        for module in plain.modules():
            # in eval, bitsandbytes would round weights anew on some CPUs, with or without Poros
            strategy.codec.keep_layout(module)
        batch = next(demo_batches(tokenizer, batch=_BATCH, seed=_SEED + 1, device=self.device))
        with torch.no_grad():
            ours = model.eval()(**batch).logits
            theirs = plain.eval()(**batch).logits
        return float((ours.float() - theirs.float()).abs().max()), torch.equal(ours, theirs)

    def _gate(self) -> GateResult:
        options = GateOptions(
            model=str(self.base),
            steps=GATE_STEPS,
            seq_len=32,
            batch=2,
            rank=4,
            dropout=0.1,
        )
        return run_gate(options, command="poros demo", observer=self.observer.gate(options))


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
