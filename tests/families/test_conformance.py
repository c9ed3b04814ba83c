"""Every family passes the contract kit, at every tiny shape."""

from __future__ import annotations

import pytest

from poros_core.conformance import BLOCK_SIZES, check_family
from poros_families import poros_families

CASES = [
    (family.name, shape)
    for family in poros_families()
    for shape in family.shapes
    if shape.startswith("tiny")
]
SIZES = {("gemma4", "tiny-e2b"): (1, 2, 3, 4), ("qwen2", "tiny-sliding"): (1, 2)}
SLOW = {("gemma4", "tiny-e2b-multimodal"), ("qwen2", "tiny-sliding")}
"""Of the first, what test_images.py trains it on, and the decoder alone, are fast tests; of the
second, the gate of test_gate.py is one."""


def test_the_cases_cover_text_and_multimodal_models() -> None:
    assert {family for family, shape in CASES if shape == "tiny"} == {
        "qwen2",
        "qwen3",
        "qwen3_5",
        "gemma3",
        "gemma4",
    }
    assert {family for family, shape in CASES if shape == "tiny-multimodal"} == {
        "qwen3_5",
        "gemma3",
        "gemma4",
    }
    assert {("qwen2", "tiny-sliding"), ("gemma4", "tiny-e2b")} <= set(CASES)
    assert set(CASES) >= SLOW


@pytest.mark.parametrize(
    ("family", "shape"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES],
)
def test_conformance(family: str, shape: str) -> None:
    check_family(family, shapes=(shape,), block_sizes=SIZES.get((family, shape), BLOCK_SIZES))
