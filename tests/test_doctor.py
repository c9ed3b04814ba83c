"""The doctor: what it makes of what it reads, and what it says where there is nothing to read."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console
from test_base_install import command
from test_cli import Cli, cli

import poros.cli.doctor
import poros.cli.output
from poros_core import doctor, machine
from poros_core.catalog import FamilyInfo
from poros_core.doctor import Finding, Level, copy_rate, examine, link, nvidia_smi, worst
from poros_core.doctor.findings import good, not_measured, problem
from poros_core.doctor.gpu import Gpu, absent_finding, gpu_findings, read_gpu, without_torch_finding
from poros_core.doctor.host import (
    disk_finding,
    host_findings,
    memory_finding,
    page_lock_finding,
    python_finding,
    system_finding,
)
from poros_core.doctor.link import Link, LinkReading, Rates, link_findings, measure_link, parse_link
from poros_core.doctor.nvidia_smi import Answer, ask
from poros_core.doctor.software import (
    bitsandbytes_finding,
    bitsandbytes_libraries,
    conflicts,
    package_findings,
    plugin_findings,
    record_finding,
)
from poros_core.errors import PorosError
from poros_core.plugins import plugins
from poros_core.status import Stack

__all__ = ["cli"]

H200 = Gpu(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-0",
    capability=(9, 0),
    architectures=("sm_80", "sm_90", "sm_100", "sm_120"),
    total_bytes=150_000_000_000,
    free_bytes=149_000_000_000,
    bf16=True,
    others=(),
    driver="580.159.04",
    driver_reason=None,
)
LINK = Link(generation=5, max_generation=5, width=16, max_width=16)
RATES = Rates(to_device=55.4e9, to_host=55.3e9)
READING = LinkReading(link=LINK, rates=RATES, locked_bytes=2**28)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.level.value for finding in findings}


# findings


def test_a_finding_has_a_fix_exactly_if_something_is_wrong() -> None:
    with pytest.raises(AssertionError):
        Finding(name="x", level=Level.WARNING, text="wrong")
    with pytest.raises(AssertionError):
        Finding(name="x", level=Level.OK, text="right", fix="do this")


def test_the_worst_level_is_the_verdict() -> None:
    fine, unknown = good("a", "fine"), not_measured("b", "no GPU", fix="get one")
    assert worst([]) is Level.OK
    assert worst([fine, unknown]) is Level.WARNING
    assert worst([problem("c", "broken", fix="mend it"), unknown]) is Level.PROBLEM
    assert not unknown.measured


# host


@pytest.mark.parametrize(
    ("available", "headroom", "level", "said"),
    [
        (60e9, None, "ok", "60.0 GB of 64.0 GB free: an NF4 base of up to 107 billion"),
        (60e9, 20e9, "ok", "20.0 GB of 64.0 GB free under the container's limit"),
        (3e9, 20e9, "warning", "3.0 GB of 64.0 GB free: an NF4"),
    ],
)
def test_memory(available: float, headroom: float | None, level: str, said: str) -> None:
    limit = None if headroom is None else int(headroom)
    finding = memory_finding(int(available), int(64e9), limit)
    assert finding.level == level
    assert said in finding.text


def test_memory_that_cannot_be_read_is_not_taken_for_good() -> None:
    finding = memory_finding(None, None, None)
    assert (finding.level, finding.measured) == (Level.WARNING, False)


def test_page_lock_limit() -> None:
    assert page_lock_finding(None, locked=2**28, refused=None).level is Level.OK
    beyond = page_lock_finding(2**23, locked=2**28, refused=None)
    assert beyond.level is Level.OK
    assert "not bound by" in beyond.text
    unknown = page_lock_finding(2**23, locked=None, refused=None)
    assert (unknown.level, "8.4 MB" in unknown.text) == (Level.WARNING, True)
    refused = page_lock_finding(2**23, locked=None, refused="CUDA error 2")
    assert "CUDA error 2" in refused.text
    assert "ulimit -l unlimited" in (refused.fix or "")


def test_python_and_system() -> None:
    assert python_finding((3, 11), "3.11.7").level is Level.OK
    assert python_finding((3, 10), "3.10.1").level is Level.WARNING
    assert system_finding("Linux", "6.1").level is Level.OK
    assert system_finding("Darwin", "24").level is Level.WARNING
    assert "WSL" in system_finding("Linux", "5.15-microsoft-standard-WSL2").text


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_be_made = tmp_path / "not" / "yet"
    monkeypatch.setattr(machine, "free_disk", lambda path: int(100e9))
    assert disk_finding(to_be_made).level is Level.OK
    assert "up to 50 billion" in disk_finding(to_be_made).text
    monkeypatch.setattr(machine, "free_disk", lambda path: int(1e9))
    assert disk_finding(to_be_made).level is Level.WARNING


def test_the_machine_is_read() -> None:
    available, total = machine.available_memory(), machine.total_memory()
    assert available is not None
    assert total is not None
    assert 0 < available < total
    assert (machine.free_disk(Path("/no/such/folder")) or 0) > 0


def test_a_containers_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(machine, "_CGROUPS", ((tmp_path, *names),))
    assert machine.container_headroom() is None
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.container_headroom() is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert machine.container_headroom() == 400
    (tmp_path / "memory.stat").write_text("active_file 5\ninactive_file 100\n")
    assert machine.container_headroom() == 500


# software

OURS = [
    "rich",
    'torch>=2.10; extra == "ml"',
    'transformers<6,>=5.17; extra == "ml"',
    'trl; extra == "train"',
]
THEIRS = {
    "poros-train": OURS,
    "transformers": ["huggingface-hub<3", 'flax; extra == "flax"', 'x; python_version < "3"'],
}
FITTING = {
    **{"poros-train": "0.1.0", "rich": "15", "torch": "2.11.0+cu130", "transformers": "5.17.0"},
    **{"huggingface-hub": "2.0", "trl": "1.0"},
}


def packages(**versions: str | None) -> list[Finding]:
    present = {**FITTING, **{name.replace("_", "-"): v for name, v in versions.items()}}
    return package_findings(version=present.get, requires=lambda name: THEIRS.get(name, []))


def test_packages_that_fit() -> None:
    (finding,) = packages()
    assert finding == good("packages", "torch 2.11.0+cu130, transformers 5.17.0, trl 1.0")


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torch": "2.9.1"}, "poros-train wants torch>=2.10, and 2.9.1 is there"),
        ({"transformers": "6.0.0"}, "poros-train wants transformers<6,>=5.17, and 6.0.0"),
        ({"huggingface_hub": "3.1"}, "transformers wants huggingface-hub<3, and 3.1 is there"),
        ({"huggingface_hub": None}, "transformers needs huggingface-hub, which is not installed"),
    ],
)
def test_packages_that_do_not_fit(versions: dict[str, str | None], said: str) -> None:
    first, second = packages(**versions)
    assert first.level is Level.OK
    assert second.level is Level.PROBLEM
    assert said in second.text
    assert "constraints.txt" in (second.fix or "")


def test_a_base_install_is_told_what_works() -> None:
    (finding,) = packages(torch=None, transformers=None, trl=None)
    assert finding.level is Level.WARNING
    assert finding.text.startswith("not installed: torch, transformers.")
    assert "poros-train[ml]" in (finding.fix or "")


def test_this_environment_fits() -> None:
    found = package_findings()
    assert [finding.level for finding in found] == [Level.OK]
    wanted = [Requirement(text) for text in importlib.metadata.requires("poros-train") or []]
    for name in ("torch", "transformers", "bitsandbytes"):
        assert f"{name} {importlib.metadata.version(name)}" in found[0].text
        assert any(r.name == name and r.specifier for r in wanted)
    assert conflicts(["peft"], version=lambda name: "0.0.1")


def test_bitsandbytes_must_have_the_cuda_of_torch() -> None:
    assert bitsandbytes_finding("13.0", ["12.8", "13.2"]) is None
    mismatch = bitsandbytes_finding("14.0", ["12.8", "13.0"])
    assert mismatch is not None
    assert mismatch.level is Level.PROBLEM
    assert "it has 12.8, 13.0" in mismatch.text
    assert {"12.8", "13.0"} <= set(bitsandbytes_libraries())


STACK = Stack(
    gpu="NVIDIA H200", capability="9.0", torch="2.11", transformers="5.17", bitsandbytes="0.50"
)


def info(status: str, *, records: tuple[Any, ...] = ()) -> FamilyInfo:
    return FamilyInfo(
        name="qwen2",
        title="Qwen2.5",
        model_types=("qwen2",),
        status=status,  # type: ignore[arg-type]
        detail="its detail",
        records=records,
        plugin="p",
        distribution=None,
        version=None,
    )


def test_gate_records() -> None:
    covered = record_finding([info("validated"), info("experimental")], running=STACK)
    assert covered == good("gate records", "cover this stack for Qwen2.5 (its detail)")
    bare = record_finding([info("experimental", records=(1,))], running=STACK)
    assert bare.level is Level.WARNING
    assert "Qwen2.5 is its detail" in bare.text
    assert "--shape 0.5b" in (bare.fix or "")
    cpu = record_finding([info("experimental")], running=attrs.evolve(STACK, gpu=None))
    assert "--shape tiny" in (cpu.fix or "")
    unknown = record_finding([info("validated")], running=None)
    assert "not known without torch" in unknown.text


def test_plugins_that_cannot_be_resolved_are_a_problem(plugin_site: Any) -> None:
    assert levels(plugin_findings())["plugins"] == "ok"
    source = "from poros_core.hookspecs import hookimpl\n"
    source += "@hookimpl\ndef poros_families():\n    return 3\n"
    plugin_site.install("odd", plugin="odd", module="odd_plugin", source=source)
    plugins.cache_clear()
    (finding,) = plugin_findings()
    assert finding.level is Level.PROBLEM
    assert "'odd'" in finding.text


# GPU


def judged(**changes: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in gpu_findings(attrs.evolve(H200, **changes))}


def test_a_sound_gpu() -> None:
    found = judged()
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert found["GPU"].text == ("NVIDIA H200 (cuda:0), compute capability 9.0, driver 580.159.04")
    assert found["bf16"].text == "in hardware"


def test_an_old_card_trains_in_fp16() -> None:
    finding = judged(bf16=False)["bf16"]
    assert finding.level is Level.WARNING
    assert "torch.float16" in (finding.fix or "")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ("sm_80", "sm_90"), True),
        ((7, 0), ("sm_75", "sm_80"), False),
        ((12, 1), ("sm_90", "compute_90"), True),
        ((12, 0), ("sm_80", "sm_90"), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100",), True),
    ],
)
def test_torch_must_be_compiled_for_the_card(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    finding = judged(capability=capability, architectures=architectures)["GPU"]
    assert (finding.level is Level.OK) is runs


def test_others_on_the_card_and_beside_it() -> None:
    found = judged(free_bytes=10_000_000_000, others=("NVIDIA H200", "NVIDIA L4"), index=1)
    assert found["GPU memory"].level is Level.WARNING
    assert "2 more visible" in found["other GPUs"].text
    assert "CUDA_VISIBLE_DEVICES=1" in (found["other GPUs"].fix or "")


def test_a_driver_that_cannot_be_asked() -> None:
    finding = judged(driver=None, driver_reason="nvidia-smi is not installed here")["GPU"]
    assert finding.text.endswith("driver not measured: nvidia-smi is not installed here")


NO_DRIVER = Answer(reason="nvidia-smi is not installed here")
CARD = Answer(rows=(("NVIDIA L4",),))


def absent(driver: Answer, cuda: str | None) -> Finding:
    return absent_finding(
        cuda=cuda, torch_version="2.11", said="The driver is too old.", driver=driver
    )


def test_no_gpu_is_a_warning_and_one_that_torch_cannot_use_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert absent(NO_DRIVER, None).level is Level.WARNING
    assert absent(NO_DRIVER, "13.0").text.startswith("none: nvidia-smi is not installed here")
    built_without = absent(CARD, None)
    assert built_without.level is Level.PROBLEM
    assert "built without CUDA" in built_without.text
    too_old = absent(CARD, "13.0")
    assert "The driver is too old." in too_old.text
    assert "Update the NVIDIA driver" in (too_old.fix or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Unset CUDA_VISIBLE_DEVICES" in (absent(CARD, "13.0").fix or "")


def test_without_torch_the_driver_is_asked() -> None:
    finding = without_torch_finding(Answer(rows=(("NVIDIA L4", "580.1"),)))
    assert finding.text.endswith("torch is not installed; the driver sees NVIDIA L4, driver 580.1")
    assert not finding.measured


# link


def test_a_sound_link() -> None:
    link, rate = link_findings(READING)
    assert link == good(
        "PCIe link", "PCIe 5 x16 under load", generation=5, width=16, nominal_rate=63.008e9
    )
    assert rate.level is Level.OK
    assert rate.text.startswith("55.4 GB/s to the GPU, 55.3 GB/s back")


def test_a_link_below_what_the_card_can_do() -> None:
    narrow = attrs.evolve(LINK, width=4, generation=3)
    reading = attrs.evolve(READING, link=narrow, rates=Rates(to_device=3.4e9, to_host=3.3e9))
    link, rate = link_findings(reading)
    assert link.level is Level.WARNING
    assert "PCIe 3 x4 under load, of PCIe 5 x16" in link.text
    assert rate.level is Level.OK


def test_copies_below_what_the_link_can_do() -> None:
    reading = attrs.evolve(READING, rates=Rates(to_device=20e9, to_host=55e9))
    assert levels(link_findings(reading)) == {"PCIe link": "ok", "copy rate": "warning"}


def test_what_cannot_be_measured_says_why() -> None:
    for finding in link_findings(None):
        assert finding.text == "not measured: there is no GPU that torch can use"
    half = LinkReading(link_reason="no nvidia-smi", rates_reason="no memory")
    assert [finding.text for finding in link_findings(half)] == [
        "not measured: no nvidia-smi",
        "not measured: no memory",
    ]


# nvidia-smi


def install_program(folder: Path, body: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    install_program(tmp_path, 'sleep 0.1; test "$4" = GPU-7 && echo "5, 5, 8, 16"')
    busy = []
    answer = ask(["a", "b", "c", "d"], gpu="GPU-7", meanwhile=lambda: busy.append(1))
    assert answer == Answer(rows=(("5", "5", "8", "16"),))
    assert len(busy) > 1
    narrow = Link(generation=5, max_generation=5, width=8, max_width=16)
    assert parse_link(answer) == (narrow, None)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo broken driver >&2; exit 9", "failed (9): broken driver"),
        ("echo 5", "gave no such values: 5"),
        ("echo", "gave no such values"),
    ],
)
def test_nvidia_smi_that_gives_nothing(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    install_program(tmp_path, body)
    answer = ask(["a", "b"])
    assert answer.rows == ()
    assert reason in (answer.reason or "")
    assert parse_link(answer) == (None, answer.reason)


@pytest.mark.parametrize("status", [0, 9])
def test_nvidia_smi_that_says_what_nobody_can_read(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(nvidia_smi, "_TIMEOUT_S", 10.0)
    for said in (b"\xff\xfe\x00broken\n", b"x" * 300_000, b"5, 5, 8, 16\n" * 30_000):
        (tmp_path / "said").write_bytes(said)
        install_program(tmp_path, f"cat {tmp_path}/said; exit {status}")
        answer = ask(["a", "b"])
        assert answer.rows == ()
        assert "did not answer" not in (answer.reason or "did not answer")
        assert len(answer.reason or "") < 300
        assert parse_link(answer) == (None, answer.reason)
        assert "torch is not installed" in without_torch_finding(answer).text


def test_a_link_of_absurd_numbers() -> None:
    for absurd in ("9" * 6000, "\u0665", "5.0", "-1"):
        link, reason = parse_link(Answer(rows=((absurd, "5", "16", "16"),)))
        assert (link, reason is not None) == (None, True)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"MemTotal:\nMemAvailable:\n",
        b"MemTotal: many kB\nMemAvailable: 3 kB\n",
        b"MemTotal: 0 kB\nMemAvailable: 0 kB\n",
        b"\xff\xfeMemTotal: 3 kB\n",
    ],
    ids=["empty", "no values", "no number", "nothing", "no text"],
)
def test_a_meminfo_that_nobody_can_read(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "meminfo"
    path.write_bytes(said)
    monkeypatch.setattr(machine, "_MEMINFO", path)
    [finding] = [found for found in host_findings() if found.name == "host memory"]
    assert finding.level is Level.WARNING
    assert "/proc/meminfo cannot be read" in finding.text


def test_a_virtual_machine_does_not_say_its_link() -> None:
    answer = Answer(rows=((None, "5", "16", "16"),))
    link, reason = parse_link(answer)
    assert link is None
    assert "virtual machine" in (reason or "")


def test_nvidia_smi_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert ask(["name"]) == NO_DRIVER


# the whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_report_without_a_gpu(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    assert "WARNING  GPU              none: nvidia-smi is not installed here" in out
    assert "not measured: there is no GPU that torch can use" in out
    assert "\nWhat to do\nGPU: " in out
    code, out, _ = cli("doctor", "--json")
    report = json.loads(out)
    assert (code, report["verdict"]) == (0, "warning")
    assert all((f["level"] == "ok") is (f["fix"] is None) for f in report["findings"])


class FakeEvent:
    """A CUDA event's stand-in where work is done when its call returns."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.time - self.time)


@pytest.fixture
def fake_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass for a GPU, as far as the doctor asks."""
    properties = SimpleNamespace(uuid="12-34", name="NVIDIA L4", major=8, minor=9)
    fakes: dict[str, Any] = {
        "current_device": lambda: 1,
        "device_count": lambda: 2,
        "get_device_properties": {1: properties}.__getitem__,
        "get_device_name": ["NVIDIA T4", "NVIDIA L4"].__getitem__,
        "get_arch_list": lambda: ["sm_75", "sm_86"],
        "mem_get_info": lambda: (23 * 10**9, 24 * 10**9),
        "is_bf16_supported": lambda *, including_emulation: not including_emulation,
        "is_available": lambda: True,
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "Event": FakeEvent,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(link, "COPY_BYTES", 2**20)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    install_program(
        tmp_path,
        "case $1 in *driver*) echo 580.1;; *) sleep 0.05; echo '4, 4, 8, 16';; esac",
    )


@pytest.mark.usefixtures("fake_cuda")
def test_a_gpu_is_read() -> None:
    gpu = read_gpu(torch.device("cuda"))
    assert gpu == Gpu(
        index=1,
        name="NVIDIA L4",
        uuid="GPU-12-34",
        capability=(8, 9),
        architectures=("sm_75", "sm_86"),
        total_bytes=24 * 10**9,
        free_bytes=23 * 10**9,
        bf16=True,
        others=("NVIDIA T4",),
        driver="580.1",
        driver_reason=None,
    )
    assert levels(gpu_findings(gpu))["GPU"] == "ok"


@pytest.mark.usefixtures("fake_cuda")
def test_a_link_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    reading = measure_link(cpu, uuid="GPU-12-34")
    assert reading.link == Link(generation=4, max_generation=4, width=8, max_width=16)
    assert reading.rates is not None
    assert min(reading.rates.to_device, reading.rates.to_host) > 1e6
    assert reading.locked_bytes == 2**20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**30))
    assert "GPU memory are free" in (measure_link(cpu, uuid="GPU-12-34").rates_reason or "")


@pytest.mark.usefixtures("fake_cuda")
def test_a_link_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros_core.host_memory.available_memory", lambda: 1000)
    reading = measure_link(torch.device("cpu"), uuid="GPU-12-34")
    assert (reading.link, reading.locked_bytes) == (None, None)
    assert "cannot be had" in (reading.rates_reason or "")


@pytest.mark.usefixtures("fake_cuda")
def test_the_whole_report_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(device: torch.device, *, uuid: str) -> LinkReading:
        measured.append(f"{device} {uuid}")
        return READING

    monkeypatch.setattr(doctor, "measure_link", measure)
    monkeypatch.setattr(doctor, "plugin_findings", list)
    monkeypatch.setattr(torch.version, "cuda", "14.0")
    found = {finding.name: finding for finding in examine()}
    assert measured == ["cuda:1 GPU-12-34"]
    assert "no library for CUDA 14.0" in found["bitsandbytes"].text
    assert found["copy rate"].values["to_device"] == 55.4e9
    assert copy_rate() == 55.4e9
    monkeypatch.setattr(doctor, "measure_link", lambda *a, **k: LinkReading(rates_reason="no room"))
    with pytest.raises(PorosError, match="could not be measured: no room"):
        copy_rate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_copy_rate_without_a_gpu() -> None:
    with pytest.raises(PorosError, match="cannot be measured here: none: "):
        copy_rate()


@pytest.mark.gpu
def test_the_gpu_is_measured() -> None:
    found = {finding.name: finding for finding in examine()}
    assert found["GPU"].values["gpu"] == torch.cuda.get_device_name()
    assert found["copy rate"].values["to_device"] > 1e9


def test_a_problem_is_the_exit_status(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [good("a", "fine"), problem("b", "broken", fix="mend it")]
    monkeypatch.setattr(poros.cli.doctor, "examine", lambda: findings)
    assert cli("doctor")[:2] == (
        1,
        "OK       a  fine\nPROBLEM  b  broken\n\nWhat to do\nb: mend it\n",
    )
    monkeypatch.setattr(poros.cli.doctor, "examine", lambda: findings[:1])
    assert cli("doctor")[:2] == (0, "OK  a  fine\n\nNothing to do.\n")


def test_on_a_terminal_it_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Console(force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(poros.cli.output, "console", lambda: out)
    poros.cli.doctor._print([problem("a", "a text that is longer than a line", fix="mend it")])
    assert capsys.readouterr().out.splitlines()[1].split() == ["line"]


def test_without_torch() -> None:
    done = command("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "torch is not installed" in found["GPU"]["text"]
    assert "not known without torch" in found["gate records"]["text"]
