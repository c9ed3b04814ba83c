"""The load gate: every way to load a base gives the bytes that ``from_pretrained`` gives.

What is compared is dtype, shape and SHA-256 of every tensor that decides the model's numbers:
parameters, the whole of each quantisation state, and buffers. The reference is Transformers' own
``from_pretrained`` onto the device, which Poros does not touch. One model at a time is in memory.
"""

from __future__ import annotations

import datetime
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import field, frozen
from torch import nn

from poros_core.conformance.manifest import tensor_manifest
from poros_core.errors import GateError
from poros_core.gate.layers import leading
from poros_core.gate.options import GateOptions, Subject, subject_of
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.record import EXIT_STATUS
from poros_core.gate.stack import stack_of
from poros_core.host_store import HostStore
from poros_core.load import choose_strategy, load, local_folder
from poros_core.prepare import STORE
from poros_core.protocols import LoadRequest

__all__ = ["LOAD_BYTES", "STORAGES", "LoadGateOptions", "LoadGateResult", "run_load_gate"]

LOAD_BYTES = "load-bytes"
"""The ``kind`` of a load gate's record."""
STORAGES = (
    *(f"{kind}8" for kind in ("uint", "int")),
    *(f"float{bits}" for bits in (16, 32, 64)),
    "bfloat16",
)
"""What bitsandbytes can store packed weights as."""

_SHORT = 4
_METHOD = (
    "Each way loads the checkpoint, and dtype, shape and SHA-256 of every parameter, quantisation "
    "state and buffer are compared with those of Transformers' from_pretrained, tensor by tensor. "
    "'cache' and 'mmap' are second loads, from the packed cache that 'streamed' wrote. "
    "'prequantised' loads what save_pretrained of the streamed model wrote."
)


@frozen(kw_only=True)
class Quantisation:
    """Settings of NF4.

    Attributes:
        double: whether scales are quantised too.
        storage: what packed weights are stored as.
    """

    double: bool
    storage: str

    def config(self) -> Any:
        """Return them as Transformers takes them."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_quant_storage=self.storage,
        )


@frozen(kw_only=True)
class LoadGateOptions:
    """What a load gate is asked to do.

    Attributes:
        gate: names the model or shape, precision and seed; what concerns training is not looked at.
        storages: what packed weights are stored as, one after the other; None means all for a
            tiny shape, else ``uint8``. Each runs with double quantisation off and on.
        pieces: checkpoints that the layers of a shape are dealt to, one on disk at a time, for
            shapes that the disk or the device does not hold whole. Each has embeddings and head.
    """

    gate: GateOptions
    storages: tuple[str, ...] | None = None
    pieces: int = field(default=1)

    @pieces.validator
    def _at_least_one(self, attribute: Any, value: int) -> None:
        if value < 1:
            raise GateError(f"--pieces must be 1 or more; got {value}.")

    def quantisations(self, subject: Subject) -> list[Quantisation | None]:
        """Return the settings to run, one after the other; None for what is not quantised."""
        if self.gate.precision != "nf4":
            return [None]
        tiny = subject.random and subject.shape.startswith("tiny")
        storages = self.storages or (STORAGES if tiny else ("uint8",))
        return [Quantisation(double=d, storage=s) for s in storages for d in (False, True)]


@frozen(kw_only=True)
class LoadGateResult:
    """How a load gate ended.

    Attributes:
        verdict: ``"exact"``, ``"diverged"`` or ``"void"``.
        record: the whole record.
    """

    verdict: str
    record: Mapping[str, Any] = field(repr=False)

    @property
    def exit_status(self) -> int:
        """What the command line exits with."""
        return EXIT_STATUS[self.verdict]


def run_load_gate(
    options: LoadGateOptions,
    *,
    command: str = "",
    observer: Callable[[str], None] = lambda text: None,
) -> LoadGateResult:
    """Load a base in every way, and compare all bytes.

    Args:
        options: what to do.
        command: how it was asked for, for the record.
        observer: is told what is being done.

    Raises:
        GateError: the options do not fit the model.
        CheckpointError: the checkpoint cannot be read.
    """
    subject = subject_of(attrs.evolve(options.gate, seq_len=_SHORT))  # nothing is trained
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if options.pieces > 1 and not subject.random:
        raise GateError("--pieces deals random layers out; it needs --shape instead of --model.")
    if options.pieces > subject.depth:
        raise GateError(f"--pieces {options.pieces} is more than the {subject.depth} layers.")
    runs: list[dict[str, Any]] = []
    for number in range(options.pieces):
        with _checkpoint(options, subject, number, device=device, observer=observer) as path:
            for quantisation in options.quantisations(subject):
                bench = _Bench(options, subject, path, quantisation, device, observer)
                runs += [{"piece": number, **run} for run in bench.run()]
    return _result(options, subject, runs, device=device, command=command)


@contextmanager
def _checkpoint(
    options: LoadGateOptions,
    subject: Subject,
    number: int,
    *,
    device: torch.device,
    observer: Callable[[str], None],
) -> Iterator[Path]:
    if options.gate.model is not None:
        yield local_folder(options.gate.model)
        return
    layers = [len(range(n, subject.depth, options.pieces)) for n in range(options.pieces)][number]
    with tempfile.TemporaryDirectory(prefix="poros-gate-") as folder:
        what = f"piece {number + 1} of {options.pieces}" if options.pieces > 1 else "all layers"
        observer(f"writing random weights at shape {subject.shape}, {what}")
        config = subject.config if options.pieces == 1 else leading(subject.config, layers)
        path = Path(folder)
        seed = options.gate.seed + number
        write_random_checkpoint(config, path, seed=seed, dtype=torch.bfloat16, device=device)
        yield path


class _Bench:
    """Loads one checkpoint with one quantisation in every way."""

    def __init__(
        self,
        options: LoadGateOptions,
        subject: Subject,
        path: Path,
        quantisation: Quantisation | None,
        device: torch.device,
        observer: Callable[[str], None],
    ) -> None:
        self._options = options
        self._path = path
        self._quantisation = quantisation
        self._device = device
        self._observer = observer
        self._request = LoadRequest(
            path=path,
            family=subject.family,
            device=device,
            quantization_config=None if quantisation is None else quantisation.config(),
        )

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield what each way gave."""
        named = "" if self._quantisation is None else f", {attrs.asdict(self._quantisation)}"
        self._observer(f"from_pretrained{named}")
        precision = self._options.gate.precision
        strategy = choose_strategy(precision, "standard", self._request)
        reference = tensor_manifest(strategy.load_resident(self._request))
        _free(self._device)
        with tempfile.TemporaryDirectory(prefix="poros-gate-cache-") as folder:
            for way, build in self._ways(Path(folder)).items():
                self._observer(f"{way}{named}")
                start = time.perf_counter()
                model = build()
                seconds = time.perf_counter() - start
                if self._options.gate.plant_fault and way == "streamed":
                    _flip(model)
                yield self._compared(way, reference, model, seconds)
                del model
                _free(self._device)

    def _ways(self, folder: Path) -> dict[str, Callable[[], nn.Module]]:
        cache, saved = folder / "cache", folder / "saved"

        def streamed() -> nn.Module:
            model: Any = self._load(cache=cache)
            if self._quantisation is not None:
                model.save_pretrained(saved)
            loaded: nn.Module = model
            return loaded

        ways: dict[str, Callable[[], nn.Module]] = {
            "streamed": streamed,
            "standard": lambda: self._load(load_strategy="standard"),
            "cache": lambda: self._load(cache=cache),
            "mmap": lambda: self._load(cache=cache, host="mmap"),
        }
        if self._quantisation is not None:
            ways["prequantised"] = lambda: self._load(path=saved)
        return ways

    def _load(
        self,
        *,
        path: Path | None = None,
        load_strategy: str = "streamed",
        cache: Path | bool = False,
        host: str = "auto",
    ) -> nn.Module:
        model: nn.Module = load(
            self._path if path is None else path,
            precision=self._options.gate.precision,
            load_strategy=load_strategy,
            device=self._device,
            quantization_config=None if self._quantisation is None else self._quantisation.config(),
            cache=cache,
            host=host,
        )
        return model

    def _compared(
        self, way: str, reference: Mapping[str, str], model: nn.Module, seconds: float
    ) -> dict[str, Any]:
        found = tensor_manifest(model)
        wrong = [n for n in {**reference, **found} if reference.get(n) != found.get(n)]
        store: HostStore = model.__dict__[STORE]
        assert store.report is not None
        source = "cache" if way in ("cache", "mmap") else "checkpoint"
        return {
            "way": way,
            "quantisation": (
                None if self._quantisation is None else attrs.asdict(self._quantisation)
            ),
            "tensors": len({**reference, **found}),
            "mismatched": len(wrong),
            "first": None
            if not wrong
            else {
                "tensor": wrong[0],
                "expected": reference.get(wrong[0]),
                "got": found.get(wrong[0]),
            },
            "seconds": seconds,
            "as_asked": store.report.source == source and (way != "mmap" or store.ring is not None),
            "load": attrs.asdict(store.report),
        }


def _flip(model: nn.Module) -> None:
    """Flip one bit of the base in host memory."""
    store: HostStore = model.__dict__[STORE]
    image = store.images()[len(store.images()) // 2]
    image.buffer.bytes[0] ^= 1


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _result(
    options: LoadGateOptions,
    subject: Subject,
    runs: list[dict[str, Any]],
    *,
    device: torch.device,
    command: str,
) -> LoadGateResult:
    mismatched = sum(run["mismatched"] for run in runs)
    planted = options.gate.plant_fault
    void = [f"'{run['way']}' was not loaded as asked" for run in runs if not run["as_asked"]]
    if planted and not all(run["mismatched"] for run in runs if run["way"] == "streamed"):
        void.append("a bit was flipped and nothing differs, so the gate cannot fail")
    verdict = "void" if void else ("diverged" if mismatched else "exact")
    record = {
        "kind": LOAD_BYTES,
        "verdict": verdict,
        "family": subject.family.name,
        "shape": subject.shape,
        "precision": options.gate.precision,
        "layers": subject.depth,
        "pieces": options.pieces,
        "seed": options.gate.seed,
        "tensors": sum(run["tensors"] for run in runs),
        "mismatched": mismatched,
        "void_reasons": void,
        "planted_fault": planted,
        "runs": runs,
        "method": _METHOD,
        "command": command,
        "stack": stack_of(device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return LoadGateResult(verdict=verdict, record=record)
