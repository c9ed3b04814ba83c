"""What a gate is asked to do, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from poros_core.configs import read_config
from poros_core.errors import GateError
from poros_core.family import Family
from poros_core.gate.layers import leading
from poros_core.gate.modes import Modes
from poros_core.plugins import plugins
from poros_core.settings import Settings

__all__ = ["FIT", "PLANTS", "GateOptions", "Subject", "subject_of"]

FIT = "fit"
"""For ``--layers``: as many leading layers as the device has room for."""

PLANTS = (
    "flipped-bit",
    "rng-not-restored",
    "no-grad-forward",
    "early-read",
    "late-arguments",
    "autocast-not-restored",
)
"""Faults that can be planted, by name; see ``poros_core.gate.controls``."""


def _at_least(least: int) -> Any:
    def check(instance: Any, attribute: Any, value: int | None) -> None:
        if value is not None and value < least:
            flag = attribute.name.replace("_", "-")
            raise GateError(f"--{flag} must be {least} or more; got {value}.")

    return check


def _dropout(instance: Any, attribute: Any, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise GateError(f"--dropout must be at least 0 and below 1; got {value}.")


def _one_of(*allowed: str | None) -> Any:
    names = [f"'{name}'" for name in allowed if name is not None]

    def check(instance: Any, attribute: Any, value: str | None) -> None:
        if value not in allowed:
            flag = attribute.name.replace("_", "-")
            among = f"{', '.join(names[:-1])} or {names[-1]}"
            raise GateError(f"--{flag} must be {among}; got '{value}'.")

    return check


def _layers(instance: Any, attribute: Any, value: int | str | None) -> None:
    if value in (None, FIT):
        return
    if not isinstance(value, int) or value < 1:
        raise GateError(f"--layers must be a number of layers from 1 up, or 'fit'; got '{value}'.")


def _resume_at(instance: GateOptions, attribute: Any, value: int | None) -> None:
    if value is not None and not 1 <= value < instance.steps:
        raise GateError(
            f"--resume-at must be a step before the last, from 1 to {instance.steps - 1}; got "
            f"{value}."
        )


@frozen(kw_only=True)
class GateOptions:
    """What a gate is asked to do.

    Attributes:
        family: name of the family whose shape is used, or that the model must be of.
        shape: a shape of that family; seeded random weights are written at it.
        model: a checkpoint folder, or a hub id, instead of a shape.
        weights: how a shape's random weights are made: every layer ``"drawn"`` and written in bf16,
            or written quantised, most layers a ``"rolled"`` copy of a drawn one, for shapes whose
            bf16 weights are too large.
        steps: optimizer steps.
        seq_len: tokens per sequence at most; None means 32 for a tiny shape, else 512.
        batch: sequences per micro-batch; None means 2 for a tiny shape, else 1.
        accumulate: micro-batches per optimizer step.
        rank: LoRA rank; None means 4 for a tiny shape, else 16.
        dropout: of LoRA, and of the attention where the architecture has it.
        precision: of the base.
        load_strategy: how the streamed arm's base is loaded.
        host: where the streamed arm's layers stand on the host.
        optimizer_state: where the streamed arm's optimizer state is between steps. In the
            resident arms it is on the device always.
        data: a safetensors file of tokenised records; None means seeded random tokens.
        padding: the side on which rows are padded. On the left, masks decide what real tokens see.
        backward: one for ``"each"`` micro-batch, or one for all of a step: ``"joint"``. Then
            every row is padded to ``seq_len``. With ``"block-major"`` the streamed arm accumulates
            by ``poros.accumulate``, and the resident ones by one for each micro-batch.
        checkpointing: whether the resident arms keep no activations inside layers, as
            Transformers' gradient checkpointing does, for shapes that would not fit otherwise.
            No arm builds a cache then.
        control: whether a second resident arm runs beside the first. Without it twice as large a
            base fits, and a divergence may be the environment's own.
        resume_at: after this step the streamed arm is saved, thrown away, built anew and goes on;
            the resident arms are not interrupted.
        layers: train only so many leading layers; ``"fit"`` means as many as the device holds
            resident twice. None means all.
        seed: of weights, adapters, data and dropout.
        plant_fault: flip one bit of one streamed weight, which must make the gate fail.
        plant: a fault of ``PLANTS`` in the streamed arm, which must make the gate fail.
        modes: how every arm computes.
        settings: how the streamed arm is prepared.
    """

    family: str | None = None
    shape: str | None = None
    model: str | None = None
    weights: Literal["drawn", "rolled"] = field(
        default="drawn", validator=_one_of("drawn", "rolled")
    )
    steps: int = field(default=20, validator=_at_least(1))
    seq_len: int | None = field(default=None, validator=_at_least(4))
    batch: int | None = field(default=None, validator=_at_least(1))
    accumulate: int = field(default=1, validator=_at_least(1))
    rank: int | None = field(default=None, validator=_at_least(1))
    dropout: float = field(default=0.0, validator=_dropout)
    precision: str = "nf4"
    load_strategy: str = "auto"
    host: str = field(default="auto", validator=_one_of("auto", "pinned", "pageable", "mmap"))
    optimizer_state: Literal["device", "host"] = field(
        default="device", validator=_one_of("device", "host")
    )
    data: Path | None = None
    padding: Literal["right", "left"] = field(default="right", validator=_one_of("right", "left"))
    backward: Literal["each", "joint", "block-major"] = field(
        default="each", validator=_one_of("each", "joint", "block-major")
    )
    checkpointing: bool = False
    control: bool = True
    resume_at: int | None = field(default=None, validator=_resume_at)
    layers: int | str | None = field(default=None, validator=_layers)
    seed: int = field(default=0, validator=_at_least(0))
    plant_fault: bool = False
    plant: str | None = field(default=None, validator=_one_of(None, *PLANTS))
    modes: Modes = field(factory=Modes)
    settings: Settings = field(factory=Settings)


@frozen(kw_only=True)
class Subject:
    """What a gate runs on, with every default settled.

    Attributes:
        family: the family.
        shape: the shape's name, or the model's path or id.
        config: the Transformers config as a mapping.
        random: whether weights are random and have to be written first.
        seq_len: tokens per sequence at most.
        batch: sequences per micro-batch.
        rank: LoRA rank.
        whole: how many layers the shape or the model has; ``config`` may have fewer.
        padding: the side on which rows are padded.
        pad_to: tokens that every row is padded to; None means the longest row of its batch.
    """

    family: Family
    shape: str
    config: Mapping[str, Any]
    random: bool
    seq_len: int
    batch: int
    rank: int
    whole: int
    padding: str = "right"
    pad_to: int | None = None

    @property
    def depth(self) -> int:
        """How many decoder layers are trained."""
        return int(self.text_config["num_hidden_layers"])

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the config that describes the decoder."""
        text: Mapping[str, Any] = self.config.get("text_config", self.config)
        return text

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return int(self.text_config["vocab_size"])

    @property
    def pad_token(self) -> int:
        """The token that pads; 0 if the config has none that the vocabulary knows."""
        pad = self.text_config.get("pad_token_id")
        return int(pad) if pad is not None and 0 <= int(pad) < self.vocabulary else 0


def subject_of(options: GateOptions) -> Subject:
    """Find out what a gate runs on. Reads a config at most.

    Raises:
        GateError: neither a shape nor a model is named, or both, or what is named is not there.
        UnsupportedModelError: no family covers the model.
        SettingsError: there is no such precision or load strategy.
        CheckpointError: the model's config cannot be read.
    """
    if (options.shape is None) == (options.model is None):
        raise GateError(
            "Name what to run on: either --family and --shape (seeded random weights), or --model "
            "with a checkpoint."
        )
    if options.model is not None:
        family, config = _of_model(options.model, options.family)
        shape = options.model
    else:
        assert options.shape is not None
        family, config = _of_shape(options.family, options.shape)
        shape = options.shape
    tiny = options.model is None and shape.startswith("tiny")
    whole = int(config.get("text_config", config)["num_hidden_layers"])
    seq_len = options.seq_len or (32 if tiny else 512)
    if isinstance(options.layers, int):
        config = leading(config, options.layers)
    subject = Subject(
        family=family,
        shape=shape,
        config=config,
        random=options.model is None,
        seq_len=seq_len,
        batch=options.batch or (2 if tiny else 1),
        rank=options.rank or (4 if tiny else 16),
        whole=whole,
        padding=options.padding,
        pad_to=seq_len if options.backward == "joint" else None,
    )
    _check(options, subject)
    return subject


def _check(options: GateOptions, subject: Subject) -> None:
    """Refuse now what would fail only after a large checkpoint was written."""
    longest = subject.text_config.get("max_position_embeddings")
    if longest is not None and subject.seq_len > longest:
        raise GateError(
            f"--seq-len {subject.seq_len} is more than the {longest} positions of "
            f"{subject.shape}. Give --seq-len {longest} or less."
        )
    layers = subject.depth
    block_size = options.settings.block_size
    if block_size != "all" and block_size > layers:
        raise GateError(
            f"--block-size {block_size} is more than the {layers} layers of {subject.shape}. Give "
            "a smaller one, or 'all'."
        )
    if options.backward == "joint" and options.accumulate == 1:
        raise GateError(
            "--backward joint takes one backward for several forwards: give --accumulate 2 or more."
        )
    if options.backward == "block-major" and (options.accumulate == 1 or options.dropout):
        raise GateError(
            "--backward block-major takes several micro-batches without dropout: give --accumulate "
            "2 or more, and --dropout 0."
        )
    if options.weights == "rolled" and options.model is not None:
        raise GateError("--weights rolled makes random weights, and --model has its own.")
    if options.plant is not None and options.plant_fault:
        raise GateError("Give either --plant or --plant-fault, which is --plant flipped-bit.")
    strategy = "streamed" if options.load_strategy == "auto" else options.load_strategy
    plugins().loader(options.precision, strategy)


def _of_model(model: str, name: str | None) -> tuple[Family, Mapping[str, Any]]:
    config = read_config(model)
    family = plugins().family_for(config).value
    if name not in (None, family.name):
        raise GateError(
            f"{model} is of family '{family.name}', not '{name}'. Leave --family out, or name the "
            "right one."
        )
    return family, config


def _of_shape(name: str | None, shape: str) -> tuple[Family, Mapping[str, Any]]:
    names = sorted(entry.value.name for entry in plugins().families)
    if name is None:
        raise GateError(f"--shape needs --family, one of: {', '.join(names)}.")
    entry = plugins().families.get(name)
    if entry is None:
        raise GateError(
            f"There is no family '{name}'. Installed: {', '.join(names)}. See poros list-families."
        )
    family = entry.value
    if shape not in family.shapes:
        raise GateError(
            f"Family '{family.name}' has no shape '{shape}'. It has: {', '.join(family.shapes)}."
        )
    config = family.shapes[shape]
    if config.get("model_type") not in family.model_types:
        raise GateError(
            f"Shape '{shape}' of family '{family.name}' has model_type "
            f"{config.get('model_type')!r}. Give it one of the family's: "
            f"{', '.join(family.model_types)}."
        )
    missing = {"vocab_size", "num_hidden_layers"} - (config.get("text_config") or config).keys()
    if missing:
        raise GateError(
            f"Shape '{shape}' of family '{family.name}' does not say {', '.join(sorted(missing))}. "
            "Write it out."
        )
    return family, config
