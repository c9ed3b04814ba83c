"""A loaded base to an entry of the packed cache, and back.

What a loader strategy must offer for that is ``PackingStrategy``. Tensors are named by the place
in the model that they are bound to, so that both ways agree whatever the codec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
from attrs import frozen
from torch import nn

from poros_core.host_memory import (
    HostBuffer,
    TensorEntry,
    fill,
    layout,
    layout_of,
)
from poros_core.host_mode import HostMode
from poros_core.host_store import HostStore
from poros_core.mapped_buffer import MappedBuffer
from poros_core.packed_cache import CacheRefusal
from poros_core.packed_entry import Entry, EntryWriter
from poros_core.packed_file import DamagedFile, PackedFile, Piece
from poros_core.packed_reading import Reading, begin_reading
from poros_core.packing_strategy import LAYER
from poros_core.page_locking import makers
from poros_core.plan import BlockPlan, Unit, build_plan
from poros_core.plugins import plugins
from poros_core.protocols import LoadRequest, TensorRef
from poros_core.switching import without_collections

__all__ = ["READERS", "LoadedBase", "named_buffers", "named_refs", "pack", "unpack"]

READERS = 16
"""Threads, at most, that read and hash a base."""

_REST = "rest.safetensors"
_WRITERS = 4
_HASHERS = 8
_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@frozen(eq=False)
class LoadedBase:
    """A model whose base stands in host memory.

    Attributes:
        model: the Transformers model.
        plan: its units.
        store: holds all of them.
    """

    model: nn.Module
    plan: BlockPlan
    store: HostStore


def named_refs(model: nn.Module) -> dict[str, TensorRef]:
    """Return every place of a model's parameters that a codec names, once each, by name."""
    codecs = [codec for codec, _ in plugins().codecs()]
    found: dict[str, TensorRef] = {}
    seen: set[tuple[int, str]] = set()
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            codec = next((c for c in codecs if param is not None and c.claims(param)), None)
            if codec is None or param is None:
                continue
            for ref in codec.refs(module, name, param):
                if ref.key not in seen:
                    seen.add(ref.key)
                    found[f"{_joined(path, name)}:{ref.name}"] = ref
    return found


def named_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every buffer of a model once, persistent or not, by name."""
    found = {
        id(buffer): (_joined(path, name), buffer)
        for path, module in reversed(list(model.named_modules()))
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    return {f"{name}:buffer": buffer for name, buffer in found.values()}


def pack(
    base: LoadedBase,
    *,
    writer: EntryWriter,
    mapped: bool = False,
    advance: Callable[[int], None],
) -> tuple[list[PackedFile], PackedFile | None]:
    """Write a loaded base to the cache, but for the entry's record.

    Args:
        base: a base, all of whose units the store holds, unless it is to be ``mapped``.
        writer: the entry.
        mapped: place the units in the store now, and the layers in the files that are written,
            each before the next is looked at.
        advance: is told the bytes of each file.

    Returns:
        The files of the units, and the one of everything else.

    Raises:
        CacheRefusal: a tensor has a dtype that safetensors does not know.
        OSError: the disk is full, or cannot be written.
    """
    refs = named_refs(base.model)
    names = {ref.key: name for name, ref in refs.items()}
    placed: set[tuple[int, str]] = set()

    def written(unit: Unit, file: str) -> Callable[[], PackedFile]:
        """Return what writes a unit, once it is where it will stay."""
        if mapped and unit.name.startswith(LAYER):
            record = _pack_mapped(unit, file, names, writer, base.store)
            return lambda: record
        image = base.store.adopt(unit.refs)
        assert image is not None
        content, entries = image.buffer.view(), image.entries
        return lambda: _write_unit(unit, file, entries, content, names, writer, hashers)

    cores = os.cpu_count() or 1
    with (
        ThreadPoolExecutor(min(_HASHERS, cores)) as hashers,
        ThreadPoolExecutor(min(_WRITERS, cores)) as pool,
    ):
        writes = []
        try:
            for number, unit in enumerate(_units(base.plan)):
                placed.update(ref.key for ref in unit.refs)
                writes.append(pool.submit(written(unit, f"unit-{number:04}.safetensors")))
            records = []
            for write in writes:
                records.append(write.result())
                advance(records[-1].nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    rest = {name: ref.get() for name, ref in refs.items() if ref.key not in placed}
    return records, _write_rest(writer, {**rest, **named_buffers(base.model)})


def _pack_mapped(
    unit: Unit,
    file: str,
    names: Mapping[tuple[int, str], str],
    writer: EntryWriter,
    store: HostStore,
) -> PackedFile:
    entries, nbytes = layout(unit.refs)
    scratch = HostBuffer(nbytes, device=torch.device("cpu"))
    fill(scratch, entries)
    record = _write_unit(unit, file, entries, scratch.view(), names, writer)
    buffer = MappedBuffer(writer.folder / file, start=record.start, nbytes=nbytes)
    store.place(entries, buffer, staged=True)
    return record


def _write_unit(
    unit: Unit,
    file: str,
    entries: Sequence[TensorEntry],
    content: memoryview,
    names: Mapping[tuple[int, str], str],
    writer: EntryWriter,
    hashers: Executor | None = None,
) -> PackedFile:
    lying = sorted(entries, key=lambda entry: entry.offset)
    pieces = [_piece(names[entry.ref.key], entry) for entry in lying]
    nbytes = len(content)
    return writer.write(file, pieces, [content], unit=unit.name, nbytes=nbytes, hashers=hashers)


def unpack(
    entry: Entry,
    request: LoadRequest,
    skeleton: Callable[[LoadRequest, Mapping[str, Any]], nn.Module],
    *,
    store: HostStore,
    mode: HostMode,
    advance: Callable[[int], None],
) -> LoadedBase:
    """Read a base from the cache. Reading and checking run while the skeleton is made.

    Args:
        entry: the entry, open.
        request: what is loaded.
        skeleton: the strategy's ``skeleton``.
        store: an empty store, which the units go into.
        mode: where layers stand.
        advance: is told the bytes of each file, from several threads.

    Raises:
        DamagedFile: a file is not what was written.
        CheckpointError: the checkpoint does not fit.
        PrepareError: host memory cannot be had or page-locked.
    """
    with (
        ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers,
        ThreadPoolExecutor(makers()) as pool,
    ):

        def begun(record: PackedFile) -> Reading:
            return begin_reading(
                entry,
                record,
                device=request.device,
                mode=mode,
                readers=readers,
                advance=advance,
            )

        largest_first = sorted(entry.units, key=lambda record: -record.nbytes)
        reads = {record.file: pool.submit(begun, record) for record in largest_first}
        try:
            with without_collections():
                model = skeleton(request, entry.described)
                for param in model.parameters():
                    param.requires_grad_(False)
                plan = build_plan(
                    model, family=request.family, codecs=plugins().codecs(), device=request.device
                )
                refs = named_refs(model)
            _bind_units(entry, plan, refs, reads, store)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            readers.shutdown(cancel_futures=True)
            raise
    _bind_rest(entry, model, refs, request.device)
    return LoadedBase(model, plan, store)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _units(plan: BlockPlan) -> list[Unit]:
    return [unit for unit in plan.units() if unit.refs]


def _piece(name: str, entry: TensorEntry) -> Piece:
    return Piece(name, _named(entry.dtype), tuple(entry.shape), entry.offset, entry.nbytes)


def _named(dtype: torch.dtype) -> str:
    name = _NAMES.get(dtype)
    if name is None:
        raise CacheRefusal(f"safetensors has no name for {dtype}; leave cache= out")
    return name


def _write_rest(writer: EntryWriter, tensors: Mapping[str, torch.Tensor]) -> PackedFile | None:
    if not tensors:
        return None
    spans, nbytes = layout_of([tensor.nbytes for tensor in tensors.values()])
    pieces = [
        Piece(name, _named(tensor.dtype), tuple(tensor.shape), offset, tensor.nbytes)
        for (name, tensor), offset in zip(tensors.items(), spans, strict=True)
    ]

    def chunks() -> Iterator[memoryview]:
        for tensor, begin, end in zip(tensors.values(), spans, [*spans[1:], nbytes], strict=True):
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            yield flat.numpy().data
            yield memoryview(bytes(end - begin - tensor.nbytes))

    return writer.write(_REST, pieces, chunks(), unit="rest", nbytes=nbytes)


def _bind_units(
    entry: Entry,
    plan: BlockPlan,
    refs: Mapping[str, TensorRef],
    reads: Mapping[str, Future[Reading]],
    store: HostStore,
) -> None:
    names = {ref.key: name for name, ref in refs.items()}
    units = _units(plan)
    if [unit.name for unit in units] != [record.unit for record in entry.units]:
        raise DamagedFile("it holds other units than the model has")
    for unit, record in zip(units, entry.units, strict=True):
        pieces = {piece.name: piece for piece in record.pieces}
        if sorted(names[ref.key] for ref in unit.refs) != sorted(pieces):
            raise DamagedFile(f"{record.file} holds other tensors than {unit.name} has")
        entries = [_entry(ref, pieces[names[ref.key]]) for ref in unit.refs]
        reading = reads[record.file].result()
        store.place(entries, reading.memory(), staged=reading.staged)


def _entry(ref: TensorRef, piece: Piece) -> TensorEntry:
    return TensorEntry(
        ref,
        piece.offset,
        piece.nbytes,
        _DTYPES[piece.dtype],
        torch.Size(piece.shape),
        torch.device("cpu"),
    )


def _bind_rest(
    entry: Entry, model: nn.Module, refs: Mapping[str, TensorRef], device: torch.device
) -> None:
    placed = {piece.name for record in entry.units for piece in record.pieces}
    buffers = named_buffers(model)
    wanted = {*(name for name in refs if name not in placed), *buffers}
    pieces = () if entry.rest is None else entry.rest.pieces
    if wanted != {piece.name for piece in pieces}:
        raise DamagedFile(f"{_REST} holds other tensors than the model has")
    if entry.rest is None:
        return
    content = bytearray(entry.rest.nbytes)
    entry.read(entry.rest, memoryview(content))
    new: dict[int, torch.Tensor] = {}
    for piece in pieces:
        dtype = _DTYPES[piece.dtype]
        flat = torch.empty(0, dtype=dtype)
        if piece.nbytes:
            count = piece.nbytes // dtype.itemsize
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=piece.offset)
        tensor = flat.view(piece.shape).to(device, copy=True)
        if piece.name in buffers:
            new[id(buffers[piece.name])] = tensor
        else:
            refs[piece.name].set(tensor)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = new[id(buffer)]
