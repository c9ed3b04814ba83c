"""The options of ``poros gate``, each with the name of the parameter that takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODES = "How every arm computes"
_FILES = "Reports, and machines on which the resident arm does not fit"
_MATRIX = "Many gates"
_LOAD = "How bases load"

Family = Annotated[str | None, typer.Option(help="Family whose shape is used.")]
Shape = Annotated[
    str | None, typer.Option(help="A shape of the family, with seeded random weights.")
]
Model = Annotated[
    str | None, typer.Option(help="A checkpoint folder or Hub id, instead of a shape.")
]
Weights = Annotated[
    str,
    typer.Option(
        help="Random weights: every layer 'drawn', or most a 'rolled' copy, quantised on disk."
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
SeqLen = Annotated[
    int | None,
    typer.Option(help="Tokens per sequence.", show_default="32 for a tiny shape, else 512"),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Sequences per micro-batch; more than one are of different lengths, padded.",
        show_default="2 for a tiny shape, else 1",
    ),
]
Accumulate = Annotated[int, typer.Option(help="Micro-batches per optimizer step.")]
Rank = Annotated[
    int | None,
    typer.Option(help="LoRA rank.", show_default="4 for a tiny shape, else 16"),
]
Dropout = Annotated[float, typer.Option(help="Of LoRA, and of the attention where there is any.")]
Precision = Annotated[str, typer.Option(help="Of the base: nf4, bf16.")]
LoadStrategy = Annotated[
    str, typer.Option(help="How the streamed arm is loaded: auto, streamed, standard.")
]
Host = Annotated[
    str,
    typer.Option(
        help="Where the streamed arm's layers stand on the host: auto, pinned, pageable, mmap."
    ),
]
BlockSize = Annotated[str, typer.Option(help="Layers that share one recompute boundary, or 'all'.")]
VramBudget = Annotated[
    str | None,
    typer.Option(
        help="Device memory for the streamed arm: 16GB, bytes, or auto.",
        show_default="everything streams",
    ),
]
Graphs = Annotated[str, typer.Option(help="CUDA graphs: auto, on, off.")]
OffloadActivations = Annotated[
    bool,
    typer.Option(
        "--offload-activations",
        metavar="",
        help="Keep the streamed arm's hidden states between blocks on the host.",
    ),
]
CopyAhead = Annotated[
    bool,
    typer.Option(
        "--copy-ahead",
        metavar="",
        help="Copy units of the streamed arm into idle device memory before their turn.",
    ),
]
OptimizerState = Annotated[
    str,
    typer.Option(help="Where the streamed arm's optimizer state is between steps: device, host."),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Tokenised records in a safetensors file (ids, offsets, prompt_len).",
        show_default="seeded random tokens",
    ),
]
Seed = Annotated[int, typer.Option(help="Of weights, adapters, data and dropout.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the record there.")
]
PlantFault = Annotated[
    bool,
    typer.Option("--plant-fault", metavar="", help="Flip one bit of a streamed weight first."),
]
Plant = Annotated[
    str | None,
    typer.Option(
        help="Plant a fault: flipped-bit, rng-not-restored, no-grad-forward, early-read, "
        "late-arguments, autocast-not-restored."
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        help="Train only so many leading layers; 'fit' takes as many as the device holds resident.",
        show_default="all",
    ),
]
Padding = Annotated[
    str, typer.Option(help="Where rows are padded: right, left.", rich_help_panel=_MODES)
]
Backward = Annotated[
    str,
    typer.Option(
        help="One backward for 'each' micro-batch, a 'joint' one for all of a step, or, in the "
        "streamed arm, block by block: 'block-major'.",
        rich_help_panel=_MODES,
    ),
]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--checkpointing",
        metavar="",
        help="Train the resident arms with gradient checkpointing, which takes less memory.",
        rich_help_panel=_MODES,
    ),
]
Control = Annotated[
    bool,
    typer.Option(
        "--control/--no-control",
        help="Step a second resident arm too, which shows whether resident runs repeat themselves.",
    ),
]
ResumeAt = Annotated[
    int | None,
    typer.Option(
        help="After this step, save the streamed arm, build it anew and go on; the resident "
        "arms are not interrupted.",
        show_default="never",
        rich_help_panel=_MODES,
    ),
]
Deterministic = Annotated[
    bool, typer.Option(help="Run deterministic kernels only.", rich_help_panel=_MODES)
]
Attention = Annotated[
    str,
    typer.Option(
        help="The only attention kernel: auto, math, flash, efficient, cudnn.",
        rich_help_panel=_MODES,
    ),
]
Tf32 = Annotated[
    bool,
    typer.Option("--tf32", metavar="", help="Float32 products in TF32.", rich_help_panel=_MODES),
]
Autocast = Annotated[
    str, typer.Option(help="Around each forward: off, bf16.", rich_help_panel=_MODES)
]
CompileLayers = Annotated[
    bool,
    typer.Option(
        "--compile",
        metavar="",
        help="Compile every decoder layer, in each arm.",
        rich_help_panel=_MODES,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a report there.", rich_help_panel=_FILES),
]
Card = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Put the verdict into this model card, in a section of its own.",
        rich_help_panel=_FILES,
    ),
]
WriteFingerprints = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write hashes and values of the resident arm there, for --against.",
        rich_help_panel=_FILES,
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Compare with these fingerprints; no resident arm is built.",
        rich_help_panel=_FILES,
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep the run there while it lasts, and go on from there.",
        rich_help_panel=_FILES,
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Stop after so many; with --state, or with --matrix.",
        show_default="no limit",
        rich_help_panel=_FILES,
    ),
]
MatrixName = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|GROUP",
        help="Run the rows of a matrix file, or of a group of the one that comes along: ci, "
        "first, second, controls, all.",
        rich_help_panel=_MATRIX,
    ),
]
Row = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Run this row only.", rich_help_panel=_MATRIX),
]
JsonDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where rows leave their records; a row whose record is there is done.",
        rich_help_panel=_MATRIX,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where rows find their data files.", rich_help_panel=_MATRIX),
]
Jobs = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Rows that run at once, each in its own process; times are left out of their records.",
        rich_help_panel=_MATRIX,
    ),
]
Controls = Annotated[
    bool,
    typer.Option(
        "--controls",
        metavar="",
        help="Run the negative controls: each fault must be found, and gone once removed.",
        rich_help_panel=_MATRIX,
    ),
]
Load = Annotated[
    bool,
    typer.Option(
        "--load",
        metavar="",
        help="Compare the bytes of every way to load with from_pretrained's; train nothing.",
        rich_help_panel=_LOAD,
    ),
]
Pieces = Annotated[
    int,
    typer.Option(
        help="With --load: checkpoints that a shape's layers are dealt to, one on disk at a time.",
        rich_help_panel=_LOAD,
    ),
]
