"""The command line: exit statuses, JSON, errors without tracebacks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import poros.cli
from poros.cli import app, families, main
from poros_core.log import get_logger
from poros_core.status import family_status, running_stack


class Cli:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["poros", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        captured = self._capsys.readouterr()
        assert left.value.code is None or isinstance(left.value.code, int)
        return left.value.code or 0, captured.out, captured.err


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)


def write_config(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# list-families


def test_list_families_as_a_table(cli: Cli) -> None:
    code, out, err = cli("list-families")
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if "qwen2" in line)
    assert row.startswith("Qwen2.5")
    assert "poros-families (poros-train " in row
    status = family_status("qwen2", running=running_stack())
    assert f" {status.word} " in row
    assert f"qwen2: {status}" in out


def test_list_families_as_json(cli: Cli) -> None:
    code, out, _ = cli("list-families", "--json")
    assert code == 0
    family = next(entry for entry in json.loads(out) if entry["name"] == "qwen2")
    status = family_status("qwen2", running=running_stack())
    assert [record["file"] for record in family.pop("records")] == [r.file for r in status.records]
    assert family == {
        "name": "qwen2",
        "title": "Qwen2.5",
        "model_types": ["qwen2"],
        "status": status.word,
        "detail": status.detail,
        "plugin": "poros-families",
        "distribution": "poros-train",
        "version": poros.__version__,
    }


# check


def test_check_says_supported(cli: Cli, tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "qwen2"})
    code, out, err = cli("check", str(tmp_path))
    assert (code, err) == (0, "")
    assert f"{tmp_path}: supported by family qwen2" in out
    assert cli("check", str(tmp_path / "config.json"))[0] == 0


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "foo"}, "No family for model_type 'foo'"),
        ({"model_type": "qwen2_moe"}, "mixture-of-experts"),
    ],
)
def test_check_says_not_supported(
    cli: Cli, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    write_config(tmp_path, config)
    code, out, _ = cli("check", str(tmp_path))
    assert code == 1
    assert reason in out
    code, out, _ = cli("check", str(tmp_path), "--json")
    assert code == 1
    answer = json.loads(out)
    assert answer["supported"] is False
    assert answer["family"] is None
    assert reason in answer["reason"]


def test_check_as_json(cli: Cli, tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "qwen2"})
    answer = json.loads(cli("check", str(tmp_path), "--json")[1])
    assert answer["supported"] is True
    assert answer["reason"] is None
    status = family_status("qwen2", running=running_stack())
    assert answer["family"]["status"] == status.word
    assert answer["family"]["detail"] == status.detail


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no 'model_type'"),
        ('{"architectures": []}', "no 'model_type'"),
    ],
)
def test_check_cannot_read_a_broken_config(
    cli: Cli, tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert_bad_input(cli("check", str(tmp_path)), reason)


def test_check_cannot_read_what_is_not_there(cli: Cli, tmp_path: Path) -> None:
    assert_bad_input(cli("check", str(tmp_path / "nope")), "does not exist")
    assert_bad_input(cli("check", str(tmp_path)), "holds no config.json")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert_bad_input(cli("check", str(tmp_path)), "PEFT adapter")
    assert_bad_input(cli("check", "not a hub id"), "neither a folder here nor a valid Hub id")


def test_check_offline_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert_bad_input(cli("check", "owner/name"), "HF_HUB_OFFLINE is set")


def test_check_finds_a_cached_hub_model_offline(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    write_config(snapshot, {"model_type": "qwen2"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    code, out, err = cli("check", "owner/name")
    assert (code, err) == (0, "")
    assert "owner/name: supported" in out


# Errors, usage and logging


def assert_bad_input(answer: tuple[int, str, str], reason: str) -> None:
    code, out, err = answer
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert reason in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_debug_shows_the_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POROS_DEBUG", "1")
    code, _, err = cli("check", str(tmp_path / "nope"))
    assert code == 2
    assert "Traceback" in err


def test_a_defect_is_no_verdict(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(families, "installed_families", defect)
    code, _, err = cli("list-families")
    assert code == 70
    assert "ZeroDivisionError" in err


def test_a_missing_package_names_its_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'trl'", name="trl.trainer")

    monkeypatch.setattr(families, "installed_families", missing)
    assert_bad_input(cli("list-families"), "pip install 'poros-train[train]'")


def test_usage_errors_exit_2(cli: Cli) -> None:
    assert cli("check")[0] == 2
    assert cli("no-such-command")[0] == 2
    assert cli("check", "x", "--no-such-flag")[0] == 2


def test_version(cli: Cli) -> None:
    assert cli("--version")[:2] == (0, f"poros-train {poros.__version__}\n")


def test_log_events_go_to_standard_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def talk() -> list[object]:
        get_logger("test").info("something.happened", unit=3)
        return []

    monkeypatch.setattr(families, "installed_families", talk)
    logger = logging.getLogger("poros")
    before = (logger.handlers[:], logger.level)
    try:
        assert cli("list-families")[2] == ""
        code, out, err = cli("--log-level", "info", "list-families")
    finally:
        logger.handlers[:], logger.level = before
    assert (code, out) == (0, "No family is installed.\n")
    assert err == "INFO poros.test event='something.happened' unit=3\n"


def test_every_command_has_help() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        assert command.callback.__doc__
