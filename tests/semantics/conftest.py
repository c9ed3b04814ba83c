"""A tokenizer for the tiny checkpoints, and Accelerate as a new process finds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from semantics.arms import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Give a word-level tokenizer of the tiny vocabulary."""
    return tiny_tokenizer()


@pytest.fixture
def new_accelerate() -> Iterator[None]:
    """Forget the precision that another test of this process gave Accelerate, and this test's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
