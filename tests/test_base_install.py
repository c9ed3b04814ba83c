"""Poros without torch: what must work in a base install, and what must say what it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ML = ("torch", "transformers", "peft", "bitsandbytes", "safetensors", "accelerate", "numpy")

SMALL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}

BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ML!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from poros.cli import main\nmain()", *arguments)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return tmp_path


def test_the_blocker_blocks() -> None:
    done = python("import torch")
    assert done.returncode != 0
    assert "No module named 'torch'" in done.stderr


def test_the_face_imports_and_says_what_is_missing() -> None:
    done = python(
        """
import poros
assert set(poros.__all__) <= set(dir(poros))
assert poros.__version__
assert issubclass(poros.SettingsError, poros.PorosError)
assert poros.hookimpl and poros.Family
for name in ("prepare", "unprepare", "load", "deterministic"):
    try:
        getattr(poros, name)
    except ImportError as error:
        assert f"poros.{name} needs torch" in str(error), error
        assert "pip install 'poros-train[ml]'" in str(error), error
        assert "pip install -e '.[ml]'" in str(error), error
    else:
        raise SystemExit(f"{name} imported without torch")
try:
    poros.prepar
except AttributeError as error:
    assert "prepar" in str(error)
"""
    )
    assert done.returncode == 0, done.stderr


def test_help_of_every_command() -> None:
    done = python(
        """
from typer.testing import CliRunner
from poros.cli import app
names = [command.name for command in app.registered_commands]
for arguments in (["--help"], *([name, "--help"] for name in names)):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
print(" ".join(names))
"""
    )
    assert done.returncode == 0, done.stderr
    assert {"list-families", "check"} <= set(done.stdout.split())


def test_list_families() -> None:
    done = command("list-families", "--json")
    assert done.returncode == 0, done.stderr
    assert "qwen2" in [family["name"] for family in json.loads(done.stdout)]


def test_check(model: Path) -> None:
    done = command("check", str(model), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["family"]["name"] == "qwen2"


def copy_of_the_source(folder: Path) -> Path:
    """Copy what a wheel is built from, with a gate record, so that none is left in the checkout."""
    shutil.copytree(
        ROOT,
        folder,
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests"),
    )
    record = {"kind": "training-parity", "family": "qwen3", "verdict": "exact", "shape": "9b"}
    validation = folder / "docs" / "validation"
    validation.mkdir(parents=True, exist_ok=True)
    (validation / "planted.json").write_text(json.dumps({**record, "stack": {"gpu": "a GPU"}}))
    return folder


@pytest.mark.long
def test_a_real_environment_without_torch(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    constraints = str(ROOT / "constraints.txt")
    binaries = folder / "bin"

    def run(program: str, *arguments: str) -> str:
        return subprocess.run(
            [str(binaries / program), *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env=environment,
        ).stdout

    source = copy_of_the_source(tmp_path / "source")
    run("pip", "install", "--quiet", "--constraint", constraints, str(source))
    installed = {entry["name"].lower() for entry in json.loads(run("pip", "list", "--format=json"))}
    assert not installed & {"torch", "transformers", "peft", "bitsandbytes", "safetensors"}
    run("python", "-c", "import poros; poros.PorosError")
    assert "check" in run("poros", "--help")
    families = {f["name"]: f for f in json.loads(run("poros", "list-families", "--json"))}
    assert families["qwen3"]["status"] == "validated"
    assert "planted.json" in [record["file"] for record in families["qwen3"]["records"]]
    assert "supported by family qwen2" in run("poros", "check", str(model))
    assert "torch is not installed" in run("poros", "doctor")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    assert json.loads(run("poros", "plan", str(config), "--json"))["family"] == "qwen2"
