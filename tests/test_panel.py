"""What the panel of ``prepare`` says of a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import poros
from poros_core.host_memory import layout
from poros_core.panel import panel_lines
from poros_core.plan import build_plan
from poros_core.plugins import plugins
from poros_core.prepare import prepared_of
from poros_core.settings import Settings
from poros_families.qwen2 import QWEN2

CPU = torch.device("cpu")
RIGHT = "the plain resident path, without poros.prepare(), remains the right choice"


def tiny() -> Any:
    config = AutoConfig.for_model(**QWEN2.shapes["tiny"])
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))


def said(model: Any, budget: int | str | None) -> str | None:
    plan = build_plan(model, family=QWEN2, codecs=plugins().codecs(), device=CPU)
    settings: Any = Settings(vram_budget=budget)  # type: ignore[arg-type]
    return dict(panel_lines(model, family=QWEN2, plan=plan, settings=settings)).get("vram_budget")


def test_the_resident_path_is_the_right_choice_from_where_all_fits() -> None:
    model = tiny()
    plan = build_plan(model, family=QWEN2, codecs=plugins().codecs(), device=CPU)
    base = sum(layout(unit.refs)[1] for unit in plan.units())
    trained = sum(p.nbytes + 12 * p.numel() for p in model.parameters() if p.requires_grad)
    fits, short = said(model, base + trained), said(model, base + trained - 1)
    assert fits is not None
    assert short is not None
    assert RIGHT in fits
    assert RIGHT not in short
    assert short.endswith(f"the base takes {base / 1e9:.2f} GB")
    assert said(model, None) is None
    assert said(model, "auto") == "auto"


def test_auto_is_judged_by_what_the_device_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 2_000_000_000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 10**11))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10**9)
    plan: Any = type("Plan", (), {"device": torch.device("cuda:0"), "units": lambda self: []})()
    from poros_core.panel import _budget

    model: Any = torch.nn.Linear(2, 2)
    [(_, roomy)] = _budget(model, plan, Settings(vram_budget="auto"))
    assert roomy.startswith("auto, 3.00 GB now")
    assert RIGHT in roomy
    free["bytes"] = -500_000_000  # less than a context takes
    [(_, full)] = _budget(model, plan, Settings(vram_budget="auto"))
    assert RIGHT not in full


def test_with_everything_resident_only_the_head_is_copied() -> None:
    """Slots and head share one arena, so that it is let go after each use; layers stay."""
    model = poros.prepare(tiny(), vram_budget="1GB", verbose=False)
    prepared = prepared_of(model)
    assert prepared is not None
    ids = torch.ones(1, 4, dtype=torch.long)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    seen = []
    for _ in range(4):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(dict(prepared.handle.counters()))
    before, after = seen[-2:]
    assert after["resident_units"] == len(prepared.plan.layers)
    assert after["copies"] - before["copies"] == 1
    assert prepared.plan.head is not None
    head = layout(prepared.plan.head.refs)[1]
    assert after["bytes_streamed"] - before["bytes_streamed"] == head
    blocks = len(prepared.plan.layers)
    assert after["eager_blocks"] - before["eager_blocks"] == 2 * blocks, "one forward, one backward"
