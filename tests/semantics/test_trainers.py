"""The Trainer and SFTTrainer scripts end with the same adapter file with and without Poros."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from poros_core.demo_model import sample, write_demo_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
THE_LINE = "poros.prepare("


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "small"
    write_demo_checkpoint(path, seed=0)
    return path


@pytest.fixture
def data_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "data.jsonl"
    texts = [f"Instruction: {question}\nAnswer: {answer}" for question, answer in sample()]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def edited(script: str, *, streamed: bool, bf16: bool) -> str:
    """Return a script with fewer steps and, unless ``streamed``, without its one line."""
    lines = (EXAMPLES / script).read_text(encoding="utf-8").splitlines(keepends=True)
    assert sum(THE_LINE in line for line in lines) == 1
    source = "".join(line for line in lines if streamed or THE_LINE not in line)
    for found, wanted in (("max_steps=20", "max_steps=3"), ("bf16=True", f"bf16={bf16}")):
        assert source.count(found) == 1
        source = source.replace(found, wanted)
    return source


@pytest.mark.parametrize("script", ["trainer_lora.py", "sft_lora.py"])
def test_an_example_is_short(script: str) -> None:
    lines = (EXAMPLES / script).read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 25


@pytest.mark.usefixtures("new_accelerate")
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
    data_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = []
    for streamed in (False, True):
        output = tmp_path / ("streamed" if streamed else "resident")
        path = tmp_path / f"{output.name}_{script}"
        path.write_text(edited(script, streamed=streamed, bf16=bf16), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [script, str(model_path), str(data_path), str(output)])
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        shown = capsys.readouterr()
        assert ("Poros prepared model" in shown.out + shown.err) is streamed
        files.append(output / "adapter_model.safetensors")
    trained = load_file(files[0])
    assert all(t.isfinite().all() for t in trained.values())
    assert all(t.any() for name, t in trained.items() if "lora_B" in name)
    assert files[0].read_bytes() == files[1].read_bytes()
