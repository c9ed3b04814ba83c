"""The GPU: what is read of it, and what is made of that."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attrs import frozen

from poros_core.doctor.findings import Finding, good, not_measured, problem, warning
from poros_core.doctor.nvidia_smi import Answer, ask

if TYPE_CHECKING:
    import torch

__all__ = ["Gpu", "absent_finding", "gpu_findings", "read_gpu", "without_torch_finding"]

_NAME = "GPU"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@frozen(kw_only=True)
class Gpu:
    """What torch says of the device that Poros would use.

    Attributes:
        index: its number among the visible ones.
        name: its name.
        uuid: what ``nvidia-smi -i`` calls it.
        capability: its compute capability, major and minor.
        architectures: what torch was compiled for, as ``("sm_80", "compute_90")``.
        total_bytes: its memory.
        free_bytes: what of it is free.
        bf16: whether it computes in bf16 itself, without emulation.
        others: names of the other visible GPUs.
        driver: the driver's version, or None.
        driver_reason: why that is not known, or None.
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    architectures: tuple[str, ...]
    total_bytes: int
    free_bytes: int
    bf16: bool
    others: tuple[str, ...]
    driver: str | None
    driver_reason: str | None


def read_gpu(device: torch.device) -> Gpu:
    """Read what torch and the driver say of a CUDA device."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid)
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    answer = ask(["driver_version"], gpu=uuid)
    with torch.cuda.device(index):
        free, total = torch.cuda.mem_get_info()
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(
        index=index,
        name=properties.name,
        uuid=uuid,
        capability=(properties.major, properties.minor),
        architectures=tuple(torch.cuda.get_arch_list()),
        total_bytes=total,
        free_bytes=free,
        bf16=bf16,
        others=tuple(
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()) if i != index
        ),
        driver=answer.rows[0][0] if answer.rows else None,
        driver_reason=answer.reason,
    )


def without_torch_finding(driver: Answer) -> Finding:
    """Say what is known of the GPU without torch.

    Args:
        driver: names and driver versions of all GPUs, as the driver gives them.
    """
    seen = "; ".join(f"{name}, driver {version}" for name, version in driver.rows)
    what = f"the driver sees {seen}" if seen else driver.reason
    fix = "Install torch, then look again."
    return not_measured(_NAME, f"torch is not installed; {what}", fix=fix)


def absent_finding(*, cuda: str | None, torch_version: str, said: str, driver: Answer) -> Finding:
    """Say why torch has no GPU to use.

    Args:
        cuda: the CUDA version that torch is built with, or None.
        torch_version: torch's version.
        said: what torch said when it was asked to use CUDA.
        driver: names of all GPUs, as the driver gives them.
    """
    names = ", ".join(str(name) for (name,) in driver.rows)
    if not driver.rows:
        build = "without CUDA" if cuda is None else f"with CUDA {cuda}"
        return warning(
            _NAME,
            f"none: {driver.reason}; torch {torch_version} is built {build}. Everything runs on "
            "the CPU, slowly",
            fix="For training, use a machine with an NVIDIA GPU, its driver and a CUDA build of "
            "torch.",
        )
    if cuda is None:
        return problem(
            _NAME,
            f"{names} is there, and torch {torch_version} is built without CUDA",
            fix="Install a CUDA build of torch; pytorch.org lists the command for your driver.",
        )
    hidden = os.environ.get(_VISIBLE)
    if hidden is not None:
        text = f"{names} is there, and {_VISIBLE}='{hidden}' leaves torch none that works: {said}"
        return problem(_NAME, text, fix=f"Unset {_VISIBLE}, or name a GPU that is there.")
    return problem(
        _NAME,
        f"{names} is there, and torch {torch_version} (CUDA {cuda}) cannot use it: {said}",
        fix="Update the NVIDIA driver, or install torch for an older CUDA.",
    )


def gpu_findings(gpu: Gpu) -> list[Finding]:
    """Judge the device, its memory, its bf16, and what else is visible."""
    return [_device(gpu), _memory(gpu), _bf16(gpu), _others(gpu)]


def _device(gpu: Gpu) -> Finding:
    major, minor = gpu.capability
    driver = gpu.driver or f"not measured: {gpu.driver_reason}"
    text = f"{gpu.name} (cuda:{gpu.index}), compute capability {major}.{minor}, driver {driver}"
    values = {"gpu": gpu.name, "capability": f"{major}.{minor}", "driver": gpu.driver}
    if not _compiled_for(gpu):
        return problem(
            _NAME,
            f"{text}; this torch is compiled for {', '.join(gpu.architectures)} only",
            fix=f"Install a build of torch with sm_{major}{minor}.",
            **values,
        )
    return good(_NAME, text, **values)


def _compiled_for(gpu: Gpu) -> bool:
    """Say whether some code in torch runs there: binaries of the same major capability and no
    newer minor one, or intermediate code (``compute_``) of no newer capability."""
    for architecture in gpu.architectures:
        kind, _, digits = architecture.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdecimal():
            continue
        has = (int(digits[:-1]), int(digits[-1]))
        if has <= gpu.capability and (kind == "compute" or has[0] == gpu.capability[0]):
            return True
    return False


def _memory(gpu: Gpu) -> Finding:
    text = f"{gpu.free_bytes / 1e9:.1f} GB of {gpu.total_bytes / 1e9:.1f} GB free"
    values = {"free_bytes": gpu.free_bytes, "total_bytes": gpu.total_bytes}
    if gpu.free_bytes < 0.8 * gpu.total_bytes:
        return warning(
            "GPU memory",
            f"{text}: something else is using the card",
            fix="See `nvidia-smi` for who, and end it if it is yours.",
            **values,
        )
    return good("GPU memory", text, **values)


def _bf16(gpu: Gpu) -> Finding:
    if gpu.bf16:
        return good("bf16", "in hardware", supported=True)
    return warning(
        "bf16",
        "emulated by this card, which is slow",
        fix="Train in fp16: poros.load(..., dtype=torch.float16), and fp16=True in a Trainer. It "
        "is as exact.",
        supported=False,
    )


def _others(gpu: Gpu) -> Finding:
    if not gpu.others:
        return good("other GPUs", "none visible", visible=1)
    return warning(
        "other GPUs",
        f"{len(gpu.others)} more visible ({', '.join(sorted(set(gpu.others)))}); Poros uses one, "
        "and HF Trainer may spread a BF16 model over all that it sees",
        fix=f"Start with {_VISIBLE}={gpu.index}.",
        visible=1 + len(gpu.others),
    )
