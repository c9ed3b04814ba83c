"""How a gate ends: what voids a verdict, and that neither it nor anybody's file is lost."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from poros_core.errors import GateError
from poros_core.gate import GateOptions
from poros_core.gate.arms import Arm
from poros_core.gate.card import BEGIN, END, check_card, write_card
from poros_core.gate.files import json_text, write_whole
from poros_core.gate.record import GateResult
from poros_core.gate.run import run_gate
from poros_core.settings import Settings

TINY = GateOptions(family="qwen2", shape="tiny", steps=3, layers=1)
GateCli = Callable[..., tuple[int, str, str]]


class Tamper:
    """Changes the arms when they stand."""

    def __init__(self, change: Callable[[Mapping[str, Arm]], object]) -> None:
        self.arms_ready = change

    def phase(self, text: str) -> None: ...

    def step(self, done: int, total: int, loss: float) -> None: ...


@pytest.fixture(scope="module")
def exact() -> GateResult:
    return run_gate(TINY)


# what voids a verdict


def test_losses_that_end_as_nan_void_a_gate() -> None:
    """All arms alike, after steps that trained."""

    def poison(arms: Mapping[str, Arm]) -> None:
        for arm in arms.values():
            calls: list[object] = []

            def late(module: Any, args: Any, output: Any, calls: list[object] = calls) -> Any:
                calls.append(None)
                return output * (math.nan if len(calls) > 4 else 1.0)

            arm.model.get_input_embeddings().register_forward_hook(late)  # type: ignore[operator]

    result = run_gate(attrs.evolve(TINY, steps=6), observer=Tamper(poison))
    assert (result.verdict, result.exit_status) == ("void", 2)
    assert all(surface["exact"] for surface in result.record["surfaces"].values())
    tensors, loss = result.void_reasons
    assert "ended with elements that are NaN or infinite" in tensors
    assert "the loss of step 5 is NaN or infinite" in loss
    assert result.record["losses"]["streamed"][4:] == [None, None]


def test_a_budget_that_holds_all_layers_voids_a_gate() -> None:
    settings = Settings(vram_budget=10**11)
    result = run_gate(GateOptions(family="qwen2", shape="tiny", steps=3, settings=settings))
    assert result.verdict == "void"
    assert result.void_reasons == [
        "all 4 layers stayed on the device, so none streamed: a smaller --vram-budget shows "
        "streaming"
    ]


def test_attention_that_is_not_sdpa_s_voids_a_gate_of_its_kernels() -> None:
    def eager(arms: Mapping[str, Arm]) -> None:
        for arm in arms.values():
            arm.model.get_base_model().set_attn_implementation("eager")  # type: ignore[operator]

    modes = attrs.evolve(TINY.modes, attention="math")
    assert run_gate(attrs.evolve(TINY, modes=modes)).verdict == "exact"
    result = run_gate(attrs.evolve(TINY, modes=modes), observer=Tamper(eager))
    assert result.verdict == "void"
    assert "the model computes attention by 'eager'" in result.void_reasons[0]


@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen2", "tiny"), ("gemma3", "tiny-multimodal"), ("qwen3_5", "tiny-multimodal")],
)
def test_dropout_reaches_the_attention_of_every_arm(family: str, shape: str) -> None:
    found: dict[str, float] = {}

    def look(arms: Mapping[str, Arm]) -> None:
        for name, arm in arms.items():
            base: Any = arm.model.get_base_model()  # type: ignore[operator]
            found[name] = base.config.get_text_config().attention_dropout

    options = GateOptions(family=family, shape=shape, steps=2, dropout=0.25)
    result = run_gate(options, observer=Tamper(look))
    assert result.verdict == "exact", result.void_reasons
    assert found == dict.fromkeys(("resident", "control", "streamed"), 0.25)


# what is written


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_verdict_is_said_though_it_cannot_be_written(
    flag: str, gate_cli: GateCli, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    asked = ("--family", "qwen2", "--shape", "tiny", "--layers", "1", "--steps", "3")
    minutes = ("--state", str(state), "--minutes", "1e-9")
    assert gate_cli(*asked, *minutes)[0] == 4
    assert state.exists()
    code, out, err = gate_cli(*asked, "--state", str(state), flag, "/dev/full")
    assert code == 2
    assert "exact: 3 steps" in out
    assert "cannot be written" in err
    assert state.exists(), "the gate can go on from there"
    written = tmp_path / "record"
    assert gate_cli(*asked, "--state", str(state), "--json", str(written))[0] == 0
    assert json.loads(written.read_text())["verdict"] == "exact"
    assert not state.exists()


def test_a_card_that_is_no_file_is_refused_before_the_gate(gate_cli: GateCli) -> None:
    code, out, err = gate_cli("--family", "qwen2", "--shape", "tiny", "--card", "/dev/zero")
    assert (code, out) == (2, "")
    assert "is no file" in err


def limited(path: Path, text: str) -> int:
    """Write a file in a process that may write 100 bytes to one."""
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            write_whole(path, text)
        except GateError as error:
            os._exit(3 if "is still there" in str(error) or "there still" in str(error) else 4)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "card.md", tmp_path / "link.md"
    path.write_bytes(b"before\r\n")
    path.chmod(0o640)
    link.symlink_to(path)
    assert limited(link, "x" * 200) == 3
    assert path.read_bytes() == b"before\r\n"
    write_whole(link, "after\r\n")
    assert path.read_bytes() == b"after\r\n"
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [path, link]
    write_whole(tmp_path / "new", "text")
    assert (tmp_path / "new").stat().st_mode & 0o444 == 0o444 & ~_umask()
    write_whole(Path("/dev/null"), "text")


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def test_a_card_keeps_its_line_ends(exact: GateResult, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_bytes(b"# A model\r\n")
    for _ in range(2):
        write_card(card, exact.record)
        content = card.read_bytes()
        assert content.startswith(b"# A model\r\n\r\n" + BEGIN.encode() + b"\r\n")
        assert content.count(b"\n") == content.count(b"\r\n")
    card.write_bytes(content + b"\r\n## Licence\r\n")
    write_card(card, exact.record)
    assert card.read_bytes() == content + b"\r\n## Licence\r\n"


@pytest.mark.parametrize("name", [END, f"a\n{BEGIN}", "```\n# Not yours", "<!-- gone"])
def test_a_name_does_not_break_a_card(exact: GateResult, tmp_path: Path, name: str) -> None:
    asked = {**exact.record["asked"], "shape": None, "model": f"/somewhere/{name}"}
    record = {**exact.record, "asked": asked, "shape": asked["model"]}
    card = tmp_path / "README.md"
    card.write_text("# A model\n")
    for _ in range(2):
        write_card(card, record)
        check_card(card)
    text = card.read_text()
    assert (text.count("<!--"), text.count("-->"), text.count("```")) == (2, 2, 2)


def test_json_has_no_number_that_is_none() -> None:
    text = json_text({"a": [math.inf, 1.5], "b": (math.nan,), "c": {"d": -math.inf, "e": "NaN"}})

    def refuse(found: str) -> None:
        raise AssertionError(found)

    assert json.loads(text, parse_constant=refuse) == {
        "a": [None, 1.5],
        "b": [None],
        "c": {"d": None, "e": "NaN"},
    }


@pytest.mark.parametrize("arguments", [["list-families"], ["list-families", "--json"]])
def test_an_output_that_nobody_reads_is_no_verdict(arguments: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {arguments}; from poros.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(120) == 141


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--json", "{}/a", "--html", "{}/a"), "--json and --html name the same file"),
        (("--card", "{}/a", "--state", "{}/b/../a"), "name the same file"),
        (("--html", "{}/none/a"), "name a file in a folder that exists"),
        (("--matrix", "ci", "--json-dir", "{}/file"), "is a file. Name a folder"),
        (("--data", "{}/none"), "cannot be read"),
        (("--data", "{}/file"), "is no safetensors file"),
    ],
)
def test_what_cannot_be_read_or_written_is_found_before_anything_is_built(
    flags: tuple[str, ...], said: str, gate_cli: GateCli, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "b").mkdir()
    subject = () if "--matrix" in flags else ("--family", "qwen2", "--shape", "tiny")
    code, out, err = gate_cli(*subject, *(flag.format(tmp_path) for flag in flags))
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
