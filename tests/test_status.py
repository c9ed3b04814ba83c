"""Status from records: what validates a family where, and what is said of the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import poros_core.panel
import poros_core.status
from poros_core.catalog import installed_families
from poros_core.errors import PorosError
from poros_core.gate.stack import stack_of
from poros_core.panel import panel_lines
from poros_core.plan import build_plan
from poros_core.plugins import plugins
from poros_core.settings import Settings
from poros_core.status import Stack, family_status, read_records, record_folders, running_stack
from poros_families.qwen2 import QWEN2

H200 = Stack(
    gpu="NVIDIA H200", capability="9.0", torch="2.11", transformers="5.17", bitsandbytes="0.50"
)
RECORD: dict[str, Any] = {
    "kind": "training-parity",
    "family": "qwen2",
    "verdict": "exact",
    "shape": "7b",
    "precision": "nf4",
    "steps": 50,
    "steps_compared": 50,
    "seq_len": 512,
    "dropout": 0.1,
    "block_size": 1,
    "arms": {
        "resident": {"peak_allocated_bytes": 12, "step_seconds": 0.4},
        "streamed": {"peak_allocated_bytes": 3, "step_seconds": 0.7},
        "control": {"peak_allocated_bytes": 13, "step_seconds": 0.5},
    },
    "stack": {
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "torch": "2.11.0+cu130",
        "transformers": "5.17.0",
        "bitsandbytes": "0.50.2",
    },
}


def write(folder: Path, record: object, name: str = "record.json") -> list[Path]:
    (folder / name).write_text(json.dumps(record))
    return [folder]


def on(**stack: str | None) -> dict[str, Any]:
    return {**RECORD, "stack": {**RECORD["stack"], **stack}}


def status_of(folder: Path, record: object, running: Stack | None = H200) -> str:
    return str(family_status("qwen2", running=running, folders=write(folder, record)))


def test_a_record_validates_its_family_on_its_stack(tmp_path: Path) -> None:
    assert status_of(tmp_path, RECORD) == "validated (qwen2 7b nf4, 50 steps, H200)"
    assert family_status("qwen3", running=H200, folders=[tmp_path]).word == "experimental"


@pytest.mark.parametrize(
    "record",
    [
        {**RECORD, "verdict": "diverged"},
        {**RECORD, "kind": "training-loop-parity"},
        {**RECORD, "family": "qwen3"},
        {**RECORD, "shape": "tiny"},
        {**RECORD, "shape": "tiny-sliding"},
        on(gpu=None),
        {**RECORD, "stack": {}},
        {**RECORD, "stack": None},
        [RECORD],
        {},
    ],
)
def test_what_validates_nothing_anywhere(tmp_path: Path, record: object) -> None:
    assert status_of(tmp_path, record) == "experimental (no gate record)"
    assert status_of(tmp_path, record, None) == "experimental (no gate record)"


@pytest.mark.parametrize(
    ("stack", "detail"),
    [
        ({"torch": "2.13"}, "validated on H200 sm_90 with torch 2.11; this stack: torch 2.13"),
        (
            {"transformers": "5.24", "bitsandbytes": None},
            "validated on H200 sm_90 with transformers 5.17, bitsandbytes 0.50; "
            "this stack: transformers 5.24, no bitsandbytes",
        ),
        (
            {"gpu": None, "capability": None, "torch": "2.13"},
            "validated on H200 sm_90 with torch 2.11; this stack: torch 2.13, no GPU",
        ),
        (
            {"gpu": "NVIDIA GeForce RTX 4090", "capability": "8.9"},
            "validated on H200 sm_90; this stack: GeForce RTX 4090 sm_89",
        ),
    ],
)
def test_another_stack_is_experimental_and_says_what_differs(
    tmp_path: Path, stack: dict[str, Any], detail: str
) -> None:
    running = attrs.evolve(H200, **stack)
    assert status_of(tmp_path, RECORD, running) == f"experimental ({detail})"


def test_another_gpu_of_the_same_capability_is_the_same_stack(tmp_path: Path) -> None:
    running = attrs.evolve(H200, gpu="NVIDIA H100 80GB HBM3")
    assert status_of(tmp_path, RECORD, running) == "validated (qwen2 7b nf4, 50 steps, H200)"


def test_patch_releases_and_builds_do_not_count(tmp_path: Path) -> None:
    record = on(torch="2.11.3", transformers="5.17.9.dev0", bitsandbytes="0.50.0")
    assert status_of(tmp_path, record).startswith("validated")


def test_a_capability_is_only_supplied_for_gpus_that_are_known(tmp_path: Path) -> None:
    assert status_of(tmp_path, on(compute_capability=None)).startswith("validated")
    unknown = on(compute_capability=None, gpu="NVIDIA X")
    assert "validated on X; this stack: H200 sm_90" in status_of(tmp_path, unknown)
    nowhere = Stack(
        gpu=None, capability=None, torch="2.11", transformers="5.17", bitsandbytes="0.50"
    )
    assert status_of(tmp_path, unknown, nowhere).startswith("experimental")


def test_the_largest_and_the_nearest_record_speak(tmp_path: Path) -> None:
    small = {**RECORD, "shape": "0.5b", "arms": {"resident": {"peak_allocated_bytes": 2}}}
    write(tmp_path, small, "a.json")
    write(tmp_path, RECORD, "b.json")
    folders = write(tmp_path, {**on(torch="2.9.0"), "shape": "72b"}, "c.json")
    status = family_status("qwen2", running=H200, folders=folders)
    assert status.record is not None
    assert status.record.file == "b.json"
    assert [record.file for record in status.records] == ["a.json", "b.json", "c.json"]
    running = attrs.evolve(H200, torch="2.9", bitsandbytes="0.51")
    detail = family_status("qwen2", running=running, folders=folders).detail
    assert detail == "validated on H200 sm_90 with bitsandbytes 0.50; this stack: bitsandbytes 0.51"


def test_without_torch_it_says_on_which_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError) as blocked:
        __import__("torch")
    assert blocked.value.name == "torch"
    assert running_stack() is None
    assert status_of(tmp_path, RECORD, None) == (
        "validated (on H200 sm_90 with torch 2.11, transformers 5.17, bitsandbytes 0.50)"
    )


def test_a_broken_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(PorosError, match="record.json cannot be read"):
        read_records([tmp_path])


def test_the_running_stack_is_what_a_record_of_it_says(tmp_path: Path) -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    content = {**RECORD, "stack": {**stack_of(device), "gpu": "NVIDIA X"}}
    assert "compute_capability" in content["stack"]
    [record] = read_records(write(tmp_path, content))
    running = running_stack(device)
    assert running is not None
    assert record.stack.differing(running) == ([] if device.type == "cuda" else ["gpu"])


def test_committed_records_are_read_once_each() -> None:
    assert record_folders()
    files = [record.file for record in read_records()]
    assert "qwen2-7b.json" in files
    assert len(files) == len(set(files))


def test_the_catalog_carries_the_figures() -> None:
    family = next(info for info in installed_families() if info.name == "qwen2")
    record = next(r for r in family.records if r.file == "qwen2-7b.json")
    assert (record.shape, record.precision, record.steps, record.dropout) == ("7b", "nf4", 50, 0.1)
    assert record.stack == H200
    for figures in (record.peak_bytes, record.step_seconds):
        assert set(figures) == {"resident", "streamed"}
        assert all(value is not None and value > 0 for value in figures.values())


def panel(dtype: torch.dtype) -> dict[str, str]:
    config = AutoConfig.for_model(**QWEN2.shapes["tiny"])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    plan = build_plan(model, family=QWEN2, codecs=plugins().codecs(), device=torch.device("cpu"))
    return dict(panel_lines(model, family=QWEN2, plan=plan, settings=Settings()))


@pytest.mark.parametrize(
    ("dtype", "title"),
    [(torch.bfloat16, "BF16"), (torch.float16, "FP16"), (torch.float32, "FP32")],
)
def test_the_panel_names_the_dtype_of_a_plain_base(dtype: torch.dtype, title: str) -> None:
    lines = panel(dtype)
    assert lines["precision"] == title
    assert title in lines["guarantee"]


def test_the_panel_says_whether_a_record_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = panel(torch.float32)
    assert lines["architecture"].startswith("experimental (validated on H200 sm_90 with ")
    assert lines["stack"] == "not checked (run poros doctor)"
    monkeypatch.setattr(poros_core.panel, "running_stack", lambda device: H200)
    lines = panel(torch.float32)
    assert lines["architecture"].startswith("validated (qwen2 ")
    assert lines["stack"].startswith("matches the record qwen2-")
