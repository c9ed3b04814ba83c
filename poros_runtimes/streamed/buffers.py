"""Fixed addresses through which tensors enter and leave captured graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from attrs import frozen

from poros_runtimes.streamed.capture import Capturer
from poros_runtimes.streamed.signature import Layout, distinct

__all__ = ["Buffer", "Pages", "SharedBuffers", "Stretch", "copied", "largest_call", "span_of"]

_ALIGNMENT = 512
"""Bytes between gradients in one stretch, as the CUDA caching allocator aligns."""


def span_of(layout: Layout) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((n - 1) * (s or 1) for n, s in zip(layout.compact, layout.stride, strict=True))
    return (last + 1) * layout.dtype.itemsize if all(layout.compact) else 0


def largest_call(
    calls: Iterable[tuple[Sequence[Layout], Sequence[Layout], Sequence[object]]],
) -> tuple[int, int]:
    """Return the most bytes that buffers of one shape take, blocks of that shape together.

    Args:
        calls: of each call what enters and what leaves, and its arguments.

    Returns:
        The bytes of arguments, and of what enters and leaves with the gradients of both.
    """
    shapes: dict[Layout, tuple[set[object], set[object]]] = {}
    for inputs, outputs, arguments in calls:
        lasting, passing = shapes.setdefault(inputs[0], (set(), set()))
        lasting.update(enumerate(arguments))
        passing.update(enumerate(inputs))
        passing.update(enumerate(outputs, start=len(inputs)))

    def nbytes(found: set[Any]) -> int:
        return sum(span_of(layout) for _, layout in found if isinstance(layout, Layout))

    both = [(nbytes(lasting), 2 * nbytes(passing)) for lasting, passing in shapes.values()]
    return max((size for size, _ in both), default=0), max((size for _, size in both), default=0)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of its own, with the same strides: kernels choose by them."""
    source = tensor.detach()
    for dim, stride in enumerate(source.stride()):
        if stride == 0 and source.shape[dim]:
            source = source.narrow(dim, 0, 1)
    if not distinct(source):
        return tensor.clone()
    copy = torch.empty_strided(
        source.shape, source.stride(), dtype=source.dtype, device=source.device
    )
    return copy.copy_(source).expand(tensor.shape)


_ON_A_PAGE = 8


class Buffer:
    """A tensor argument's stand-in at a fixed address."""

    def __init__(
        self, layout: Layout, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """Make a buffer.

        Args:
            layout: what it stands in for.
            device: the compute device.
            memory: ``span_of(layout)`` bytes for it, flat uint8; None allocates.
        """
        self.layout = layout
        strides = [s or 1 for s in layout.stride]
        self._base = (
            torch.empty_strided(layout.compact, strides, dtype=layout.dtype, device=device)
            if memory is None
            else memory.view(layout.dtype).as_strided(layout.compact, strides)
        )
        self.tensor = self._base.expand(layout.shape)
        self._part = span_of(layout) > self._base.numel() * layout.dtype.itemsize
        self._source: torch.Tensor | None = None
        self._version = -1

    def fill(self, source: torch.Tensor) -> None:
        """Copy ``source`` in, unless it is what was copied last. A part of something larger, which
        gaps tell, is not kept for that."""
        if self._part or source.is_inference():
            self._source = None
            self.fill_always(source)
            return
        if source is self._source and source._version == self._version:
            return
        self.fill_always(source)
        self._source, self._version = source, source._version

    def fill_always(self, source: torch.Tensor) -> None:
        """Copy ``source`` in and do not keep it."""
        for dim, stride in enumerate(self.layout.stride):
            if stride == 0:
                source = source.narrow(dim, 0, 1)
        self._base.copy_(source)


class Pages:
    """Memory for what blocks hand out, several to an allocation.

    A boundary is of a size of which the caching allocator fits two or three into one of its own
    segments and leaves the rest empty. A page holds ``_ON_A_PAGE``, and goes when the last does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page: torch.Tensor | None = None
        self._used = 0

    def copy_of(self, buffer: Buffer) -> torch.Tensor:
        """Return a copy of what is in ``buffer``, of the same layout."""
        source, layout = buffer.tensor, buffer.layout
        if layout.compact != layout.shape:
            return source.clone()
        nbytes = -(-span_of(layout) // _ALIGNMENT) * _ALIGNMENT
        page = self._page
        if page is None or self._used + nbytes > page.nbytes:
            page = torch.empty(_ON_A_PAGE * nbytes, dtype=torch.uint8, device=self._device)
            self._page, self._used = page, 0
        start, self._used = self._used // layout.dtype.itemsize, self._used + nbytes
        # Not a view of the page: parts must not share a version, and may be changed in place.
        part = torch.empty(0, dtype=layout.dtype, device=self._device)
        part.set_(page.untyped_storage(), start, layout.shape, layout.stride)
        return part.copy_(source)

    def close(self) -> None:
        """Keep no page: those that are in use live on."""
        self._page = None


@frozen(eq=False)
class Stretch:
    """Gradients of parameters side by side, so that one copy takes them all out."""

    flat: torch.Tensor
    pieces: tuple[tuple[int, int, Layout], ...]

    @classmethod
    def of(cls, layouts: Sequence[Layout], allocate: Callable[[int], torch.Tensor]) -> Stretch:
        """Return a stretch with room for gradients of these layouts.

        Args:
            layouts: of the gradients.
            allocate: given a number of bytes, returns a flat uint8 tensor of as many or more.
        """
        pieces: list[tuple[int, int, Layout]] = []
        end = 0
        for layout in layouts:
            nbytes = torch.Size(layout.shape).numel() * layout.dtype.itemsize
            pieces.append((end, end + nbytes, layout))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(allocate(end)[:end], tuple(pieces))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each gradient as a view of ``flat``."""
        return [
            flat[start:end].view(layout.dtype).as_strided(layout.shape, layout.stride)
            for start, end, layout in self.pieces
        ]


class SharedBuffers:
    """The buffers of all graphs, each shared by the blocks of one shape, for as long as a graph
    uses it; see [Note: Graphs and memory]."""

    def __init__(self, device: torch.device, capturer: Capturer) -> None:
        self._device = device
        self._capturer = capturer
        self._buffers: weakref.WeakValueDictionary[tuple[str, int, Layout], Buffer] = (
            weakref.WeakValueDictionary()
        )
        self._stretches: weakref.WeakValueDictionary[tuple[Layout, ...], Stretch] = (
            weakref.WeakValueDictionary()
        )

    def buffer(self, role: str, index: int, layout: Layout | None) -> Buffer:
        """Return the buffer of a tensor, made if it is not there.

        Args:
            role: ``"input"``, ``"argument"``, ``"result"``, ``"gradient"`` or ``"passed on"``.
            index: the tensor's place among those of its role.
            layout: the tensor's.
        """
        assert layout is not None
        layout = attrs.evolve(layout, wanted=False)
        key = (role, index, layout)
        buffer = self._buffers.get(key)
        if buffer is None:
            # An argument's buffer is not filled again while the argument is the same.
            lasting = role == "argument"
            memory = None if lasting else self._capturer.reserve(span_of(layout))
            buffer = self._buffers[key] = Buffer(layout, self._device, memory)
        return buffer

    def stretch(self, layouts: tuple[Layout, ...]) -> Stretch | None:
        """Return the stretch for parameters' gradients of these layouts; None if there are none."""
        if not layouts:
            return None
        stretch = self._stretches.get(layouts)
        if stretch is None:
            stretch = self._stretches[layouts] = Stretch.of(layouts, self._allocate)
        return stretch

    def clear(self) -> None:
        """Share none of them any more: graphs to come get buffers of their own."""
        self._buffers.clear()
        self._stretches.clear()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        memory = self._capturer.reserve(nbytes)
        if memory is not None:
            return memory
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
