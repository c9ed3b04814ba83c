"""Families and precisions as packages of their own: installed, listed, gated and uninstalled."""

from __future__ import annotations

import ast
import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_base_install import copy_of_the_source
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import poros
from poros_core.conformance import check_family
from poros_core.errors import PrepareError
from poros_core.gate import GateOptions
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.run import run_gate
from poros_core.plugins import plugins
from poros_core.prepare import prepared_of
from poros_families.qwen2 import QWEN2

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


class Environment:
    """A virtual environment of its own, into which plugins are installed by pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.run_in = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def create(self, *, see_this_one: bool) -> None:
        """Make it; ``see_this_one`` lets it import what the tests run with, without a download."""
        venv.create(self.folder / "venv", with_pip=False)
        if see_this_one:
            [packages] = (self.folder / "venv" / "lib").glob("python*/site-packages")
            lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
            (packages / "these.pth").write_text("\n".join(lines) + "\n")

    def pip(self, command: str, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--quiet"]
        self._run(*pip, command, "--disable-pip-version-check", *arguments)

    def install(self, example: str) -> None:
        source = self.folder / example
        shutil.copytree(EXAMPLES / example, source)  # building leaves files behind
        self.pip("install", "--no-deps", "--no-build-isolation", str(source))

    def poros(self, *arguments: str) -> str:
        return self._run(str(self.python), "-c", "from poros.cli import main; main()", *arguments)

    def pytest(self, example: str) -> str:
        tests = str(self.folder / example / "tests")
        return self._run(str(self.python), "-m", "pytest", "-p", "no:cacheprovider", tests)

    def families(self) -> dict[str, tuple[str, str]]:
        found = json.loads(self.poros("list-families", "--json"))
        return {entry["name"]: (entry["distribution"], entry["version"]) for entry in found}

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=self.run_in,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.mark.slow
def test_a_family_comes_and_goes_with_its_package(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.create(see_this_one=True)
    before = environment.families()
    environment.install("poros-llama")
    ours = ("poros-llama", "0.1.0")
    assert environment.families() == {**before, "llama": ours, "mistral": ours}
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert "supported by family mistral" in environment.poros("check", str(tmp_path))
    record = tmp_path / "record.json"
    shape = ("--family", "llama", "--shape", "tiny", "--steps", "20")
    environment.poros("gate", *shape, "--json", str(record))
    assert json.loads(record.read_text())["verdict"] == "exact"
    environment.pip("uninstall", "--yes", "poros-llama")
    assert environment.families() == before


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", ["poros-llama", "poros-int8"])
def test_the_examples_own_tests_pass(tmp_path: Path, example: str) -> None:
    environment = Environment(tmp_path)
    environment.create(see_this_one=True)
    environment.install(example)
    assert " passed" in environment.pytest(example)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_family_is_listed_in_a_base_install(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.create(see_this_one=False)
    source = copy_of_the_source(tmp_path / "source")
    family = source / "examples" / "poros-llama"
    constraints = str(ROOT / "constraints.txt")
    environment.pip("install", "--constraint", constraints, str(source), str(family))
    assert environment.families()["llama"] == ("poros-llama", "0.1.0")
    environment.pip("uninstall", "--yes", "poros-llama")
    assert "llama" not in environment.families()


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Lay both examples out in this process, as pip would."""
    for name in ("poros_llama", "poros_int8"):
        distribution = name.replace("_", "-")
        shutil.copy(EXAMPLES / distribution / f"{name}.py", tmp_path)
        info = tmp_path / f"{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[poros]\n{distribution} = {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.cache_clear()
    yield
    plugins.cache_clear()
    for name in ("poros_llama", "poros_int8"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("examples")
def test_a_third_party_family_conforms() -> None:
    check_family("mistral", block_sizes=(2,), steps=1)


@pytest.mark.usefixtures("examples")
def test_a_third_party_precision_is_exact() -> None:
    result = run_gate(
        GateOptions(
            family="llama", shape="tiny", precision="int8", steps=3, dropout=0.1, accumulate=2
        )
    )
    assert result.verdict == "exact"
    assert result.record["precision"] == "int8"
    assert result.record["arms"]["streamed"]["bytes_streamed_per_step"] > 0


@pytest.mark.usefixtures("examples")
def test_a_fault_in_a_third_party_precision_shows() -> None:
    options = GateOptions(family="llama", shape="tiny", precision="int8", steps=2, plant_fault=True)
    assert run_gate(options).verdict == "diverged"


@pytest.mark.usefixtures("examples")
def test_int8_bytes_are_what_streams(tmp_path: Path) -> None:
    write_random_checkpoint(
        QWEN2.shapes["tiny"],
        tmp_path / "model",
        seed=0,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    model: Any = poros.load(tmp_path / "model", precision="int8", device="cpu")
    layer = model.model.layers[1].mlp.up_proj
    wanted = (layer.weight.data.clone(), layer.state.SCB.clone())
    assert wanted[0].dtype is torch.int8
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj"]))
    poros.prepare(wrapped, verbose=False)
    assert not torch.equal(layer.weight.data, wanted[0])  # poisoned while it is not in use
    assert layer.state.CB.data_ptr() == layer.weight.data.data_ptr()
    poros.unprepare(wrapped)
    assert torch.equal(layer.weight.data, wanted[0])
    assert torch.equal(layer.state.CB, wanted[0])
    assert torch.equal(layer.state.SCB, wanted[1])


def int8_run(base: Any, *, streams: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Train three steps; return losses and adapters, and how many graphs were replayed."""
    torch.manual_seed(0)
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    model: Any = get_peft_model(base, adapters).train()
    if streams:
        poros.prepare(model, block_size=2, verbose=False)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        torch.manual_seed(step)
        ids = torch.randint(3, 96, (2, 32)).to(trained[0].device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    found |= {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    prepared = prepared_of(model)
    return found, prepared.handle.counters()["graph_replays"] if prepared else 0


@pytest.mark.gpu
@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_int8_is_exact_on_a_gpu(threshold: float, tmp_path: Path) -> None:
    """With a threshold its kernels wait for the device, and blocks run eagerly."""
    write_random_checkpoint(
        QWEN2.shapes["tiny"], tmp_path, seed=0, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    with poros.deterministic():
        plain = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, dtype="auto", device_map={"": "cuda:0"}
        )
        wanted, _ = int8_run(plain, streams=False)
        base = poros.load(tmp_path, precision="int8", device="cuda:0", quantization_config=config)
        found, replays = int8_run(base, streams=True)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert (replays > 0) == (threshold == 0.0)


def fp4_model() -> Any:
    config = AutoConfig.for_model(**QWEN2.shapes["tiny"])
    model = AutoModelForCausalLM.from_config(config)
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4")
    skip = ["lm_head"]
    model = replace_with_bnb_linear(model, skip, quantised).to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            values = torch.randn(module.out_features, module.in_features)
            module.weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="fp4").to(
                "cpu"
            )
    model.is_loaded_in_4bit = True
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def test_fp4_is_nobodys_without_a_plugin() -> None:
    with pytest.raises(PrepareError, match=r"No loader strategy knows .*install the plugin"):
        poros.prepare(fp4_model(), verbose=False)


def test_a_plugin_may_claim_fp4(plugin_site: Any) -> None:
    plugin_site.install(
        "poros-fp4",
        plugin="poros-fp4",
        module="poros_fp4",
        source=(
            "from attrs import evolve\n"
            "from poros_core.hookspecs import hookimpl\n"
            "from poros_loaders.nf4 import Nf4Codec, Nf4Standard\n"
            "FP4 = Nf4Codec(name='fp4', title='FP4')\n"
            "@hookimpl\n"
            "def poros_loaders():\n"
            "    return [Nf4Standard(precision='fp4', codec=FP4)]\n"
        ),
    )
    assert poros.prepare(fp4_model(), verbose=False)


def code_words(source: str) -> set[str]:
    """Return every name and string of a module, docstrings left out."""
    tree = ast.parse(source)
    documents = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= set() if id(node) in documents else set(node.value.lower().split())
        elif isinstance(node, ast.Name):
            words.add(node.id.lower())
        elif isinstance(node, ast.Attribute):
            words.add(node.attr.lower())
        elif isinstance(node, ast.Import | ast.ImportFrom):
            words |= {alias.name.lower() for alias in node.names}
    return words


FOREIGN = {
    "llama",
    "mistral",
    "int8",
    "int8params",
    "linear8bitlt",
    "load_in_8bit",
    "init_8bit_state",
}


def test_core_knows_nothing_of_the_examples() -> None:
    packages = ("poros", "poros_core", "poros_families", "poros_loaders", "poros_runtimes")
    files = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 40
    named = {path.name: code_words(path.read_text(encoding="utf-8")) & FOREIGN for path in files}
    assert {name: words for name, words in named.items() if words} == {}
    assert code_words((EXAMPLES / "poros-int8" / "poros_int8.py").read_text()) & FOREIGN
