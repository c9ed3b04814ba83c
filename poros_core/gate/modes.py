"""Modes of a gate: which kernels may run, in what precision, compiled or not.

A mode holds for every arm alike, so that what is compared is streaming and nothing else. Whether
two *resident* runs are equal in a mode is what the control finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from poros_core.errors import GateError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from poros_core.family import Family

__all__ = ["ATTENTION", "AUTOCAST", "Modes", "applied", "autocast", "compile_layers"]

ATTENTION = ("auto", "math", "flash", "efficient", "cudnn")
"""Kernels of scaled-dot-product attention; ``auto`` leaves the choice to torch."""

AUTOCAST = ("off", "bf16")

_VARIANTS = 64
"""Compiled variants of a decoder layer at most: by layer type, batch width, and what trains."""


def _one_of(*allowed: str) -> Any:
    def check(instance: Any, attribute: Any, value: str) -> None:
        if value not in allowed:
            flag = attribute.name.replace("_", "-")
            raise GateError(f"--{flag} must be one of {', '.join(allowed)}; got '{value}'.")

    return check


@frozen(kw_only=True)
class Modes:
    """How every arm computes.

    Attributes:
        deterministic: whether only kernels run that give the same bits each time.
        attention: the only attention kernel that is allowed, or ``"auto"``.
        tf32: whether float32 products on CUDA may run in TF32.
        autocast: around each forward, the backward outside of it.
        compile: whether every decoder layer is compiled. Then forwards run without a cache, which
            would have each layer compiled anew for its number.
    """

    deterministic: bool = True
    attention: str = field(default="auto", validator=_one_of(*ATTENTION))
    tf32: bool = False
    autocast: Literal["off", "bf16"] = field(default="off", validator=_one_of(*AUTOCAST))
    compile: bool = False


@contextmanager
def applied(modes: Modes) -> Iterator[None]:
    """Compute in these modes within, and put back what was found.

    Raises:
        StateError: CUDA was used before kernels could be made deterministic.
    """
    with ExitStack() as stack:
        stack.enter_context(_determinism(modes.deterministic))
        stack.enter_context(_attention(modes.attention))
        if modes.tf32:
            stack.enter_context(_tf32())
        if modes.compile:
            stack.enter_context(_compiler())
        yield


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    import torch

    from poros_core.determinism import deterministic

    if wanted:
        with deterministic():
            yield
        return
    found = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(found, warn_only=warn_only)


@contextmanager
def _attention(kernel: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if kernel == "auto":
        yield
        return
    backend = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[kernel]
    with sdpa_kernel(backend):
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
                raise
            raise GateError(
                f"--attention {kernel}: torch has no such kernel for this model and these inputs "
                f"here ({str(error).splitlines()[0]}). Flash and cuDNN take no padding mask (use "
                "--batch 1), cuDNN is not deterministic (use --no-deterministic), and all but "
                "math and flash need CUDA."
            ) from error


@contextmanager
def _tf32() -> Iterator[None]:
    import torch

    matmul: Any = torch.backends.cuda.matmul
    found = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = found


@contextmanager
def _compiler() -> Iterator[None]:
    """Let all layers of all arms be compiled: past its limit, torch would go on uncompiled."""
    import torch._dynamo
    from torch._dynamo.exc import TorchDynamoException

    config: Any = torch._dynamo.config
    torch._dynamo.reset()
    with config.patch(recompile_limit=_VARIANTS, fail_on_recompile_limit_hit=True):
        try:
            yield
        except TorchDynamoException as error:
            raise GateError(
                f"--compile: torch cannot compile this model's layers here: "
                f"{str(error).strip().splitlines()[0]} Install what it misses (on a CPU a C++ "
                "compiler), or leave --compile out."
            ) from error


def autocast(modes: Modes, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that each forward runs in."""
    import torch

    enabled = modes.autocast == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def compile_layers(model: nn.Module, family: Family) -> None:
    """Compile the forward of every decoder layer in place, before it is prepared.

    Every arm computes what the compiler made of one layer, which is the region that streams. A
    whole model that is compiled as one could not be compared: a prepared model's decoder is left
    out of it.
    """
    import torch

    compiler: Any = torch.compile
    for layer in family.layers(family.decoder(model)):
        layer.__dict__["forward"] = compiler(layer.forward)
