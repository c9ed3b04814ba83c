"""Train the same adapter with and without Poros, by HF Trainer or TRL's SFTTrainer, and compare.

Each arm runs in a process of its own, load and training together, so that its peak memory is that
of a user's script. The two adapter files must be equal byte for byte.

    python benchmarks/trainer_parity.py --loop trainer --shape 7b --json record.json
    python benchmarks/trainer_parity.py --loop sft --model path/to/checkpoint

Exit status: 0 equal, 1 not, 2 bad input or an arm failed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import poros
from poros_core.gate.options import GateOptions, subject_of
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.stack import stack_of
from poros_core.gate.tensor_file import read_tensors

ADAPTER = "adapter_model.safetensors"
CUDA = torch.cuda.is_available()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loop", choices=["trainer", "sft"], default="trainer")
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--shape", help="seeded random weights at this shape of the family")
    parser.add_argument("--model", help="a checkpoint folder instead of a shape")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--arm", choices=["plain", "poros"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def subject(options: argparse.Namespace) -> Any:
    return subject_of(
        GateOptions(
            family=options.family if options.model is None else None,
            shape=options.shape,
            model=options.model,
            seq_len=options.seq_len,
            batch=options.batch,
            rank=options.rank,
        )
    )


# one arm, in its own process


def rows(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Random tokens; the first part of every row is a prompt without loss."""
    what = subject(options)
    generator = torch.Generator().manual_seed(options.seed)
    count = options.steps * what.batch * options.accumulate
    found = []
    for _ in range(count):
        shortest = what.seq_len if what.batch == 1 else what.seq_len // 2
        length = int(torch.randint(shortest, what.seq_len + 1, (), generator=generator))
        ids = torch.randint(3, what.vocabulary, (length,), generator=generator).tolist()
        prompt = length // 4
        found.append({"input_ids": ids, "completion_mask": [0] * prompt + [1] * (length - prompt)})
    return found


def load(options: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, set_seed

    set_seed(options.seed)
    if options.arm == "poros":
        model: Any = poros.load(options.model)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            device_map={"": 0 if CUDA else "cpu"},
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
        )
    set_seed(options.seed)
    rank = subject(options).rank
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=options.dropout,
        target_modules="all-linear",
    )
    model = get_peft_model(model, config)
    if options.arm == "poros":
        model = poros.prepare(model, block_size=options.block_size)
    return model


def training_arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": str(options.folder / "trainer"),
        "max_steps": options.steps,
        "per_device_train_batch_size": subject(options).batch,
        "gradient_accumulation_steps": options.accumulate,
        "learning_rate": 2e-4,
        "bf16": True,
        "use_cpu": not CUDA,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": options.seed,
    }


def trainer(model: Any, options: argparse.Namespace) -> Any:
    from transformers import Trainer, TrainingArguments

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in batch)
        columns: dict[str, list[list[int]]] = {
            "input_ids": [], "attention_mask": [], "labels": []
        }  # fmt: skip
        for row in batch:
            ids, mask = row["input_ids"], row["completion_mask"]
            pad = width - len(ids)
            labels = [token if kept else -100 for token, kept in zip(ids, mask, strict=True)]
            columns["input_ids"].append(ids + [0] * pad)
            columns["attention_mask"].append([1] * len(ids) + [0] * pad)
            columns["labels"].append(labels + [-100] * pad)
        return {name: torch.tensor(values) for name, values in columns.items()}

    settings = TrainingArguments(**training_arguments(options), remove_unused_columns=False)
    return Trainer(model, settings, train_dataset=rows(options), data_collator=collate)


def sft(model: Any, options: argparse.Namespace) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from poros_core.demo_model import demo_tokenizer

    settings = SFTConfig(**training_arguments(options), max_length=subject(options).seq_len)
    return SFTTrainer(
        model,
        settings,
        train_dataset=Dataset.from_list(rows(options)),
        processing_class=demo_tokenizer(),
    )


def run_arm(options: argparse.Namespace) -> None:
    with poros.deterministic():
        start = time.perf_counter()
        model = load(options)
        loaded = time.perf_counter()
        loop = {"trainer": trainer, "sft": sft}[options.loop](model, options)
        loop.train()
        if CUDA:
            torch.cuda.synchronize()
        trained = time.perf_counter()
        loop.model.save_pretrained(options.folder)
    losses = [entry["loss"] for entry in loop.state.log_history if "loss" in entry]
    figures = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if CUDA else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if CUDA else None,
        "load_seconds": loaded - start,
        "seconds": trained - loaded,
        "losses": losses,
    }
    if options.arm == "poros":
        from poros_core.prepare import prepared_of

        prepared = prepared_of(model)
        assert prepared is not None
        figures["counters"] = dict(prepared.handle.counters())
    (options.folder / "arm.json").write_text(json.dumps(figures))


# both arms


def start_arm(arm: str, options: argparse.Namespace, *, path: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    what = subject(options)
    command = [
        *(sys.executable, __file__, "--arm", arm, "--model", str(path), "--folder", str(folder)),
        *("--loop", options.loop, "--steps", options.steps, "--seq-len", what.seq_len),
        *("--batch", what.batch, "--accumulate", options.accumulate, "--rank", what.rank),
        *("--dropout", options.dropout, "--block-size", options.block_size),
        *("--seed", options.seed),
    ]
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run([str(part) for part in command], env=environment, check=False)
    if done.returncode:
        print(f"The {arm} arm failed with exit status {done.returncode}; see above.")
        sys.exit(2)
    figures: dict[str, Any] = json.loads((folder / "arm.json").read_text())
    figures["adapter_sha256"] = hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest()
    return figures


def compare(options: argparse.Namespace) -> dict[str, Any]:
    what = subject(options)
    with tempfile.TemporaryDirectory(prefix="poros-trainer-") as temporary:
        folder = Path(temporary)
        path = Path(options.model) if options.model else folder / "checkpoint"
        if not options.model:
            write_checkpoint(options, path)
        arms = {
            arm: start_arm(arm, options, path=path, folder=folder / arm)
            for arm in ("plain", "poros")
        }
        files = [folder / arm / ADAPTER for arm in arms]
        equal = files[0].read_bytes() == files[1].read_bytes()
        # LoRA's B starts at zero: one that still is was never trained
        still = [name for name, tensor in read_tensors(files[1]).items() if not tensor.any()]
    streamed = arms["poros"]["counters"]["bytes_streamed"] > 0
    losses = arms["plain"]["losses"]
    trained = bool(losses) and all(0 < loss < float("inf") for loss in losses) and not still
    verdict = "diverged" if not equal else "exact" if streamed and trained else "void"
    return {
        "kind": "training-loop-parity",
        "verdict": verdict,
        "adapter_equal": equal,
        "losses_equal": losses == arms["poros"]["losses"],
        "loop": options.loop,
        "family": what.family.name,
        "shape": what.shape,
        "precision": "nf4",
        "autocast": "bf16",
        "steps": options.steps,
        "seq_len": what.seq_len,
        "batch": what.batch,
        "accumulate": options.accumulate,
        "rank": what.rank,
        "dropout": options.dropout,
        "block_size": options.block_size,
        "seed": options.seed,
        "arms": arms,
        "method": "One process per arm, load and training in it; peaks are the allocator's over "
        "the whole process. adapter_equal: adapter_model.safetensors byte for byte.",
        "command": shlex.join(["python", *sys.argv]),
        "stack": stack_of(torch.device("cuda:0" if CUDA else "cpu")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_checkpoint(options: argparse.Namespace, path: Path) -> None:
    device = torch.device("cuda:0" if CUDA else "cpu")
    config = subject(options).config
    write_random_checkpoint(config, path, seed=options.seed, dtype=torch.bfloat16, device=device)
    if CUDA:
        torch.cuda.empty_cache()


def main() -> None:
    options = arguments()
    if options.arm:
        run_arm(options)
        return
    try:
        record = compare(options)
    except poros.PorosError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name, arm in record["arms"].items():
        peak = arm["peak_allocated_bytes"]
        memory = "no GPU" if peak is None else f"peak {peak / 1e9:.2f} GB"
        print(f"{name:>6}  {memory}  {arm['seconds']:.1f} s  last loss {arm['losses'][-1]}")
    print(f"{record['verdict']}: adapter files {'equal' if record['adapter_equal'] else 'differ'}")
    sys.exit(0 if record["verdict"] == "exact" else 1)


if __name__ == "__main__":
    main()
