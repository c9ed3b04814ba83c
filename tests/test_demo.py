"""The demo: its sample, its tokenizer, its checks, and the whole of it once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from poros.cli import main
from poros_core import demo
from poros_core.demo import check_output
from poros_core.demo_model import demo_batches, demo_tokenizer, sample, write_demo_checkpoint
from poros_core.errors import PorosError

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["poros", "demo", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


def test_the_sample_is_small_and_has_no_doubles() -> None:
    pairs = sample()
    assert len(pairs) == 60
    assert len({question for question, _ in pairs}) == 60
    assert all(question and answer for question, answer in pairs)


def test_the_tokenizer_gives_back_what_it_was_given() -> None:
    tokenizer = demo_tokenizer()
    for question, answer in sample():
        for text in (question, answer):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert len(ids) < len(text)
            assert tokenizer.decode(ids) == text


def test_batches_have_a_loss_on_answers_only() -> None:
    tokenizer = demo_tokenizer()
    batch = next(demo_batches(tokenizer, batch=4, seed=0, device=torch.device("cpu")))
    answers = {answer for _, answer in sample()}
    for row, mask in zip(batch["labels"], batch["attention_mask"], strict=True):
        kept = row[row != -100]
        assert kept[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(kept[:-1]) in answers
        assert (row[mask == 0] == -100).all()


def test_the_checkpoint_is_the_seed_s_and_leaves_the_callers_stream_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_demo_checkpoint(tmp_path / name, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_folder_with_other_files_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    code, _, err = cli("--output", str(tmp_path))
    assert code == 2
    assert "holds other files" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(PorosError, match="is a file"):
        check_output(tmp_path / "thesis.txt")
    check_output(tmp_path / "new")


def test_somebody_s_adapter_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    """Though it has the names that the demo's has."""
    (tmp_path / "base-model").mkdir()
    mine = [tmp_path / "base-model" / "model.safetensors", tmp_path / "adapter_config.json"]
    for path in mine:
        path.write_text("mine")
    code, _, err = cli("--output", str(tmp_path))
    assert code == 2
    assert "holds other files" in err
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def test_a_folder_that_cannot_be_made_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = cli("--output", str(tmp_path / "file" / "adapter"))
    assert code == 2
    assert "Nothing can be written to" in err


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("steps", "window", "gate_steps"),
    [
        (22, 4, 2),
        pytest.param(demo.STEPS, demo._WINDOW, demo.GATE_STEPS, marks=pytest.mark.slow),
    ],
    ids=["fewer steps", "as it is"],
)
def test_the_whole_demo(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    window: int,
    gate_steps: int,
) -> None:
    monkeypatch.setattr(demo, "STEPS", steps)
    monkeypatch.setattr(demo, "_WINDOW", window)
    monkeypatch.setattr(demo, "GATE_STEPS", gate_steps)
    output = tmp_path / "adapter"
    code, out, _ = cli("--output", str(output))
    assert code == 0, out
    assert "Poros prepared model" in out
    assert "bitwise parity (NF4, deterministic)" in out
    rows = [line for line in out.splitlines() if line.startswith(("gate, ", "adapter read"))]
    assert len(rows) == 5
    assert all(" 0.00e+00 " in row and row.rstrip().endswith("yes") for row in rows)
    assert str(output) in out
    assert (output / "adapter_model.safetensors").is_file()
    check_output(output)
