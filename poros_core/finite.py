"""Finding weights that are not finite, without waiting for the device after each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from poros_core.errors import CheckpointError
from poros_core.host_store import UnitImage
from poros_core.protocols import TensorRef

__all__ = ["BaseCheck", "Bounds", "FiniteCheck", "bounds_of"]

Bounds = tuple[torch.Tensor, torch.Tensor]
"""The smallest and largest element of a tensor, where it stands."""

_FEW = 5
_CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def bounds_of(tensor: torch.Tensor) -> Bounds | None:
    """Look at a tensor, where it stands; None if it holds no floating-point numbers."""
    if tensor.dtype not in _CHECKED or not tensor.numel():
        return None
    low, high = torch.aminmax(tensor.detach())
    return low, high


class FiniteCheck:
    """Collects the smallest and largest element of tensors; looks at them once, at the end.

    Either is NaN if any element is, so two numbers say whether all are finite.
    """

    def __init__(self) -> None:
        self._found: dict[str, Bounds] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Look at a tensor, where it stands. What holds no floating-point numbers is passed by."""
        self.note(name, bounds_of(tensor))

    def note(self, name: str, bounds: Bounds | None) -> None:
        """Note what ``bounds_of`` returned."""
        if bounds is not None:
            self._found[name] = bounds

    def problems(self) -> dict[str, str]:
        """Return ``"NaN"`` or ``"infinite"`` for every tensor that is not finite, by name."""
        wrong = {}
        for name, (low, high) in zip(self._found, self._numbers(), strict=True):
            if low != low or high != high:
                wrong[name] = "NaN"
            elif float("inf") in (high, -low):
                wrong[name] = "infinite"
        return wrong

    def _numbers(self) -> Iterator[tuple[float, float]]:
        """Yield the bounds of every tensor, brought from each device in one go."""
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for low, high in self._found.values():
            alike.setdefault((low.device, low.dtype), []).extend((low, high))
        brought = {kind: iter(torch.stack(bounds).tolist()) for kind, bounds in alike.items()}
        for low, _ in self._found.values():
            numbers = brought[low.device, low.dtype]
            yield next(numbers), next(numbers)

    def refuse(self, path: Path) -> None:
        """Insist that all are finite.

        Args:
            path: the checkpoint that they are of.

        Raises:
            CheckpointError: one is not; the message names them.
        """
        problems = self.problems()
        if not problems:
            return
        shown = ", ".join(f"{name} ({what})" for name, what in list(problems.items())[:_FEW])
        more = f" and {len(problems) - _FEW} more" if len(problems) > _FEW else ""
        raise CheckpointError(
            f"Checkpoint '{path}' has {len(problems)} weights with elements that are NaN or "
            f"infinite: {shown}{more}. Nothing can be trained on them: download the checkpoint "
            "again, or take the one before the run that wrote it diverged."
        )


class BaseCheck:
    """Finds weights of a loaded base that are not finite, unit by unit as they are placed. Packed
    elements are no numbers; their scales are."""

    def __init__(self, model: nn.Module, refs: Mapping[str, TensorRef]) -> None:
        """Note what is to be looked at.

        Args:
            model: the model.
            refs: every place of its parameters, by name; see ``packing.named_refs``.
        """
        plain = {(id(p), "data") for p in model.parameters() if type(p) is nn.Parameter}
        self._finite = FiniteCheck()
        self._left = {
            ref.key: (name.removesuffix(":data").replace(":", "."), ref)
            for name, ref in refs.items()
            if ref.key in plain or ref.name != "data"
        }

    def look(self, image: UnitImage) -> None:
        """Look at a unit that stands in host memory."""
        for ref, tensor in image.true_tensors():
            if ref.key in self._left:
                self._finite.add(self._left.pop(ref.key)[0], tensor)

    def refuse(self, path: Path) -> None:
        """Look at the rest, and insist that all are finite; see ``FiniteCheck.refuse``."""
        for title, ref in self._left.values():
            self._finite.add(title, ref.get())
        self._finite.refuse(path)
