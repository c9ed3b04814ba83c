"""Negative controls: each planted defect is found by a gate, and gone once it is removed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from poros.cli.gate_matrix import in_this_process
from poros_core.errors import GateError
from poros_core.gate import GateOptions
from poros_core.gate.matrix import Row, read_matrix
from poros_core.gate.matrix_run import Outcome, run_matrix
from poros_core.gate.modes import Modes
from poros_core.gate.run import run_gate
from poros_core.settings import Settings

ROWS = [row for row in read_matrix("controls") if row.device == "any"]
QUICK = [row for row in ROWS if not row.settings.get("compile")]
WHERE = {
    # a wrong weight or a read that comes too early is in the forward; what only the recompute
    # gets wrong leaves the loss alone and is in the gradients
    "flipped-bit": "loss",
    "early-read": "loss",
    "no-grad-forward": "loss",
    "rng-not-restored": "grad_norms",
    "late-arguments": "grad_norms",
    "autocast-not-restored": "grad_norms",
}


class Watch:
    def begins(self, row: Row) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


def run(row: Row) -> Outcome:
    (outcome,) = run_matrix([row], run=in_this_process, observer=Watch(), cuda=False)
    return outcome


def options(**changes: Any) -> GateOptions:
    given = {"family": "qwen2", "shape": "tiny", "layers": 2, "steps": 2, **changes}
    return GateOptions(**given)


def everything(**changes: Any) -> GateOptions:
    """What makes every fault matter: dropout, autocast, and two forwards with different masks."""
    return options(
        dropout=0.1,
        accumulate=2,
        backward="joint",
        padding="left",
        modes=Modes(autocast="bf16"),
        **changes,
    )


def test_without_a_fault_the_gate_is_exact() -> None:
    assert run_gate(everything()).verdict == "exact"


@pytest.mark.parametrize("name", [row.settings["plant"] for row in QUICK])
def test_a_fault_is_found(name: str) -> None:
    result = run_gate(everything(plant=name))
    assert (result.verdict, result.record["control_exact"]) == ("diverged", True)
    assert result.divergence is not None
    assert (result.divergence.step, result.divergence.surface) == (1, WHERE[name])
    assert result.record["surfaces"]["loss"]["exact"] is (WHERE[name] != "loss")
    assert f"'{name}'" in str(result.record["planted_fault"]) or name == "flipped-bit"


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_control_is_caught_and_gone_once_its_fault_is_removed(row: Row) -> None:
    outcome = run(row)
    assert outcome.status == "caught", outcome
    assert outcome.record is not None
    found, faulty, clean = (outcome.record[name] for name in ("found", "faulty", "clean"))
    assert (found["step"], found["surface"]) == (1, WHERE[row.settings["plant"]])
    assert (faulty["verdict"], faulty["control_exact"]) == ("diverged", True)
    assert (clean["verdict"], clean["planted_fault"]) == ("exact", None)


@pytest.mark.gpu
@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.settings["plant"])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_control_is_caught_on_a_gpu(row: Row, graphs: str) -> None:
    row = attrs.evolve(row, settings={**row.settings, "graphs": graphs})
    outcome = run(row)
    assert outcome.status == "caught", outcome


def test_random_numbers_matter_only_with_dropout() -> None:
    result = run_gate(options(plant="rng-not-restored"))
    assert (result.verdict, result.exit_status) == ("void", 2)
    assert result.void_reasons == [
        "rng-not-restored was planted and nothing diverged, so the gate cannot fail"
    ]


def test_a_runtime_that_does_not_stream_cannot_be_disturbed() -> None:
    with pytest.raises(GateError, match="runtime 'resident' has nothing to disturb"):
        run_gate(options(plant="early-read", settings=Settings(runtime="resident")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plant": "gremlins"}, "--plant must be 'flipped-bit', .* or 'autocast-not-restored'"),
        ({"backward": "joint"}, "give --accumulate 2 or more"),
        ({"backward": "block-major"}, "give --accumulate 2 or more, and --dropout 0"),
        ({"plant": "early-read", "plant_fault": True}, "either --plant or --plant-fault"),
        ({"resume_at": 2}, "--resume-at must be a step before the last, from 1 to 1; got 2"),
        ({"layers": "many"}, "--layers must be a number"),
        ({"layers": 5}, "--layers 5 is more than the 4 layers"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GateError, match=message):
        run_gate(options(**changes))
