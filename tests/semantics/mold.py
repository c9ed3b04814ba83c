"""Copies of a model in a fraction of the time that ``copy.deepcopy`` takes."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from typing import Any

import torch
from torch import nn


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        self.numbers: dict[int, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):  # a quantised weight, in parts
            return copyreg.__newobj__, (type(obj),), obj.__getstate__()
        return NotImplemented

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor) or hasattr(obj, "quant_state"):
            return None
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self.numbers[id(obj)]


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.copies: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: int) -> torch.Tensor:
        if pid not in self.copies:
            tensor = self.tensors[pid]
            plain = type(tensor) is torch.Tensor and not tensor.requires_grad
            self.copies[pid] = tensor.clone() if plain else copy.deepcopy(tensor)
        return self.copies[pid]


class Mold:
    """A model as it is now: its modules pickled once, and its tensors, which each cast copies.

    What one object was in the model, a tied weight for one, is one object in a cast.
    """

    def __init__(self, model: nn.Module) -> None:
        file = io.BytesIO()
        found: list[torch.Tensor] = []
        _Writer(file, found).dump(model)
        self._modules = file.getvalue()
        self._tensors = [copy.deepcopy(tensor) for tensor in found]

    def cast(self) -> Any:
        """Return a model that shares nothing with another one."""
        return _Reader(io.BytesIO(self._modules), self._tensors).load()
