"""Quantising weights before Transformers asks for them.

[Note: Quantising ahead]
Building a model takes as long as reading half of its weights, and is Python from start to end. What
an ordinary load quantises, and how, can be told from headers and settings. So a thread begins while
the model is still being built: it takes each weight from the reader, quantises it on the stream of
the thread that loads, and moves what comes of it to its unit's berth. Transformers asks in the same
order, and gets what is there already. Once there is a skeleton it is held against what was
expected, and if that was wrong all of it is dropped.

Transformers changes torch's default dtype, for every thread, while it builds a model. What depends
on that is therefore built before the thread starts: bitsandbytes' tables, by quantising something
small.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import bitsandbytes as bnb
import torch
from attrs import frozen
from transformers.pytorch_utils import Conv1D

from poros_core.landing import room_for
from poros_loaders.code_table import one_table

if TYPE_CHECKING:
    from poros_core.finite import Bounds
    from poros_loaders.weight_reader import Extent, WeightReader

__all__ = ["Ahead", "Quantised", "QuantiseAhead"]

_BLOCK = 64
_SMALL = 4096


@frozen(eq=False)
class Quantised:
    """What came of a weight.

    Attributes:
        data: the packed elements, in host memory.
        state: the quantisation state, in host memory.
        bounds: tell whether the weight was finite.
    """

    data: torch.Tensor
    state: Any
    bounds: Bounds | None


@frozen(eq=False, kw_only=True)
class Ahead:
    """A weight that is quantised ahead.

    Attributes:
        extent: where it stands.
        shape: its shape.
        unit: the name of its unit in the plan.
    """

    extent: Extent
    shape: tuple[int, ...]
    unit: str


class QuantiseAhead:
    """Quantises ahead from ``start`` to ``stop``. See [Note: Quantising ahead]."""

    def __init__(
        self,
        wanted: Sequence[Ahead],
        *,
        dtype: torch.dtype,
        config: Any,
        device: torch.device,
        reader: WeightReader,
        look: Callable[[torch.Tensor], Bounds | None],
        keep: Callable[[str, torch.Tensor, Any], torch.Tensor],
    ) -> None:
        """Note what is to be done.

        Args:
            wanted: the weights, in the order in which they will be asked for and are read.
            dtype: of all of them.
            config: the ``BitsAndBytesConfig``.
            device: the compute device.
            reader: reads them, for nobody else meanwhile.
            look: looks whether a weight is finite.
            keep: moves what came of a weight of a unit to host memory, and returns the packed
                elements there.
        """
        self._wanted = wanted
        self._names = {ahead.extent.name for ahead in wanted}
        self._dtype = dtype
        self._double = bool(config.bnb_4bit_use_double_quant)
        self._storage: torch.dtype = config.bnb_4bit_quant_storage
        self._device = device
        self._reader = reader
        self._look = look
        self._keep = keep
        self._done: dict[str, Quantised] = {}
        self._failure: Exception | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="poros-quantise", daemon=True)
        self._stream: Any = contextlib.nullcontext()
        self._tables: dict[Any, torch.Tensor] = {}

    def start(self) -> None:
        """Begin, on the current stream of this thread."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.stream(torch.cuda.current_stream(self._device))
        with one_table(self._tables):
            self._quantise(torch.zeros(_SMALL, dtype=self._dtype, device=self._device))
        self._thread.start()

    def stop(self) -> None:
        """End, once the weight that is being quantised is done. The reader must still run."""
        self._stopped = True
        self._thread.join()
        self._done.clear()

    def fits(self, modules: Mapping[str, Any], dtype: object) -> bool:
        """Say whether the layers of a skeleton are quantised as was expected.

        Args:
            modules: its 4-bit layers.
            dtype: that weights have when they are quantised.
        """
        return dtype == self._dtype and all(
            module.weight.blocksize == _BLOCK
            and module.weight.quant_type == "nf4"
            and module.weight.compress_statistics == self._double
            and module.weight.quant_storage == self._storage
            and not issubclass(module.source_cls, Conv1D)
            for module in modules.values()
        )

    def take(self, name: str) -> Quantised | None:
        """Wait for a weight, and hand it over; None if it is none of those that were wanted.

        Args:
            name: what the checkpoint calls it.

        Raises:
            Exception: what the thread failed with.
        """
        if name not in self._names:
            return None
        with self._changed:
            self._changed.wait_for(lambda: name in self._done or self._failure is not None)
            if name not in self._done:
                assert self._failure is not None
                raise self._failure
            self._names.discard(name)
            return self._done.pop(name)

    def _run(self) -> None:
        try:
            with self._stream, one_table(self._tables):
                for ahead in self._wanted:
                    if self._stopped:
                        return
                    quantised = self._one(ahead)
                    with self._changed:
                        self._done[ahead.extent.name] = quantised
                        self._changed.notify()
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify()

    def _one(self, ahead: Ahead) -> Quantised:
        like = torch.empty(ahead.shape, dtype=self._dtype, device="meta")
        weight = room_for(like, self._device)
        given = self._reader.give(ahead.extent.name, weight.view(-1).view(torch.uint8))
        assert given, "weights are quantised in the order in which they are read"
        bounds = self._look(weight)
        data, state = self._quantise(weight)
        del weight
        return Quantised(self._keep(ahead.unit, data, state), state, bounds)

    def _quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
        data, state = bnb.functional.quantize_4bit(
            weight,
            blocksize=_BLOCK,
            compress_statistics=self._double,
            quant_type="nf4",
            quant_storage=self._storage,
        )
        return data, state
