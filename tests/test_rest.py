"""What does not stream goes to the device, with all that it consists of."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from poros_core import rest
from poros_core.plugins import plugins

CPU = torch.device("cpu")
CODECS = [codec for codec, _ in plugins().codecs()]


class Tower(nn.Module):
    """A quantised weight, a plain one, one that no codec knows, and a buffer."""

    def __init__(self, *, double: bool) -> None:
        super().__init__()
        self.quantised: Any = bnb.nn.Linear4bit(
            64, 64, bias=False, quant_type="nf4", compress_statistics=double
        ).to("cpu")
        self.plain = nn.Linear(8, 8)
        self.tied = self.plain
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("table", torch.ones(2))


@pytest.mark.parametrize("double", [False, True])
def test_a_quantised_weight_is_moved_with_its_state(
    double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    def note(tensor: torch.Tensor, device: torch.device, *, own: bool) -> torch.Tensor:
        moved.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(rest, "_moved", note)
    tower, layer = Tower(double=double), Tower(double=double)
    state = tower.quantised.weight.quant_state
    parts = [tower.quantised.weight.data, state.absmax, state.code, tower.index]
    parts += [tower.plain.weight, tower.plain.bias]
    if double:
        parts += [state.offset, state.state2.absmax, state.state2.code]
    parts = [part.detach() for part in parts]  # their memory is not to be used again
    expected = sorted(part.data_ptr() for part in parts)
    rest.move_the_rest(
        nn.ModuleList([tower, layer]),
        codecs=CODECS,
        streamed=set(map(id, layer.parameters())),
        device=CPU,
    )
    assert sorted(moved) == expected
    assert state.absmax.data_ptr() not in expected, "what was moved is bound"


def test_what_the_host_store_holds_gets_memory_of_its_own() -> None:
    tower = Tower(double=False)
    weight = tower.quantised.weight
    plain, absmax = tower.plain.weight.data_ptr(), weight.quant_state.absmax.data_ptr()
    data = weight.data_ptr()
    held = {(id(tower.plain.weight), "data"), (id(weight.quant_state), "absmax")}
    rest.move_the_rest(tower, codecs=CODECS, streamed=(), device=CPU, held=held.__contains__)
    assert tower.plain.weight.data_ptr() != plain
    assert weight.quant_state.absmax.data_ptr() != absmax
    assert weight.data_ptr() == data
