"""The Trainer and SFTTrainer scripts end with the same adapter file with and without Poros."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from semantics.arms import checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    path.mkdir()
    for file in checkpoint().iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("script", "bf16"),
    [
        pytest.param("trainer_lora.py", False, id="trainer-plain", marks=pytest.mark.slow),
        pytest.param("trainer_lora.py", True, id="trainer-bf16"),
        pytest.param("sft_lora.py", False, id="sft-plain"),
        pytest.param("sft_lora.py", True, id="sft-bf16", marks=pytest.mark.slow),
    ],
)
def test_equal_adapter_files(
    script: str,
    bf16: bool,
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = []
    for streamed in (False, True):
        output = tmp_path / ("streamed" if streamed else "resident")
        words = [script, "--model", str(model_path), "--output", str(output), "--steps", "3"]
        words += ["--bf16"] if bf16 else []
        words += ["--poros"] if streamed else []
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        shown = capsys.readouterr()
        assert ("Poros prepared model" in shown.out + shown.err) is streamed
        files.append(output / "adapter_model.safetensors")
    trained = load_file(files[0])
    assert all(t.isfinite().all() for t in trained.values())
    assert all(t.any() for name, t in trained.items() if "lora_B" in name)
    assert files[0].read_bytes() == files[1].read_bytes()
