"""Turning deterministic kernels on, and telling whether they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from poros_core.errors import StateError

__all__ = ["deterministic", "is_deterministic"]

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")
"""The two workspace settings under which cuBLAS is reproducible (cuBLAS documentation,
"Results reproducibility")."""


def is_deterministic(device: torch.device) -> bool:
    """Say whether kernels on ``device`` are deterministic as things stand."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return device.type != "cuda" or (
        os.environ.get(CUBLAS_VARIABLE) in CUBLAS_VALUES and not torch.backends.cudnn.benchmark
    )


def _cuda_used() -> bool:
    """Say whether cuBLAS may have read its setting: whether there ever was a tensor on a device.
    That CUDA is initialised does not say so; importing some packages does that."""
    cuda: Any = torch.cuda
    return bool(cuda.is_available() and cuda.is_initialized()) and any(
        cuda.memory_stats(device).get("allocation.all.allocated", 0)
        for device in range(cuda.device_count())
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Run with deterministic kernels, and put back what was found.

    Enter it before the model is loaded: cuBLAS reads its setting when CUDA is first used.

    By default torch fills every new tensor with NaN while kernels are deterministic, a kernel more
    for nearly each that runs. That is off within, since bits do not depend on it unless a kernel
    reads what nobody wrote; set ``torch.utils.deterministic.fill_uninitialized_memory`` there to
    have it back.

    Raises:
        StateError: CUDA has been used already without the setting, so it would have no effect.
    """
    found_variable = os.environ.get(CUBLAS_VARIABLE)
    if found_variable not in CUBLAS_VALUES:
        if _cuda_used():
            raise StateError(
                f"poros.deterministic() was entered after CUDA was first used, and "
                f"{CUBLAS_VARIABLE} is {found_variable or 'not set'}: cuBLAS would not follow it. "
                f"Enter it before the model is loaded, or start the script with "
                f"{CUBLAS_VARIABLE}={CUBLAS_VALUES[0]}."
            )
        os.environ[CUBLAS_VARIABLE] = CUBLAS_VALUES[0]
    found = torch.are_deterministic_algorithms_enabled()
    found_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    found_benchmark = torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic
    found_fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(found, warn_only=found_warn_only)
        torch.backends.cudnn.benchmark = found_benchmark
        memory.fill_uninitialized_memory = found_fill
        if found_variable is None:
            os.environ.pop(CUBLAS_VARIABLE, None)
        else:
            os.environ[CUBLAS_VARIABLE] = found_variable
