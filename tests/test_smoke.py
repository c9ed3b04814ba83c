"""A smoke of every family, small enough to run again on the oldest Transformers that is supported.

``make test`` runs it there (see the Makefile), in an environment that differs in nothing else.
"""

from __future__ import annotations

import os

import pytest
import transformers

from poros_core.conformance import bench, check_load_bytes, check_training

OLDEST = "5.17"
CASES = [
    ("qwen2", "tiny"),
    ("qwen3", "tiny"),
    ("qwen3_5", "tiny"),
    ("gemma3", "tiny"),
    ("gemma4", "tiny"),
    ("gemma4", "tiny-e2b"),
]


@pytest.mark.oldest
def test_the_version_is_the_one_meant() -> None:
    assert transformers.__version__.startswith(os.environ.get("POROS_TEST_TRANSFORMERS", OLDEST))


@pytest.mark.oldest
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_a_family_loads_and_trains_exactly(family: str, shape: str) -> None:
    with bench(family, shape=shape, block_sizes=(2,), steps=2) as opened:
        check_load_bytes(opened)
        check_training(opened)
