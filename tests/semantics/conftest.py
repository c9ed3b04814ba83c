"""A tokenizer for the tiny checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from semantics.arms import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Give a word-level tokenizer of the tiny vocabulary."""
    return tiny_tokenizer()
