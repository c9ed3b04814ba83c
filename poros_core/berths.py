"""Memory that units will stand in, made while their weights are still being read.

[Note: Berths]
A berth is the stretch that a unit will stand in, page-locked if it is to be. Threads make them from
the skeleton of a model whose weights are still to come, in the order in which they will be needed,
so that making memory, which takes as long as reading, does not wait for it. A weight that was
quantised on the device is copied straight to its place, in the order in which weights come. A large
tensor that is likely to be what the checkpoint holds under the same name, such as an embedding
table, is read from the file as soon as its berth is there; it stands there for good if the loaded
model turns out to hold a view of that very stretch of the file. What is left of the unit, such as
norms, follows when all is there. A unit that does not fit its berth is laid out anew, so a wrong
guess costs time only.

The sizes can be told even before there is a skeleton, and weights can land there. A berth of about
the right size is then taken, and one that nobody takes is given back.

While the driver locks pages, other calls of CUDA wait. So a berth where quantised weights land is
page-locked when the first of them comes, by the thread that quantises: if all were locked as soon
as they are made, that thread would wait for them, and reading for it. Locking the next layer's on a
thread of its own meanwhile was measured too, and is slower.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from attrs import define, field
from torch import nn

from poros_core.family import Family
from poros_core.file_tensors import FileSpan, MappedFiles, read_span
from poros_core.host_memory import ALIGNMENT, HostBuffer, TensorEntry, fill
from poros_core.landing import land_in_memory
from poros_core.packing_strategy import LAYER
from poros_core.page_locking import makers
from poros_core.plan import Unit

__all__ = ["Berths"]

_READERS = 2
_SLACK = 1 << 20
"""Bytes that a berth whose size was told early may be too large."""
_FIRST = 2
"""Layers whose berths are made before those of head and embeddings, so that quantising can begin;
reading those takes a while, and the last of it must not end the load."""


@define(eq=False)
class _Berth:
    """A stretch that is being made, its size, how much of it is taken, and where in it bytes of
    files are read to."""

    buffer: Future[HostBuffer]
    capacity: int
    used: int = 0
    read: dict[FileSpan, int] = field(factory=dict)
    reading: Future[None] | None = None
    locking: threading.Lock = field(factory=threading.Lock)

    def ready(self) -> HostBuffer:
        """Wait for the stretch, and return it page-locked if it is to be."""
        buffer = self.buffer.result()
        with self.locking:
            buffer.lock()
        return buffer


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
        self._early: dict[str, _Berth] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(makers(), thread_name_prefix="poros-berths")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="poros-berth-reads")

    def __enter__(self) -> Berths:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        self._early.clear()
        self._berths.clear()
        self._of.clear()

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Begin to make berths before there is a skeleton.

        Args:
            sizes: bytes of each unit, about, by its name in the plan.
        """
        assert not self._berths
        for title in _order(list(sizes)):
            self._early[title] = _Berth(
                self._made(title, sizes[title], later=title.startswith(LAYER)), sizes[title]
            )
        self._of.update(self._early)

    def vacate(self) -> None:
        """Forget what landed before there was a skeleton; nobody may land anything meanwhile."""
        for berth in self._early.values():
            berth.used = 0

    def expect(
        self,
        model: nn.Module,
        sizes: Mapping[str, int],
        files: Mapping[str, FileSpan] | None = None,
    ) -> None:
        """Begin to make berths, but for those that are made already.

        Args:
            model: the skeleton of the model that is loaded.
            sizes: bytes of each weight that will be quantised, with its quantisation state, every
                tensor rounded up to ``ALIGNMENT``; by the parameter's name.
            files: where the bytes of parameters stand that will probably be what the checkpoint
                holds; by the parameter's name.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        seen: set[int] = set()
        owned: dict[str, dict[str, nn.Parameter]] = {}
        for title, module in self._units(model):
            params = [p for p in module.parameters() if id(p) not in seen and id(p) in names]
            seen.update(map(id, params))
            owned[title] = {names[id(param)]: param for param in params}
        for title in _order(list(owned)):
            own = owned[title]
            capacity = sum(sizes.get(name, _aligned(p.nbytes)) for name, p in own.items())
            if not capacity:
                continue
            landing = [name for name in own if name in sizes]
            berth = self._early_or_made(title, capacity, later=bool(landing))
            self._berths[title] = berth
            self._of.update(dict.fromkeys(landing, berth))
            self._read_into(berth, [files[name] for name in own if files and name in files])
        for title in list(self._early):
            self._give_back(title)

    def _early_or_made(self, title: str, capacity: int, *, later: bool) -> _Berth:
        early = self._early.get(title)
        if early is not None and capacity <= early.capacity <= capacity + _SLACK:
            return self._early.pop(title)
        if early is not None:
            self._give_back(title)
        return _Berth(self._made(title, capacity, later=later), capacity)

    def _give_back(self, title: str) -> None:
        """Do without a berth, unless something landed there: then that keeps it."""
        berth = self._early.pop(title)
        with self._lock:
            del self._of[title]
            if not berth.used:
                berth.buffer.cancel()

    def _made(self, title: str, capacity: int, *, later: bool) -> Future[HostBuffer]:
        locked = self._locked or not title.startswith(LAYER)
        return self._pool.submit(
            HostBuffer, capacity, device=self._device, locked=locked, later=later
        )

    def _read_into(self, berth: _Berth, spans: Sequence[FileSpan]) -> None:
        """Begin to read bytes of files into a berth as soon as it is there."""
        for span in spans:
            with self._lock:
                begin = self._place_for(berth, span.nbytes)
            if begin is not None:
                berth.read[span] = begin

        def read() -> None:
            content = berth.buffer.result().view()
            for span, begin in berth.read.items():
                read_span(span, content[begin : begin + span.nbytes])

        if berth.read:
            berth.reading = self._readers.submit(read)

    def land(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a finished tensor to its place. From CUDA the copy is queued, not awaited. Several
        threads may do so at once.

        Args:
            name: the name of the parameter that it belongs to, or of its unit.
            tensor: the tensor.

        Returns:
            Where it stands, in host memory.

        Raises:
            PrepareError: memory cannot be had or cannot be page-locked.
        """
        with self._lock:
            berth = self._of.get(name)
            begin = None if berth is None else self._place_for(berth, tensor.nbytes)
        if berth is None or begin is None:
            return land_in_memory(tensor)
        place = torch.frombuffer(
            berth.ready().view(), dtype=tensor.dtype, count=tensor.numel(), offset=begin
        ).view(tensor.shape)
        return place.copy_(tensor, non_blocking=True)

    def _place_for(self, berth: _Berth, nbytes: int) -> int | None:
        """Take room in a berth, and return where it begins; None if there is none."""
        if berth.used + nbytes > berth.capacity or not nbytes:
            return None
        begin = berth.used
        berth.used += _aligned(nbytes)
        return begin

    def take(self, unit: Unit) -> tuple[list[TensorEntry], HostBuffer] | None:
        """Return a unit's berth with all of its tensors in it, and where they lie; None if it has
        none that they fit into.

        What was queued by ``land`` must be done.

        Raises:
            CheckpointError: a file that was read from is damaged.
            OSError: a file cannot be read.
        """
        berth = self._berths.pop(unit.name, None)
        if berth is None:
            return None
        buffer = berth.ready()
        if berth.reading is not None:
            berth.reading.result()
        files = MappedFiles() if berth.read else None
        base = buffer.bytes.data_ptr()
        entries: list[TensorEntry] = []
        late: list[TensorEntry] = []
        end = berth.used
        for ref in unit.refs:
            tensor = ref.get()
            offset = tensor.data_ptr() - base
            inside = 0 <= offset < berth.used
            span = files.span_of(tensor) if files is not None and not inside else None
            if span is not None and span in berth.read:
                offset, inside = berth.read.pop(span), True
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
            yield f"{LAYER}{number}", layer
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


def _order(titles: list[str]) -> list[str]:
    """Return the units in the order in which their berths are made."""
    layers = deque(title for title in titles if title.startswith(LAYER))
    first = [layers.popleft() for _ in range(min(_FIRST, len(layers)))]
    return [*first, *(title for title in titles if not title.startswith(LAYER)), *layers]
