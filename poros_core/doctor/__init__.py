"""What stands in the way of training with Poros on this machine, and what to do about it.

Works without a GPU and without torch: what cannot be looked at is reported as not measured, with
the reason.
"""

from __future__ import annotations

from typing import Any

from poros_core import machine
from poros_core.doctor.findings import Finding, Level, worst
from poros_core.doctor.gpu import absent_finding, gpu_findings, read_gpu, without_torch_finding
from poros_core.doctor.host import host_findings, page_lock_finding
from poros_core.doctor.link import LinkReading, link_findings, measure_link
from poros_core.doctor.nvidia_smi import ask
from poros_core.doctor.software import (
    bitsandbytes_finding,
    bitsandbytes_libraries,
    package_findings,
    plugin_findings,
)
from poros_core.errors import PorosError

__all__ = ["Finding", "Level", "copy_rate", "examine", "worst"]


def examine() -> list[Finding]:
    """Look at everything, and return one finding for each, in the order in which it is read."""
    device, reading = _device_findings()
    return [
        *host_findings(),
        *package_findings(),
        *device,
        *link_findings(reading),
        page_lock_finding(
            machine.page_lock_limit(),
            locked=None if reading is None else reading.locked_bytes,
            refused=None if reading is None or reading.locked_bytes else reading.rates_reason,
        ),
        *plugin_findings(),
    ]


def copy_rate() -> float:
    """Measure the bytes a second that go from page-locked host memory to the GPU.

    Raises:
        PorosError: there is no GPU, or nothing could be measured.
    """
    findings, reading = _device_findings()
    if reading is None:
        raise PorosError(f"The copy rate cannot be measured here: {findings[0].text}.")
    if reading.rates is None:
        raise PorosError(f"The copy rate could not be measured: {reading.rates_reason}.")
    return reading.rates.to_device


def _device_findings() -> tuple[list[Finding], LinkReading | None]:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return [without_torch_finding(ask(["name", "driver_version"]))], None
    cuda: Any = torch.cuda
    if not cuda.is_available():
        return [_absent(torch)], None
    device = torch.device("cuda", cuda.current_device())
    gpu = read_gpu(device)
    found = gpu_findings(gpu)
    version = torch.version.cuda
    libraries = bitsandbytes_libraries()
    if version is not None and libraries:
        mismatch = bitsandbytes_finding(version, libraries)
        found += [] if mismatch is None else [mismatch]
    return found, measure_link(device, uuid=gpu.uuid)


def _absent(torch: Any) -> Finding:
    try:
        torch.cuda.init()
        said = "no reason is given"
    except (AssertionError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
    return absent_finding(
        cuda=torch.version.cuda,
        torch_version=torch.__version__,
        said=said,
        driver=ask(["name"]),
    )
