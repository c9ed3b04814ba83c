"""The link between host memory and the GPU: what was negotiated, and what it moves."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING, Any

from attrs import frozen

from poros_core.doctor.findings import Finding, good, not_measured, warning
from poros_core.doctor.nvidia_smi import Answer, ask
from poros_core.errors import PrepareError

if TYPE_CHECKING:
    import torch

__all__ = ["Link", "LinkReading", "Rates", "link_findings", "measure_link", "parse_link"]

COPY_BYTES = 256 * 2**20
"""Bytes of one test copy: above 64 MiB the rate no longer grows with the size."""
_COPIES = 10
_SLOW = 0.7
"""Share of the link's nominal rate below which something is wrong; a sound link reaches 0.85."""
_LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes a second of one lane in one direction, by PCIe generation (PCI-SIG)."""
_NUMBER = re.compile(r"[0-9]{1,4}")
_FIELDS = (
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
_NO_GPU = "there is no GPU that torch can use"
_NO_GPU_FIX = "Run poros doctor where torch has a GPU."


@frozen(kw_only=True)
class Link:
    """A PCIe link.

    Attributes:
        generation: what was negotiated.
        max_generation: what card and slot can do.
        width: lanes that were negotiated.
        max_width: lanes that card and slot can do.
    """

    generation: int
    max_generation: int
    width: int
    max_width: int

    @property
    def rate(self) -> float | None:
        """Nominal bytes a second in one direction, or None for a generation not known here."""
        lane = _LANE_RATES.get(self.generation)
        return None if lane is None else lane * self.width


@frozen(kw_only=True)
class Rates:
    """Measured bytes a second between page-locked host memory and the device."""

    to_device: float
    to_host: float


@frozen(kw_only=True)
class LinkReading:
    """What was found out about the link.

    Attributes:
        link: what was negotiated while copies ran; None if that is not known.
        link_reason: why not.
        rates: what was measured; None if it could not be.
        rates_reason: why not.
        locked_bytes: bytes that were page-locked for it; None if none could be.
    """

    link: Link | None = None
    link_reason: str | None = None
    rates: Rates | None = None
    rates_reason: str | None = None
    locked_bytes: int | None = None


def measure_link(device: torch.device, *, uuid: str) -> LinkReading:
    """Copy between page-locked host memory and a CUDA device, and ask for the link meanwhile.

    A link that idles runs at a lower generation to save power, so it is asked for under load.

    Args:
        device: a CUDA device.
        uuid: what ``nvidia-smi`` calls it.
    """
    import torch

    from poros_core.host_store import HostBuffer

    with torch.cuda.device(device):
        free, _ = torch.cuda.mem_get_info()
        if free < 2 * COPY_BYTES:
            reason = f"less than {2 * COPY_BYTES / 1e6:.0f} MB of GPU memory are free"
            return LinkReading(link_reason=reason, rates_reason=reason)
        try:
            host = HostBuffer(COPY_BYTES, device=device)
        except PrepareError as error:
            return LinkReading(link_reason="no load could be made", rates_reason=str(error))
        on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

        def load() -> None:
            on_device.copy_(host.bytes, non_blocking=True)
            torch.cuda.synchronize()

        load()
        link, unknown = parse_link(ask(_FIELDS, gpu=uuid, meanwhile=load))
        rates = Rates(to_device=_rate(on_device, host.bytes), to_host=_rate(host.bytes, on_device))
    return LinkReading(link=link, link_reason=unknown, rates=rates, locked_bytes=COPY_BYTES)


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Return bytes a second of a copy, the median of several."""
    import torch

    cuda: Any = torch.cuda
    seconds: list[float] = []
    for _ in range(_COPIES):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return target.nbytes / statistics.median(seconds)


def parse_link(answer: Answer) -> tuple[Link | None, str | None]:
    """Return the link that ``nvidia-smi`` described, or None and why there is none."""
    if not answer.rows:
        return None, answer.reason
    values = answer.rows[0]
    numbers = [int(value) for value in values if value is not None and _NUMBER.fullmatch(value)]
    if len(numbers) != len(_FIELDS):
        return None, "nvidia-smi does not say (as in a virtual machine)"
    generation, max_generation, width, max_width = numbers
    return (
        Link(
            generation=generation,
            max_generation=max_generation,
            width=width,
            max_width=max_width,
        ),
        None,
    )


def link_findings(reading: LinkReading | None) -> list[Finding]:
    """Judge the link.

    Args:
        reading: what was found out; None if there is no GPU.
    """
    if reading is None:
        return [not_measured(name, _NO_GPU, fix=_NO_GPU_FIX) for name in ("PCIe link", "copy rate")]
    return [_link(reading), _rates(reading)]


def _link(reading: LinkReading) -> Finding:
    link = reading.link
    if link is None:
        return not_measured(
            "PCIe link",
            reading.link_reason or "",
            fix="Go by the copy rate, or ask the host of this machine.",
        )
    text = f"PCIe {link.generation} x{link.width} under load"
    values = {"generation": link.generation, "width": link.width, "nominal_rate": link.rate}
    if (link.generation, link.width) != (link.max_generation, link.max_width):
        return warning(
            "PCIe link",
            f"{text}, of PCIe {link.max_generation} x{link.max_width} that card and slot can do",
            fix="Move the card to a slot with all lanes, without a riser, and set the slot to its "
            "full generation in the firmware's settings.",
            **values,
        )
    return good("PCIe link", text, **values)


def _rates(reading: LinkReading) -> Finding:
    rates, nominal = reading.rates, reading.link.rate if reading.link is not None else None
    if rates is None:
        return not_measured(
            "copy rate",
            reading.rates_reason or "",
            fix="Free memory on the GPU and the host, and raise `ulimit -l`.",
        )
    text = (
        f"{rates.to_device / 1e9:.1f} GB/s to the GPU, {rates.to_host / 1e9:.1f} GB/s back, from "
        "page-locked memory"
    )
    values = {"to_device": rates.to_device, "to_host": rates.to_host}
    if nominal is not None and min(rates.to_device, rates.to_host) < _SLOW * nominal:
        return warning(
            "copy rate",
            f"{text}; the link's nominal rate is {nominal / 1e9:.1f} GB/s",
            fix="Run on the CPUs next to the card (numactl; `nvidia-smi topo -m` names them), and "
            "end what else copies.",
            **values,
        )
    return good("copy rate", text, **values)
