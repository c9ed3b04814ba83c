"""The contract kit: what a family must pass, ours and anyone else's.

A plugin author's whole test::

    from poros_core.conformance import check_family


    def test_conformance() -> None:
        check_family("llama")

``check_family`` is made of the finer checks below, which all work on one ``Bench``.
"""

from __future__ import annotations

from collections.abc import Sequence

from poros_core.conformance.bench import BLOCK_SIZES, Bench, BlockSize, ConformanceError, bench
from poros_core.conformance.checks import (
    check_evaluation,
    check_load_bytes,
    check_planted_fault,
    check_training,
    check_unprepare,
)
from poros_core.conformance.manifest import tensor_manifest

__all__ = [
    "BLOCK_SIZES",
    "Bench",
    "ConformanceError",
    "bench",
    "check_evaluation",
    "check_family",
    "check_load_bytes",
    "check_planted_fault",
    "check_training",
    "check_unprepare",
    "tensor_manifest",
]


def check_family(
    name: str,
    *,
    shapes: Sequence[str] = ("tiny",),
    precision: str = "nf4",
    block_sizes: Sequence[BlockSize] = BLOCK_SIZES,
    steps: int = 2,
    dropout: float = 0.1,
) -> None:
    """Run every check on random weights at some shapes of an installed family.

    Takes some ten seconds for a tiny shape on a CPU; nothing is downloaded.

    Args:
        name: the family's name.
        shapes: which of its shapes.
        precision: of the base.
        block_sizes: which block sizes the training check runs.
        steps: optimizer steps of the training check, of two micro-batches each.
        dropout: of the adapters, and of the attention where the architecture has it.

    Raises:
        ConformanceError: a check failed.
        GateError: there is no such family or shape.
    """
    for shape in shapes:
        with bench(
            name,
            shape=shape,
            precision=precision,
            block_sizes=block_sizes,
            steps=steps,
            dropout=dropout,
        ) as opened:
            check_load_bytes(opened)
            check_evaluation(opened)
            check_training(opened)
            check_planted_fault(opened)
            check_unprepare(opened)
