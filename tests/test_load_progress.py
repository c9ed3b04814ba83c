"""What a load tells while it runs and at the end, and weights that nothing can be trained on."""

from __future__ import annotations

import io
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checkpoint import bnb_config, rewrite, write_checkpoint
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging as library

import poros
from poros_core.conformance.manifest import tensor_manifest
from poros_core.finite import FiniteCheck
from poros_core.load_bar import LoadBar, report_lines
from poros_core.load_progress import LoadMeter, LoadReport, host_memory
from poros_loaders.read_ahead import ReadAhead

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


class Watch:
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.totals: list[int] = []
        self.done_bytes: list[int] = []
        self.report: LoadReport | None = None

    def stage(self, title: str, total: int) -> None:
        self.stages.append(title)
        self.totals.append(total)
        self.done_bytes.append(0)

    def advance(self, nbytes: int) -> None:
        assert nbytes >= 0
        self.done_bytes[-1] += nbytes

    def done(self, report: LoadReport) -> None:
        assert self.report is None
        self.report = report


@pytest.mark.parametrize("host", ["pinned", "mmap"])
def test_an_observer_is_told_everything(checkpoint: Path, tmp_path: Path, host: str) -> None:
    first, second = Watch(), Watch()
    for watch in (first, second):
        model: Any = poros.load(
            checkpoint, cache=tmp_path / "cache", host=host, device="cpu", observer=watch
        )
    placing = ["placing the base"] if host == "pinned" else []
    assert first.stages == ["reading the checkpoint", *placing, "writing the cache"]
    assert second.stages == ["reading the cache"]
    for watch in (first, second):
        for stage, done, total in zip(watch.stages, watch.done_bytes, watch.totals, strict=True):
            assert 0.5 * total < done <= 1.2 * total, stage  # a tiny shape is mostly alignment
        report = watch.report
        assert report is not None
        assert report.host == host
        assert report.host_bytes == model.__dict__["_poros_store"].nbytes
        assert report.device_bytes == 64 * 2
        assert report.device_peak_bytes is None
        assert report.seconds > 0
        assert model.__dict__["_poros_store"].report == second.report or watch is first
    assert first.report is not None
    assert second.report is not None
    assert first.report.source == "checkpoint"
    assert first.report.read_bytes == (checkpoint / "model.safetensors").stat().st_size
    assert second.report.source == "cache"
    assert second.report.read_bytes >= second.report.host_bytes


def test_the_end_is_an_event(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="poros.load")
    poros.load(checkpoint, device="cpu")
    (text,) = [r.getMessage() for r in caplog.records if "'loaded'" in r.getMessage()]
    for word in ("source='checkpoint'", "host='pinned'", "host_peak_bytes=", "seconds="):
        assert word in text


def test_verbose_prints_on_standard_error(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library.enable_progress_bar()
    poros.load(checkpoint, device="cpu")
    quiet = capsys.readouterr()
    assert quiet.out == ""
    assert "GB" not in quiet.err
    poros.load(checkpoint, device="cpu", verbose=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert "from the checkpoint" in told.err
    assert "Loading weights" not in told.err
    assert library.is_progress_bar_enabled()


def test_the_bar_shows_speed_and_time_left() -> None:
    text = io.StringIO()
    with LoadBar(Console(file=text, force_terminal=True, width=120)) as bar:
        bar.stage("reading the checkpoint", 4_000_000)
        for _ in range(2):
            time.sleep(0.02)
            bar.advance(500_000)
        bar._progress.refresh()
        bar.stage("placing the base", 1000)
        bar.advance(1000)
    assert "reading the checkpoint" in text.getvalue()
    assert "1.0/4.0 MB" in text.getvalue()
    assert "/s" in text.getvalue()
    assert "placing the base" in text.getvalue()


def test_what_is_said_at_the_end() -> None:
    report = LoadReport(
        source="cache",
        host="mmap",
        read_bytes=3_000_000_000,
        host_bytes=2_500_000_000,
        device_bytes=1000,
        seconds=2.0,
        host_peak_bytes=700_000_000,
        host_steady_bytes=600_000_000,
        device_peak_bytes=200_000_000,
    )
    text = "\n".join(report_lines(report))
    for word in ("3.00 GB from the cache", "1.50 GB/s", "files of the cache", "600.00 MB now"):
        assert word in text


def test_the_meter_follows_memory_that_stays_and_memory_that_goes() -> None:
    size = 40_000_000
    assert host_memory() is not None
    with LoadMeter(CPU) as meter:
        kept = torch.ones(size, dtype=torch.uint8)
        gone = torch.ones(2 * size, dtype=torch.uint8)
        meter._stop.wait(0.1)
        del gone
        report = meter.report(source="", host="", read_bytes=0, host_bytes=0, device_bytes=0)
    assert report.host_peak_bytes is not None
    assert report.host_steady_bytes is not None
    assert 2.8 * size < report.host_peak_bytes < 3.5 * size
    assert 0.8 * size < report.host_steady_bytes < 1.5 * size
    assert kept.nbytes == size


@pytest.mark.parametrize(
    ("name", "precision", "value"),
    [(Q, "nf4", float("nan")), (Q, "nf4", float("-inf")), (NORM, "bf16", float("nan"))],
)
def test_weights_that_are_not_finite_are_named(
    checkpoint: Path, tmp_path: Path, name: str, precision: str, value: float
) -> None:
    rewrite(checkpoint, lambda tensors: tensors[name].view(-1)[-3:].fill_(value))
    with pytest.raises(poros.CheckpointError, match="1 weights") as caught:
        poros.load(checkpoint, precision=precision, cache=tmp_path / "cache", device="cpu")
    assert f"{name} ({'NaN' if value != value else 'infinite'})" in str(caught.value)
    assert "download the checkpoint again" in str(caught.value)


def test_a_base_that_is_not_finite_is_not_kept(checkpoint: Path, tmp_path: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors[EMBEDDING][3].fill_(float("inf")))
    for host in ("pinned", "pageable", "mmap"):
        with pytest.raises(poros.CheckpointError, match="embed_tokens"):
            poros.load(checkpoint, host=host, cache=tmp_path / host, device="cpu")
        assert not (tmp_path / host).exists() or list((tmp_path / host).iterdir()) == []


def test_a_damaged_scale_of_a_prequantised_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    model: Any = poros.load(checkpoint, device="cpu")
    model.save_pretrained(tmp_path / "nf4")
    rewrite(tmp_path / "nf4", lambda tensors: tensors[f"{Q}.absmax"][0].fill_(float("nan")))
    with pytest.raises(poros.CheckpointError, match=r"q_proj\.weight\.absmax \(NaN\)"):
        poros.load(tmp_path / "nf4", device="cpu")


def test_many_are_counted() -> None:
    check = FiniteCheck()
    for number in range(8):
        check.add(f"w{number}", torch.full((2, 2), float("nan"), dtype=torch.float16))
    check.add("codes", torch.zeros(3, dtype=torch.uint8))
    check.add("empty", torch.zeros(0))
    check.add("good", torch.ones(3))
    with pytest.raises(poros.CheckpointError, match="8 weights.* and 3 more"):
        check.refuse(Path("here"))


@pytest.mark.parametrize("host", ["mmap"])
def test_a_checkpoint_that_is_4_bit_in_part(checkpoint: Path, tmp_path: Path, host: str) -> None:
    config = bnb_config(double=True, storage=torch.uint8, compute=torch.bfloat16)
    config.llm_int8_skip_modules = ["lm_head", "down_proj"]
    model: Any = poros.load(checkpoint, quantization_config=config, device="cpu")
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "part")
    wanted = tensor_manifest(AutoModelForCausalLM.from_pretrained(tmp_path / "part"))
    assert tensor_manifest(model) == wanted
    for _ in range(2):
        again = poros.load(tmp_path / "part", host=host, cache=tmp_path / "cache", device="cpu")
        assert tensor_manifest(again) == wanted


class TestReadAhead:
    def files(self, folder: Path) -> list[Path]:
        paths = [folder / name for name in "abc"]
        for path in paths:
            path.write_bytes(bytes(10_000))
        return paths

    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        calls: list[tuple[int, int]] = []
        monkeypatch.setattr(
            os, "posix_fadvise", lambda handle, begin, count, advice: calls.append((begin, count))
        )
        return calls

    def wait(self, calls: list[Any], count: int) -> None:
        end = time.monotonic() + 5
        while len(calls) < count and time.monotonic() < end:
            time.sleep(0.001)

    def test_everything_is_asked_for_in_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = self.asked(monkeypatch)
        with ReadAhead(self.files(tmp_path), step=4096):
            self.wait(calls, 9)
        assert calls == [(begin, 4096) for begin in (0, 4096, 8192)] * 3

    def test_it_stays_within_its_window(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = self.asked(monkeypatch)
        with ReadAhead(self.files(tmp_path), step=4096, window=8192) as ahead:
            self.wait(calls, 2)
            time.sleep(0.05)
            assert len(calls) == 2
            ahead.advance(4096)
            self.wait(calls, 3)
            time.sleep(0.05)
            assert len(calls) == 3

    def test_a_file_that_is_gone_ends_it(self, tmp_path: Path) -> None:
        with ReadAhead([tmp_path / "nowhere"]) as ahead:
            ahead._thread.join(5)
            assert not ahead._thread.is_alive()
