"""What brings weights to the device and back; see [Note: Staged quantisation] in ``staging``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import bitsandbytes as bnb
import torch

from poros_core.file_tensors import LARGE, FileSpan
from poros_core.finite import bounds_of
from poros_core.landing import give_back_free_memory, room_for
from poros_loaders.estimate import layer_matrices, quantised_bytes, unit_sizes
from poros_loaders.quantise_ahead import Ahead, QuantiseAhead
from poros_loaders.read_ahead import ReadAhead
from poros_loaders.skeleton import quantised_weight
from poros_loaders.weight_reader import Extent, WeightReader

if TYPE_CHECKING:
    from poros_core.finite import FiniteCheck
    from poros_core.protocols import LoadRequest
    from poros_loaders.checkpoint import Checkpoint

__all__ = ["Stage"]

_TIDY = 16 << 20
"""Bytes of packed weights after which memory that is free is given back, on a CPU."""
_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class Stage:
    """Brings weights to the device and what comes of them back, while it is entered."""

    def __init__(self, request: LoadRequest, checkpoint: Checkpoint, finite: FiniteCheck) -> None:
        self._device = request.device
        self._land = request.land or torch.Tensor.cpu
        self._berths = request.berths
        self._advance = request.advance or (lambda nbytes: None)
        self._finite = finite
        self._checkpoint = checkpoint
        self._reader = WeightReader(request.device)
        self._foreseen: list[Extent] = []
        self._shards = ReadAhead(sorted(self._checkpoint.files))
        self._ahead: QuantiseAhead | None = None
        self._untidy = 0

    def __enter__(self) -> Stage:
        self._reader.__enter__()
        self._shards.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stop()
        # copies that are queued read and write memory that is given back after this
        with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        self._shards.__exit__(kind, error, trace)
        self._reader.__exit__(kind, error, trace)

    def foresee(self, dtype: torch.dtype | str, config: Any) -> None:
        """Begin to read and to make room while there is no skeleton yet, by what headers say.

        Args:
            dtype: dtype of what is not quantised, or ``"auto"``.
            config: the ``BitsAndBytesConfig``.
        """
        if config.llm_int8_skip_modules is not None:
            return  # what is quantised cannot be told from headers
        units = layer_matrices(self._checkpoint)
        self._foreseen = _extents(self._checkpoint, units)
        self._reader.begin(self._foreseen)
        if self._berths is None:
            return
        sizes = unit_sizes(
            self._checkpoint,
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
            item=config.bnb_4bit_quant_storage.itemsize,
            double=config.bnb_4bit_use_double_quant,
        )
        self._berths.begin(sizes)
        kinds = {self._checkpoint.tensors[extent.name].dtype for extent in self._foreseen}
        if len(kinds) == 1 and _asked(dtype, self._checkpoint) == _DTYPES[kinds.pop()]:
            self._quantise(units, config)

    def _quantise(self, units: Mapping[str, str], config: Any) -> None:
        """Begin to quantise what is foreseen; see [Note: Quantising ahead]."""
        headers = self._checkpoint.tensors
        ahead = QuantiseAhead(
            [
                Ahead(extent=extent, shape=headers[extent.name].shape, unit=units[extent.name])
                for extent in self._foreseen
            ],
            dtype=_DTYPES[headers[self._foreseen[0].name].dtype],
            config=config,
            device=self._device,
            reader=self._reader,
            look=bounds_of,
            keep=self._keep,
        )
        ahead.start()
        self._ahead = ahead

    def begin(self, model: Any) -> None:
        """Begin to read weights and to make room for what comes of them.

        Args:
            model: the skeleton, its layers replaced by quantised ones that are still empty.
        """
        layers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, bnb.nn.Linear4bit)
        }
        weights = {f"{path}.weight": module.weight for path, module in layers.items()}
        shapes = {tuple(weight.shape) for weight in weights.values()}
        wanted = _extents(
            self._checkpoint,
            {n for n, header in self._checkpoint.tensors.items() if header.shape in shapes},
        )
        ahead = self._ahead
        right = wanted == self._foreseen and (ahead is None or ahead.fits(layers, _dtype(model)))
        if not right:
            self._restart()
        if self._berths is not None:
            sizes = {name: _quantised_bytes(weight) for name, weight in weights.items()}
            self._berths.expect(model, sizes, _likely_files(self._checkpoint, model, sizes))
        if not right:
            self._reader.begin(wanted)

    def _restart(self) -> None:
        """Drop what was read and quantised ahead."""
        self._stop()
        if self._berths is not None:
            self._berths.vacate()
        self._reader.__exit__(None, None, None)
        self._reader = WeightReader(self._device)
        self._reader.__enter__()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def finished(
        self, model: Any, name: str, tensor: torch.Tensor, source: str | None
    ) -> Any | None:
        """Return a weight that was quantised ahead as a parameter; None if it was not.

        Args:
            model: the model.
            name: the parameter's name.
            tensor: what Transformers hands over, unquantised.
            source: the tensor of the checkpoint that it is, if it is one as it stands there.
        """
        if self._ahead is None or source is None or not self._stands_there(tensor, source):
            return None
        done = self._ahead.take(source)
        if done is None:
            return None
        self._note(tensor.nbytes)
        self._finite.note(name, done.bounds)
        return quantised_weight(model, name, done.data, done.state)

    def bring(self, tensor: torch.Tensor, source: str | None) -> torch.Tensor:
        """Return an unquantised weight on the device, and look whether it is finite.

        Args:
            tensor: what Transformers hands over.
            source: the tensor of the checkpoint that it is, if it is one as it stands there.
        """
        on_device = self._read_ahead(tensor, source)
        if on_device is None:
            on_device = tensor.to(self._device)
        self._note(tensor.nbytes)
        return on_device

    def _note(self, nbytes: int) -> None:
        self._advance(nbytes)
        self._shards.advance(nbytes)

    def look_at(self, name: str, tensor: torch.Tensor) -> None:
        """Note whether a weight is finite."""
        self._finite.add(name, tensor)

    def take_back(self, name: str, parameter: Any) -> None:
        """Move a quantised weight and its quantisation state to host memory."""
        parameter.data = self._keep(name, parameter.data, parameter.quant_state)

    def _keep(self, name: str, data: torch.Tensor, state: Any) -> torch.Tensor:
        """Move what came of a weight to host memory. ``name`` is the parameter's, or its unit's."""
        kept = self._back(name, data)
        for owner in (state, state.state2):
            for attribute in ("absmax", "code", "offset"):
                tensor = getattr(owner, attribute, None)
                if isinstance(tensor, torch.Tensor):
                    setattr(owner, attribute, self._back(name, tensor))
        self._tidy(kept.nbytes)
        return kept

    def _tidy(self, nbytes: int) -> None:
        """Keep what quantising on a CPU frees from piling up between the small things that stay."""
        self._untidy += nbytes if self._device.type == "cpu" else 0
        if self._untidy > _TIDY:
            self._untidy = 0
            give_back_free_memory()

    def _back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._land(tensor) if self._berths is None else self._berths.land(name, tensor)

    def _read_ahead(self, tensor: torch.Tensor, source: str | None) -> torch.Tensor | None:
        if self._ahead is not None or source is None or not self._stands_there(tensor, source):
            return None  # the reader works for what is quantised ahead
        found = room_for(tensor, self._device)
        given = self._reader.give(source, found.view(-1).view(torch.uint8))
        return found if given else None

    def _stands_there(self, tensor: torch.Tensor, source: str) -> bool:
        """Say whether a tensor is as the checkpoint has it."""
        header = self._checkpoint.tensors.get(source)
        return (
            header is not None
            and header.shape == tuple(tensor.shape)
            and _DTYPES.get(header.dtype) == tensor.dtype
            and tensor.is_contiguous()
        )


def _asked(dtype: torch.dtype | str, checkpoint: Checkpoint) -> object:
    """Return the dtype that Transformers will give weights; None if that cannot be told."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return getattr(torch, name, None) if isinstance(name, str) else None


def _dtype(model: Any) -> object:
    return getattr(model.config, "dtype", None)


def _extents(checkpoint: Checkpoint, names: Collection[str]) -> list[Extent]:
    """Return where weights stand, in the order in which Transformers asks for them."""
    return [
        Extent(name=name, file=header.file, begin=header.begin, nbytes=header.nbytes)
        for name, header in sorted(checkpoint.tensors.items(), key=lambda item: _order(item[0]))
        if name in names and header.dtype in _DTYPES
    ]


def _order(name: str) -> list[tuple[bool, int | str]]:
    """Sort names as Transformers does: numbers by size, and before text."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else part)
            for part in name.split(".")]  # fmt: skip


def _quantised_bytes(weight: Any) -> int:
    """Return what a weight that is not quantised yet will take, each tensor rounded up."""
    return quantised_bytes(
        weight.numel(),
        item=weight.quant_storage.itemsize,
        block=weight.blocksize,
        double=weight.compress_statistics,
    )


def _likely_files(
    checkpoint: Checkpoint, model: Any, quantised: Mapping[str, int]
) -> dict[str, FileSpan]:
    """Return where large parameters stand that are not quantised, if the checkpoint has a tensor
    of that name and kind."""
    found = {}
    for name, param in model.named_parameters():
        header = checkpoint.tensors.get(name)
        if header is None or name in quantised or header.nbytes < LARGE:
            continue
        if header.shape == tuple(param.shape) and _DTYPES.get(header.dtype) == param.dtype:
            file = header.file.resolve()
            found[name] = FileSpan(file=file, begin=header.begin, nbytes=header.nbytes)
    return found
