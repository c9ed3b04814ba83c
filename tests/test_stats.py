"""Live figures: from made-up times and totals, from a model, and in a Trainer's log."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

import poros
from poros_core import stats as module
from poros_core.prepare import prepared_of
from poros_core.stats import RECENT, StepClock, tokens_in
from poros_families.qwen2 import QWEN2


def adapted() -> Any:
    torch.manual_seed(0)
    settings = {k: v for k, v in QWEN2.shapes["tiny"].items() if k != "model_type"}
    base = AutoModelForCausalLM.from_config(Qwen2Config(**settings))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def batch(width: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 96, (2, width), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


class Fixed:
    """A handle with a clock of its own and totals that stand where they are put."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.totals = dict.fromkeys(("bytes_streamed", "copies", "eager_blocks"), 0)
        self.totals |= {"graph_replays": 0, "resident_units": 3}

    def counters(self) -> dict[str, int]:
        return self.totals

    def detach(self, device: torch.device | None) -> None:
        raise NotImplementedError


def figures_of(
    clock_times: list[float],
    rises: list[tuple[int, int, int]],
    stalled: Sequence[float | None] = (),
) -> module.Stats:
    waited = iter(stalled)
    times: Iterator[float] = iter(clock_times)
    handle = Fixed(StepClock(now=lambda: next(times)))
    model = poros.prepare(adapted(), runtime="resident", verbose=False)
    prepared = prepared_of(model)
    assert prepared is not None
    model.__dict__["_poros_prepared"] = attrs.evolve(prepared, handle=handle)
    for nbytes, replayed, eager in [(0, 0, 0), *rises]:
        handle.totals["bytes_streamed"] += nbytes
        handle.totals["graph_replays"] += replayed
        handle.totals["eager_blocks"] += eager
        handle.clock.mark(handle.counters(), tokens=100, stalled=next(waited, None))
    return module.stats(model)


def test_figures_are_medians_of_the_steps() -> None:
    gigabyte = 10**9
    found = figures_of(
        [10.0, 10.5, 11.0, 71.0], [(2 * gigabyte, 0, 8), (2 * gigabyte, 8, 0), (3 * gigabyte, 8, 0)]
    )
    assert found == module.Stats(
        steps=3,
        step_seconds=0.5,
        tokens_per_second=200.0,
        bytes_streamed_per_step=2 * gigabyte,
        link_gb_per_second=4.0,
        stalled_share=None,
        peak_bytes=None,
        resident_units=3,
        graph_share=16 / 24,
    )
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        found.steps = 4  # type: ignore[misc]


def test_only_the_last_steps_count() -> None:
    slow, fast = 4, RECENT
    times = [10.0 * i for i in range(slow + 1)]
    times += [times[-1] + 0.25 * (i + 1) for i in range(fast)]
    found = figures_of(times, [(8, 0, 4)] * slow + [(4, 4, 0)] * fast)
    assert (found.steps, found.step_seconds) == (slow + fast, 0.25)
    assert (found.bytes_streamed_per_step, found.graph_share) == (4, 1.0)


@pytest.mark.parametrize("rises", [[], [(0, 0, 0)]])
def test_what_is_not_known_is_none(rises: list[tuple[int, int, int]]) -> None:
    found = figures_of([1.0, 2.0], rises)
    assert found.steps == len(rises)
    assert found.graph_share is None
    assert found.step_seconds == (1.0 if rises else None)
    assert found.bytes_streamed_per_step == (0 if rises else None)


def test_the_share_that_kernels_waited() -> None:
    found = figures_of([0.0, 1.0, 3.0], [(0, 0, 0)] * 2, stalled=[0.5, 0.75, 1.5])
    assert found.stalled_share == pytest.approx(1.0 / 3.0)
    assert figures_of([0.0, 1.0], [(0, 0, 0)], stalled=[None, 1.0]).stalled_share is None


def test_tokens_in() -> None:
    ids = torch.zeros(2, 7, dtype=torch.long)
    assert tokens_in([ids], {}) == tokens_in([], {"input_ids": ids}) == 14
    assert tokens_in([], {"input_ids": None, "inputs_embeds": torch.zeros(3, 5, 8)}) == 15
    assert tokens_in([], {}) == 0


def test_figures_of_a_streamed_model() -> None:
    model = poros.prepare(adapted(), verbose=False)
    assert poros.stats(model).steps == 0
    prepared = prepared_of(model)
    assert prepared is not None
    streamed = [prepared.handle.counters()["bytes_streamed"]]
    for _ in range(4):
        model(**batch()).loss.backward()
        with torch.no_grad():
            model(**batch(5))
        streamed.append(prepared.handle.counters()["bytes_streamed"])
    found = poros.stats(model)
    # the last has not ended: no forward came after it
    assert found.steps == 3
    assert found.bytes_streamed_per_step == streamed[3] - streamed[2] > 0
    assert found.step_seconds is not None
    assert found.step_seconds > 0
    assert found.tokens_per_second == pytest.approx(12 / found.step_seconds)
    assert found.link_gb_per_second is not None
    assert found.link_gb_per_second > 0
    assert (found.resident_units, found.graph_share, found.peak_bytes) == (0, 0.0, None)


def test_a_model_that_is_not_prepared() -> None:
    with pytest.raises(poros.PrepareError, match="not prepared"):
        poros.stats(adapted())
    model = poros.prepare(adapted(), verbose=False)
    with pytest.raises(poros.PrepareError, match="Pass the object"):
        poros.stats(model.get_base_model())


class Later(TrainerCallback):
    """Keeps what a callback after ours sees."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


def trainer(model: Any, folder: Path, later: Later) -> Trainer:
    rows = [{"input_ids": [3 + i] * 6, "labels": [3 + i] * 6} for i in range(8)]
    arguments = Arguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    return Trainer(model, arguments, train_dataset=rows, callbacks=[poros.StatsCallback(), later])


@pytest.mark.filterwarnings("ignore")
def test_the_callback_adds_to_the_log(tmp_path: Path) -> None:
    later = Later()
    loop = trainer(poros.prepare(adapted(), verbose=False), tmp_path, later)
    loop.train()
    for logs in (later.logs, loop.state.log_history):
        steps = [entry["poros_steps"] for entry in logs if "loss" in entry]
        assert steps == [0, 1, 2, 3]
        assert "poros_step_seconds" not in logs[0]
        assert logs[3]["poros_bytes_streamed_per_step"] > 0
        assert "poros_stalled_share" not in logs[3]
        assert not [name for name in logs[-1] if name.startswith("poros_")]


@pytest.mark.filterwarnings("ignore")
def test_the_callback_wants_a_prepared_model(tmp_path: Path) -> None:
    with pytest.raises(poros.PrepareError, match="not prepared"):
        trainer(adapted(), tmp_path, Later()).train()


def test_stats_do_not_need_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names are resolved anew, and found by later tests as they were."""
    for name, home in (("stats", "stats"), ("StatsCallback", "stats_callback")):
        assert getattr(poros, name)
        monkeypatch.delitem(vars(poros), name, raising=False)
        monkeypatch.delitem(sys.modules, f"poros_core.{home}")
        monkeypatch.delattr(sys.modules["poros_core"], home)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert poros.stats is not module.stats
    with pytest.raises(ImportError, match="needs transformers"):
        _ = poros.StatsCallback
