"""Memory that units will stand in, made while their weights are still being read.

[Note: Berths]
A berth is the stretch that a unit will stand in, page-locked if it is to be. Threads make them from
the skeleton of a model whose weights are still to come, in the order in which they will be needed,
so that page-locking, which takes as long as reading, does not wait for it. A weight that was
quantised on the device is copied straight to its place, in the order in which weights come; what is
left of the unit, such as norms, follows when all is there. A unit that does not fit its berth is
laid out anew, so a wrong guess costs time only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from attrs import define
from torch import nn

from poros_core.family import Family
from poros_core.host_memory import ALIGNMENT, HostBuffer, TensorEntry, fill
from poros_core.landing import land_in_memory
from poros_core.plan import Unit

__all__ = ["Berths"]

_MAKERS = 4


@define(eq=False)
class _Berth:
    """A stretch that is being made, its size, and how much of it is taken."""

    buffer: Future[HostBuffer]
    capacity: int
    used: int = 0


class Berths:
    """The berths of one load. See [Note: Berths]."""

    def __init__(self, family: Family, device: torch.device, *, locked: bool) -> None:
        """Make none yet.

        Args:
            family: finds a model's layers.
            device: the compute device.
            locked: page-lock layers; head and embeddings are page-locked always.
        """
        self._family = family
        self._device = device
        self._locked = locked
        self._berths: dict[str, _Berth] = {}
        self._of: dict[str, _Berth] = {}
        makers = min(_MAKERS, max(1, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(makers, thread_name_prefix="poros-berths")

    def __enter__(self) -> Berths:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._berths.clear()
        self._of.clear()

    def expect(self, model: nn.Module, sizes: Mapping[str, int]) -> None:
        """Begin to make berths.

        Args:
            model: the skeleton of the model that is loaded.
            sizes: bytes of each weight that will be quantised, with its quantisation state, every
                tensor rounded up to ``ALIGNMENT``; by the parameter's name.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        seen: set[int] = set()
        for title, module in self._units(model):
            params = [p for p in module.parameters() if id(p) not in seen and id(p) in names]
            seen.update(map(id, params))
            own = {names[id(param)]: param for param in params}
            capacity = sum(sizes.get(name, _aligned(p.nbytes)) for name, p in own.items())
            if not capacity:
                continue
            locked = self._locked or not title.startswith("layer ")
            made = self._pool.submit(HostBuffer, capacity, device=self._device, locked=locked)
            self._berths[title] = _Berth(made, capacity)
            self._of.update((name, self._berths[title]) for name in own if name in sizes)

    def land(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a finished tensor to its place. From CUDA the copy is queued, not awaited.

        Args:
            name: the name of the parameter that it belongs to.
            tensor: the tensor.

        Returns:
            Where it stands, in host memory.

        Raises:
            PrepareError: memory cannot be had or cannot be page-locked.
        """
        berth = self._of.get(name)
        if berth is None or berth.used + tensor.nbytes > berth.capacity or not tensor.nbytes:
            return land_in_memory(tensor)
        begin = berth.used
        berth.used += _aligned(tensor.nbytes)
        place = torch.frombuffer(
            berth.buffer.result().view(), dtype=tensor.dtype, count=tensor.numel(), offset=begin
        ).view(tensor.shape)
        return place.copy_(tensor, non_blocking=True)

    def take(self, unit: Unit) -> tuple[list[TensorEntry], HostBuffer] | None:
        """Return a unit's berth with all of its tensors in it, and where they lie; None if it has
        none that they fit into.

        What was queued by ``land`` must be done.
        """
        berth = self._berths.pop(unit.name, None)
        if berth is None:
            return None
        buffer = berth.buffer.result()
        base = buffer.bytes.data_ptr()
        entries: list[TensorEntry] = []
        late: list[TensorEntry] = []
        end = berth.used
        for ref in unit.refs:
            tensor = ref.get()
            offset = tensor.data_ptr() - base
            inside = 0 <= offset < berth.used
            if not inside:
                offset, end = end, end + _aligned(tensor.nbytes)
            entry = TensorEntry(
                ref, offset, tensor.nbytes, tensor.dtype, tensor.shape, tensor.device
            )
            entries.append(entry)
            if not inside:
                late.append(entry)
        if end > berth.capacity:
            return None
        fill(buffer, late)
        buffer.shrink(end)
        return entries, buffer

    def _units(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the units as ``plan`` names them."""
        decoder = self._family.decoder(model)
        for number, layer in enumerate(self._family.layers(decoder)):
            yield f"layer {number}", layer
        config: object = getattr(model, "config", None)
        head: object = model.get_output_embeddings()  # type: ignore[operator]
        table: object = model.get_input_embeddings()  # type: ignore[operator]
        if isinstance(head, nn.Module):
            yield "head", head
        tied = bool(getattr(config, "tie_word_embeddings", False))
        if isinstance(table, nn.Module) and not tied:
            yield "embedding", table


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
