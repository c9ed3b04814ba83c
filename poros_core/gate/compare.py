"""Comparing two arms bit for bit, surface by surface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import define, field, frozen

__all__ = ["SURFACES", "Comparison", "Divergence", "StepView"]

SURFACES = ("loss", "grad_norms", "optimizer_state", "adapter_weights")
"""In the order in which a step produces them, so that the first that differs is the cause."""

_TOGETHER = 64 << 20
"""Bytes that are compared at once."""


@frozen(kw_only=True)
class Divergence:
    """Where two arms first differ.

    Attributes:
        step: from 1; 0 is before the first step.
        surface: the surface.
        tensor: which tensor of it.
        differing: how many of its elements differ.
        elements: how many it has.
        max_abs_difference: the largest difference.
    """

    step: int
    surface: str
    tensor: str
    differing: int
    elements: int
    max_abs_difference: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.surface}, {self.tensor}: {self.differing} of "
            f"{self.elements} elements differ, by {self.max_abs_difference:.2e} at most"
        )


@frozen(eq=False)
class StepView:
    """What one arm shows after a step: by surface, by name, every tensor that is compared."""

    surfaces: Mapping[str, Mapping[str, torch.Tensor]]


@define
class Comparison:
    """What comparing two arms has found so far.

    Attributes:
        steps: how many steps were compared.
        divergences: per surface, the first divergence.
    """

    steps: int = 0
    divergences: dict[str, Divergence] = field(factory=dict)

    @property
    def exact(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.steps > 0 and not self.divergences

    @property
    def first(self) -> Divergence | None:
        """The divergence that came first, by step and then in the order of ``SURFACES``."""
        found = [self.divergences[name] for name in SURFACES if name in self.divergences]
        return min(found, key=lambda divergence: divergence.step, default=None)

    def compare(self, reference: StepView, other: StepView, *, step: int) -> bool:
        """Compare one step; say whether all surfaces are equal."""
        self.steps = step
        for surface in SURFACES:
            found = next(_differences(reference, other, surface=surface, step=step), None)
            if found is not None:
                self.divergences.setdefault(surface, found)
        return not self.divergences


def _differences(
    reference: StepView, other: StepView, *, surface: str, step: int
) -> Iterator[Divergence]:
    left = reference.surfaces.get(surface, {})
    right = other.surfaces.get(surface, {})
    if _all_equal(left, right):
        return
    for name in [*left, *(name for name in right if name not in left)]:
        a, b = left.get(name), right.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            size = max(t.numel() for t in (a, b) if t is not None)
            yield _divergence(step, surface, name, differing=size, elements=size)
        elif not torch.equal(_bits(a), _bits(b)):
            yield _divergence(
                step,
                surface,
                name,
                differing=int((_bits(a) != _bits(b)).sum()),
                elements=a.numel(),
                difference=float((a.detach().double() - b.detach().double()).abs().max()),
            )


def _all_equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Say whether all bits are equal. Tensors are laid end to end and compared together: one by
    one, launching the kernels would take longer than a step of a small model."""
    if left.keys() != right.keys():
        return False
    pairs = [(a, right[name]) for name, a in left.items()]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in pairs:
        kinds.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    parts = (part for kind in kinds.values() for part in _parts(kind))
    return all(torch.equal(*_end_to_end(part)) for part in parts)


def _parts(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Divide pairs, so that copies of one part take little memory."""
    part: list[tuple[torch.Tensor, torch.Tensor]] = []
    nbytes = 0
    for pair in pairs:
        if part and nbytes + pair[0].nbytes > _TOGETHER:
            yield part
            part, nbytes = [], 0
        part.append(pair)
        nbytes += pair[0].nbytes
    if part:
        yield part


def _end_to_end(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(pairs) == 1:  # nothing to copy
        return _bits(pairs[0][0]), _bits(pairs[0][1])
    left, right = (
        torch.cat([_bits(t).reshape(-1) for t in side]) for side in zip(*pairs, strict=True)
    )
    return left, right


def _divergence(
    step: int,
    surface: str,
    tensor: str,
    *,
    differing: int,
    elements: int,
    difference: float = float("inf"),
) -> Divergence:
    return Divergence(
        step=step,
        surface=surface,
        tensor=tensor,
        differing=differing,
        elements=elements,
        max_abs_difference=difference,
    )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits: equal NaNs are equal, and 0.0 differs from -0.0."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
