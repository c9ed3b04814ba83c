"""The load gate: exact for every family, and able to fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_checkpoint import write_checkpoint
from typer.testing import CliRunner

from poros_core.errors import GateError
from poros_core.gate import GateOptions, load_bytes
from poros_core.gate.load_bytes import STORAGES, LoadGateOptions, LoadGateResult, run_load_gate
from poros_core.gate.options import subject_of
from poros_core.plugins import plugins

SHAPES = [
    (entry.value.name, shape)
    for entry in plugins().families
    for shape in entry.value.shapes
    if shape.startswith("tiny")
]


def gate(
    *, storages: tuple[str, ...] | None = ("uint8",), pieces: int = 1, **changes: Any
) -> LoadGateResult:
    options = GateOptions(**{"family": "qwen2", "shape": "tiny", **changes})
    return run_load_gate(
        LoadGateOptions(gate=options, storages=storages, pieces=pieces), command="poros gate"
    )


@pytest.mark.slow
def test_every_way_of_nf4_is_exact() -> None:
    result = gate()
    record = result.record
    assert result.exit_status == 0
    assert (record["kind"], record["verdict"], record["mismatched"]) == ("load-bytes", "exact", 0)
    runs = [(run["way"], run["quantisation"]["double"]) for run in record["runs"]]
    ways = ["streamed", "standard", "cache", "mmap", "prequantised"]
    assert runs == [(way, double) for double in (False, True) for way in ways]
    assert record["tensors"] == sum(run["tensors"] for run in record["runs"])
    assert {run["tensors"] for run in record["runs"]} == {109, 193}
    assert all(run["seconds"] > 0 and run["load"]["host_bytes"] > 0 for run in record["runs"])
    json.dumps(record)


@pytest.mark.slow
def test_bf16_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []
    original = load_bytes.write_random_checkpoint

    def write(config: Any, path: Path, *, seed: int, **options: Any) -> None:
        drawn.append((config["num_hidden_layers"], seed))
        original(config, path, seed=seed, **options)

    monkeypatch.setattr(load_bytes, "write_random_checkpoint", write)
    record = gate(precision="bf16", pieces=2, seed=7).record
    assert record["verdict"] == "exact"
    assert sum(layers for layers, _ in drawn) == record["layers"]
    assert [seed for _, seed in drawn] == [7, 8]
    assert [run["way"] for run in record["runs"]] == ["streamed", "standard", "cache", "mmap"] * 2


def test_a_flipped_bit_is_found() -> None:
    result = gate(precision="bf16", plant_fault=True)
    assert (result.verdict, result.exit_status) == ("diverged", 1)
    wrong = {run["way"]: run["mismatched"] for run in result.record["runs"]}
    assert wrong == {"streamed": 1, "standard": 0, "cache": 0, "mmap": 0}
    first = result.record["runs"][0]["first"]
    assert first["got"] != first["expected"]
    assert first["tensor"].startswith("model.layers.")


def test_a_flip_that_does_not_show_voids_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_bytes, "_flip", lambda model: None)
    result = gate(precision="bf16", plant_fault=True)
    assert (result.verdict, result.exit_status) == ("void", 2)


def test_a_way_that_was_not_taken_voids_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    original = load_bytes.load
    monkeypatch.setattr(
        load_bytes, "load", lambda path, **options: original(path, **{**options, "cache": False})
        if options["host"] != "mmap"
        else original(path, **options),
    )  # fmt: skip
    result = gate(precision="bf16")
    assert result.verdict == "void"
    assert "'cache' was not loaded as asked" in result.record["void_reasons"]


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    record = gate(family=None, shape=None, model=str(tmp_path), precision="bf16").record
    assert record["verdict"] == "exact"
    with pytest.raises(GateError, match="--shape"):
        gate(family=None, shape=None, model=str(tmp_path), pieces=2)


def test_bad_pieces() -> None:
    with pytest.raises(GateError, match="1 or more"):
        gate(pieces=0)
    with pytest.raises(GateError, match="4 layers"):
        gate(pieces=5)


def test_a_tiny_shape_runs_every_storage() -> None:
    options = LoadGateOptions(gate=GateOptions(family="qwen2", shape="tiny"))
    found = options.quantisations(subject_of(options.gate))
    assert {q.storage for q in found if q is not None} == set(STORAGES)
    large = LoadGateOptions(gate=GateOptions(family="qwen2", shape="0.5b"))
    assert len(large.quantisations(subject_of(large.gate))) == 2


@pytest.mark.long
@pytest.mark.parametrize("precision", ["nf4", "bf16"])
@pytest.mark.parametrize(("family", "shape"), SHAPES)
def test_every_family_is_exact(family: str, shape: str, precision: str) -> None:
    record = gate(storages=None, family=family, shape=shape, precision=precision).record
    assert (record["verdict"], record["mismatched"]) == ("exact", 0)


def test_the_command(tmp_path: Path) -> None:
    from poros.cli import app

    def run(*arguments: str) -> Any:
        flags = ["gate", "--load", "--family", "qwen2", "--shape", "tiny", "--precision", "bf16"]
        return CliRunner().invoke(app, [*flags, *arguments])

    done = run("--json", str(tmp_path / "record.json"))
    assert done.exit_code == 0, done.output
    assert "all bytes equal" in done.stdout
    assert json.loads((tmp_path / "record.json").read_text())["mismatched"] == 0
    failed = run("--plant-fault")
    assert failed.exit_code == 1
    assert "diverged: 1 of" in failed.stdout
    for flags in (["--steps", "3"], ["--against", "x"]):
        refused = run(*flags)
        assert isinstance(refused.exception, GateError)
        assert "trains nothing" in str(refused.exception)
