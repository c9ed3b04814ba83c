"""Fixed addresses through which tensors enter and leave captured graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from poros_runtimes.streamed.signature import Layout

__all__ = ["Buffer", "Stretch"]

_ALIGNMENT = 512
"""Bytes between gradients in one stretch, as the CUDA caching allocator aligns."""


class Buffer:
    """A tensor argument's stand-in at a fixed address."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        strides = [s or 1 for s in layout.stride]
        self._base = torch.empty_strided(layout.compact, strides, dtype=layout.dtype, device=device)
        self.tensor = self._base.expand(layout.shape)
        self._source: torch.Tensor | None = None
        self._version = -1

    def fill(self, source: torch.Tensor) -> None:
        """Copy ``source`` in, unless it is what was copied last."""
        if source.is_inference():
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


@frozen(eq=False)
class Stretch:
    """Gradients of parameters side by side, so that one copy takes them all out."""

    flat: torch.Tensor
    pieces: tuple[tuple[int, int, Layout], ...]

    @classmethod
    def of(cls, layouts: Sequence[Layout], device: torch.device) -> Stretch:
        """Return a stretch with room for gradients of these layouts."""
        pieces: list[tuple[int, int, Layout]] = []
        end = 0
        for layout in layouts:
            nbytes = torch.Size(layout.shape).numel() * layout.dtype.itemsize
            pieces.append((end, end + nbytes, layout))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(torch.empty(end, dtype=torch.uint8, device=device), tuple(pieces))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each gradient as a view of ``flat``."""
        return [
            flat[start:end].view(layout.dtype).as_strided(layout.shape, layout.stride)
            for start, end, layout in self.pieces
        ]
