"""Whether a model will load and train on a machine, by arithmetic: no weights, no GPU, no torch.

Not to be confused with ``poros_core.plan``, the block plan of a model that is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from poros_core.configs import read_config
from poros_core.errors import CheckpointError, SettingsError
from poros_core.family import Family
from poros_core.planner.configs import (
    check_layers,
    longest_of,
    quantised_with,
    shapes_of,
    text_of,
)
from poros_core.planner.headers import Headers, hub_headers, local_headers
from poros_core.planner.memory import (
    Memory,
    device_memory,
    host_memory,
    more_graphs,
    resident_memory,
)
from poros_core.planner.settings import CHUNK, RunSettings
from poros_core.planner.step_time import Rates, StepTime, step_time
from poros_core.planner.weights import Weights, sort_weights
from poros_core.plugins import plugins
from poros_core.schedule import most_resident

__all__ = ["HOST_MARGIN", "Model", "RunPlan", "plan_run", "read_model"]

HOST_MARGIN = 3_000_000_000
"""Host memory that is left to Python, torch and the system."""
_SEQ_STEP = 64
_TOWERS = ("vision_config", "audio_config")
_PACKED = ".absmax"


@frozen(kw_only=True)
class Model:
    """A model as far as a plan needs it.

    Attributes:
        name: what it was asked for as.
        family: the family's name.
        weights: its weights.
        longest: positions that it has.
        softcap: whether it caps its logits.
        disk: bytes of its checkpoint that are on this disk.
        download: bytes of it that are not.
        quantised: with what it is quantised already, or None.
    """

    name: str
    family: str
    weights: Weights
    longest: int
    softcap: bool
    disk: int
    download: int
    quantised: str | None = None


@frozen(kw_only=True)
class RunPlan:
    """What a run takes, and whether it fits.

    Attributes:
        model: the model.
        run: the run that was asked about.
        memory: its device memory.
        host: its host memory by name, in bytes.
        time: its step time.
        resident: device memory of the same run with the base on the device.
        checkpointed: the same with gradient checkpointing.
        vram: device memory that there is; None if that was not said.
        ram: host memory that there is; None if that was not said.
        fitting: settings that fit, the asked ones first if they do; empty if none does.
        kept: how many layers ``vram_budget`` keeps on the device with the first of them.
        kept_time: the step time with it; None without a budget, or if nothing fits.
        longest: the longest sequence that fits with the first of them; None if none does.
    """

    model: Model
    run: RunSettings
    memory: Memory
    host: Mapping[str, int]
    time: StepTime
    resident: Memory
    checkpointed: Memory
    vram: int | None
    ram: int | None
    fitting: tuple[RunSettings, ...]
    kept: int
    kept_time: StepTime | None
    longest: int | None

    @property
    def host_bytes(self) -> int:
        """All host memory of the run."""
        return sum(self.host.values())

    @property
    def loads(self) -> bool:
        """Whether the base fits in host memory, as it was asked for."""
        state = self.host.get("optimizer", 0)
        return _host_fits(self.host_bytes - state, self.ram)

    @property
    def files(self) -> int:
        """Bytes of the packed cache's files that layers stand in with ``host="mmap"``."""
        return sum(self.model.weights.layer_bytes(self.run.precision))

    @property
    def trains(self) -> bool:
        """Whether the run that was asked about fits."""
        return self.run in self.fitting

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Which memory was not said, so that whether it is enough is not known: ``"device"``,
        ``"host"``."""
        asked = {"device": self.vram, "host": self.ram}
        return tuple(name for name, nbytes in asked.items() if nbytes is None)

    @property
    def advice(self) -> str | None:
        """Which resident run is the right choice: ``"resident"``, or ``"checkpointing"``, or None
        if the base has to stream."""
        if self.vram is None:
            return None
        for name, memory in (("resident", self.resident), ("checkpointing", self.checkpointed)):
            if memory.device <= self.vram:
                return name
        return None


def read_model(name: str, *, revision: str | None = None) -> Model:
    """Read what a plan needs of a model: its config, and headers where that does not say enough.

    Args:
        name: a folder, a ``config.json``, or a Hub id.
        revision: the Hub revision.

    Raises:
        CheckpointError: it cannot be read, does not say all shapes, contradicts itself, or is
            quantised in a way that ``poros.load`` refuses.
        UnsupportedModelError: no family covers it.
    """
    config = read_config(name, revision=revision)
    text = text_of(config)
    family = plugins().family_for(config).value
    quantised = quantised_with(name, config)
    tied = next(
        (c["tie_word_embeddings"] for c in (config, text) if "tie_word_embeddings" in c), None
    )
    towers = [tower for tower in _TOWERS if config.get(tower) is not None]
    headers = _local(name)
    packed = headers is not None and any(n.endswith(_PACKED) for n in headers.shapes)
    if headers is None and (towers or family.weights is None) and not Path(name).exists():
        headers = hub_headers(name, revision=revision)
    weights = None
    if headers is not None:
        weights = sort_weights(headers.shapes, tied=tied)
        check_layers(len(weights.layers), text, name=name)
    if weights is None or packed:
        weights = _weights_from_config(family, config, uncounted=towers)
    missing = 2 * weights.count if headers is None else headers.missing
    return Model(
        name=name,
        family=family.name,
        weights=weights,
        longest=longest_of(text),
        softcap=bool(text.get("final_logit_softcapping")),
        disk=0 if headers is None else headers.nbytes,
        download=missing or 0,
        quantised=quantised,
    )


def _weights_from_config(
    family: Family, config: Mapping[str, Any], *, uncounted: Sequence[str]
) -> Weights:
    if family.weights is None:
        raise CheckpointError(
            f"Family '{family.name}' does not say its shapes from a config alone. Name a folder "
            "with the unquantised checkpoint, whose headers are read."
        )
    return sort_weights(shapes_of(family.weights, config), uncounted=uncounted)


def _local(name: str) -> Headers | None:
    path = Path(name).expanduser()
    return local_headers(path) if path.is_dir() else None


def plan_run(
    model: Model,
    run: RunSettings,
    *,
    rates: Rates,
    vram: int | None = None,
    ram: int | None = None,
) -> RunPlan:
    """Work out what a run takes, and which settings fit.

    Args:
        model: the model.
        run: the run.
        rates: how fast the machine is.
        vram: device memory in bytes; None means that it is not judged.
        ram: host memory in bytes; None means that it is not judged.

    Raises:
        SettingsError: the run is not possible with this model.
        CheckpointError: nor is the base's precision with its checkpoint.
    """
    _check(model, run)
    weights = model.weights
    fitting = [option for option in _options(model, run) if _fits(model, option, vram, ram)]
    if any(option.host == run.host for option in fitting):
        # the disk is the last resort, where memory does not hold the layers
        fitting = [option for option in fitting if option.host == run.host]
    resident, kept_time = frozenset[int](), None
    if fitting and vram is not None:
        resident = _resident(model, fitting[0], vram)
        kept_time = step_time(weights, fitting[0], rates, resident=resident)
    return RunPlan(
        model=model,
        run=run,
        memory=device_memory(weights, run, softcap=model.softcap),
        host=host_memory(weights, run),
        time=step_time(weights, run, rates),
        resident=resident_memory(weights, run, checkpointing=False, softcap=model.softcap),
        checkpointed=resident_memory(weights, run, checkpointing=True, softcap=model.softcap),
        vram=vram,
        ram=ram,
        fitting=tuple(fitting),
        kept=len(resident),
        kept_time=kept_time,
        longest=_longest(model, fitting[0], vram, ram) if fitting else None,
    )


def _check(model: Model, run: RunSettings) -> None:
    if model.quantised is not None and run.precision != model.quantised:
        raise CheckpointError(
            f"Checkpoint '{model.name}' is quantised already, with '{model.quantised}', so "
            f"precision='{run.precision}' cannot be had from it. Use precision="
            f"'{model.quantised}', or give the unquantised checkpoint."
        )
    if model.longest and run.seq_len > model.longest:
        raise SettingsError(
            f"--seq-len {run.seq_len} is more than the {model.longest} positions of {model.name}."
        )
    if run.block_size > len(model.weights.layers):
        raise SettingsError(
            f"--block-size {run.block_size} is more than the {len(model.weights.layers)} layers of "
            f"{model.name}."
        )


def _options(model: Model, run: RunSettings) -> Iterator[RunSettings]:
    """Yield the run that was asked for, then ways to save memory, those that cost least first."""
    yield run
    seen = {run}
    layers = len(model.weights.layers)
    for host, chunk, graphs, state, size in itertools.product(
        (run.host, "mmap"),
        (run.loss_chunk, run.loss_chunk or CHUNK),
        (run.graphs, False),
        (run.optimizer_state, "host"),
        (run.block_size, 2, 4, 8),
    ):
        if run.block_size <= size <= layers and (chunk is None or chunk < run.tokens):
            option = attrs.evolve(
                run,
                host=host,
                loss_chunk=chunk,
                graphs=graphs,
                optimizer_state=state,
                block_size=size,
            )
            if option not in seen:
                seen.add(option)
                yield option


def _fits(model: Model, run: RunSettings, vram: int | None, ram: int | None) -> bool:
    if not _host_fits(sum(host_memory(model.weights, run).values()), ram):
        return False
    return vram is None or device_memory(model.weights, run, softcap=model.softcap).device <= vram


def _resident(model: Model, run: RunSettings, vram: int) -> frozenset[int]:
    """Return which layers a budget keeps on the device: as many as fit, spread over the depth."""
    spare = vram - device_memory(model.weights, run, softcap=model.softcap).device
    spare -= more_graphs(run, layers=len(model.weights.layers))
    return most_resident(model.weights.layer_bytes(run.precision), spare=spare)


def _host_fits(nbytes: int, ram: int | None) -> bool:
    return ram is None or nbytes + HOST_MARGIN <= ram


def _longest(model: Model, run: RunSettings, vram: int | None, ram: int | None) -> int:
    """Return the longest sequence that fits, in steps of 64 tokens."""
    top = max(model.longest, run.seq_len)
    low, high = run.seq_len, top
    if _fits(model, attrs.evolve(run, seq_len=top), vram, ram):
        return top
    while high - low > _SEQ_STEP:
        middle = (low + high) // 2 // _SEQ_STEP * _SEQ_STEP
        if middle <= low:
            break
        if _fits(model, attrs.evolve(run, seq_len=middle), vram, ram):
            low = middle
        else:
            high = middle
    return low
