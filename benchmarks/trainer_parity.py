"""Run a Trainer or SFTTrainer script with and without Poros, and compare the adapters.

The script is the one in examples/, at the shape of a real model, each time in a process of its own,
load and training together, so that its peak memory is that of a user's script:

    plain       without the line that calls poros.prepare
    prepared    as it stands
    poros       as it stands, and loaded by poros.load, so that the base never stands on the device

The adapter files must be equal byte for byte.

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
import random
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import poros
from poros_core.demo_model import demo_tokenizer, sample
from poros_core.gate.options import GateOptions, subject_of
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.stack import stack_of
from poros_core.gate.tensor_file import read_tensors

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = {"trainer": "trainer_lora.py", "sft": "sft_lora.py"}
ARMS = ("plain", "prepared", "poros")
ADAPTER = "adapter_model.safetensors"
CUDA = torch.cuda.is_available()

THE_LINE = "poros.prepare("
PLAIN_LOAD = "AutoModelForCausalLM.from_pretrained(path, quantization_config=nf4)"
STEPS = "max_steps=20"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loop", choices=list(SCRIPTS), default="trainer")
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--shape", help="seeded random weights at this shape of the family")
    parser.add_argument("--model", help="a checkpoint folder with a tokenizer, instead of a shape")
    parser.add_argument("--arms", default=",".join(ARMS), help="which to run, plain among them")
    parser.add_argument("--steps", type=int, default=20, help="in place of the script's own 20")
    parser.add_argument("--seq-len", type=int, help="tokens in every text")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts")
    parser.add_argument("--json", type=Path, help="write the record there")
    return parser.parse_args()


def subject(options: argparse.Namespace) -> Any:
    return subject_of(
        GateOptions(
            family=options.family if options.model is None else None,
            shape=options.shape,
            model=options.model,
            seq_len=options.seq_len,
        )
    )


# what the scripts are given


def write_checkpoint(options: argparse.Namespace, path: Path) -> None:
    device = torch.device("cuda:0" if CUDA else "cpu")
    config = subject(options).config
    write_random_checkpoint(config, path, seed=options.seed, dtype=torch.bfloat16, device=device)
    demo_tokenizer().save_pretrained(path)
    if CUDA:
        torch.cuda.empty_cache()


def texts(tokenizer: Any, *, tokens: int, seed: int) -> Iterator[str]:
    """Yield texts of random words, each of so many tokens."""
    words = sorted({f" {word}" for pair in sample() for text in pair for word in text.split()})
    lengths = {word: len(tokenizer(word)["input_ids"]) for word in words}
    draw = random.Random(seed)
    while True:
        text, left = "", tokens
        while left:
            word = draw.choice([word for word in words if lengths[word] <= left])
            text, left = text + word, left - lengths[word]
        yield text


def write_data(options: argparse.Namespace, model: Path, path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    made = texts(tokenizer, tokens=subject(options).seq_len, seed=options.seed)
    rows = [next(made) for _ in range(options.steps)]
    if max(max(tokenizer(row)["input_ids"]) for row in rows) >= subject(options).vocabulary:
        raise poros.SettingsError("The model's vocabulary is too small for the texts.")
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")


def edited(script: str, *, arm: str, steps: int) -> str:
    """Return the source of an example as an arm runs it."""
    lines = (EXAMPLES / script).read_text(encoding="utf-8").splitlines(keepends=True)
    source = "".join(line for line in lines if arm != "plain" or THE_LINE not in line)
    changes = {STEPS: f"max_steps={steps}, logging_steps=1"}
    if arm == "poros":
        changes[PLAIN_LOAD] = "poros.load(path)"
    for found, wanted in changes.items():
        if source.count(found) != 1:
            raise ValueError(f"{script} does not have {found!r} once")
        source = source.replace(found, wanted)
    return source


# one arm: this file again, with --run, in its own process


def run_arm(script: Path, model: Path, data: Path, output: Path) -> None:
    sys.argv = [script.name, str(model), str(data), str(output)]
    start = time.perf_counter()
    left = runpy.run_path(str(script), run_name="__main__")
    if CUDA:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    state = json.loads(next(output.glob("checkpoint-*/trainer_state.json")).read_text())
    history: list[dict[str, Any]] = state["log_history"]
    figures = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if CUDA else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if CUDA else None,
        "seconds": seconds,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "counters": counters_of(left["model"]),
    }
    (output / "arm.json").write_text(json.dumps(figures))


def counters_of(model: Any) -> dict[str, int] | None:
    from poros_core.prepare import prepared_of

    prepared = prepared_of(model)
    return None if prepared is None else dict(prepared.handle.counters())


# all arms


def start_arm(
    arm: str, options: argparse.Namespace, *, model: Path, data: Path, folder: Path
) -> dict[str, Any]:
    script = SCRIPTS[options.loop]
    output = folder / arm
    path = folder / f"{arm}_{script}"
    path.write_text(edited(script, arm=arm, steps=options.steps), encoding="utf-8")
    command = [sys.executable, __file__, "--run", path, model, data, output]
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ}
    environment["HF_DATASETS_CACHE"] = str(folder / "datasets")
    done = subprocess.run([str(part) for part in command], env=environment, check=False)
    if done.returncode:
        print(f"The {arm} arm failed with exit status {done.returncode}; see above.")
        sys.exit(2)
    figures: dict[str, Any] = json.loads((output / "arm.json").read_text())
    figures["adapter_sha256"] = hashlib.sha256((output / ADAPTER).read_bytes()).hexdigest()
    return figures


def compare(options: argparse.Namespace) -> dict[str, Any]:
    what = subject(options)
    names = options.arms.split(",")
    with tempfile.TemporaryDirectory(prefix="poros-trainer-") as temporary:
        folder = Path(temporary)
        model = Path(options.model) if options.model else folder / "checkpoint"
        if not options.model:
            write_checkpoint(options, model)
        data = folder / "data.jsonl"
        write_data(options, model, data)
        arms = {
            arm: start_arm(arm, options, model=model, data=data, folder=folder) for arm in names
        }
        files = [folder / arm / ADAPTER for arm in names]
        equal = len({file.read_bytes() for file in files}) == 1
        # LoRA's B starts at zero: one that still is was never trained
        still = [name for name, tensor in read_tensors(files[0]).items() if not tensor.any()]
        adapter = json.loads((folder / names[0] / "adapter_config.json").read_text())
    streamed = all(
        (counters is None) == (arm == "plain")
        and (counters is None or counters["bytes_streamed"] > 0)
        for arm, figures in arms.items()
        for counters in [figures["counters"]]
    )
    losses = arms["plain"]["losses"]
    trained = len(losses) == options.steps and not still
    trained = trained and all(0 < loss < float("inf") for loss in losses)
    verdict = "diverged" if not equal else "exact" if streamed and trained else "void"
    script = SCRIPTS[options.loop]
    return {
        "kind": "training-loop-parity",
        "verdict": verdict,
        "adapter_equal": equal,
        "losses_equal": all(figures["losses"] == losses for figures in arms.values()),
        "loop": options.loop,
        "script": f"examples/{script}",
        "script_sha256": hashlib.sha256((EXAMPLES / script).read_bytes()).hexdigest(),
        "family": what.family.name,
        "shape": what.shape,
        "precision": "nf4",
        "autocast": "bf16",
        "steps": options.steps,
        "seq_len": what.seq_len,
        "batch": 1,
        "accumulate": 1,
        "rank": adapter["r"],
        "dropout": adapter["lora_dropout"],
        "block_size": 1,
        "seed": options.seed,
        "arms": arms,
        "method": "The script of examples/, one process per arm, load and training in it. plain: "
        "without the line that calls poros.prepare. prepared: as it stands. poros: as it stands, "
        "loaded by poros.load instead of from_pretrained. Peaks are the allocator's over the "
        "whole process; seconds are the whole script, imports and load included. "
        "adapter_equal: adapter_model.safetensors byte for byte.",
        "command": shlex.join(["python", *sys.argv]),
        "stack": stack_of(torch.device("cuda:0" if CUDA else "cpu")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run_arm(*map(Path, sys.argv[2:]))
        return
    options = arguments()
    unknown = sorted(set(options.arms.split(",")) - set(ARMS))
    try:
        if unknown or "plain" not in options.arms.split(","):
            raise poros.SettingsError(f"--arms takes plain and others of {', '.join(ARMS)}.")
        record = compare(options)
    except poros.PorosError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name, arm in record["arms"].items():
        peak = arm["peak_allocated_bytes"]
        memory = "no GPU" if peak is None else f"peak {peak / 1e9:.2f} GB"
        seconds, loss = arm["seconds"], arm["losses"][-1]
        print(f"{name:>8}  {memory}  {seconds:.1f} s  last loss {loss}")
    print(f"{record['verdict']}: adapter files {'equal' if record['adapter_equal'] else 'differ'}")
    sys.exit(0 if record["verdict"] == "exact" else 1)


if __name__ == "__main__":
    main()
