"""The memory that cuBLAS works in, which the allocator counts as anybody's."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["drop_workspaces"]


def drop_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps, one a thread and stream, until it needs them again.

    A CUDA graph goes on using the address that it was captured with. torch has no public way to do
    this; its own graph trees do it so. Needs a CUDA build of torch.
    """
    bindings: Any = torch._C
    bindings._cuda_clearCublasWorkspaces()
