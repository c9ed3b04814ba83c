"""Small prepared models with graphs, and a capturer that runs the captured function again instead
of a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import poros
from poros_core.prepare import prepared_of
from poros_families.qwen2 import QWEN2
from poros_runtimes.streamed.graph_entries import BackwardEntry, ForwardEntry
from poros_runtimes.streamed.graphs import GraphExecutor

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class Again:
    """Runs the captured function again, as a graph's replay runs its kernels."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body


class FunctionCapturer:
    """Runs functions again. Those whose numbers are in ``fails`` cannot be captured, and raise."""

    def __init__(
        self, *, fails: Container[int] = (), error: type[BaseException] = RuntimeError
    ) -> None:
        self.tried = 0
        self.captured = 0
        self.lendings = 0
        self.settled = 0
        self.reserved: list[torch.Tensor] = []
        self._fails = fails
        self._error = error

    def capture(self, body: Callable[[], None]) -> Again:
        self.tried += 1
        if self.tried - 1 in self._fails:
            torch.rand(7)
            raise self._error("operation not permitted when stream is capturing")
        self.captured += 1
        return Again(body)

    def has_room(self) -> bool:
        return True

    def lent(self) -> AbstractContextManager[None]:
        self.lendings += 1
        return nullcontext()

    def settle(self) -> None:
        self.settled += 1

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """Give memory that is poisoned whenever the head is bound, as an arena's may be."""
        if nbytes < 600:
            return None
        memory = torch.empty(-(-nbytes // 512) * 512, dtype=torch.uint8)
        self.reserved.append(memory)
        return memory


class RunningCapturer(FunctionCapturer):
    """Runs what it captures, as a capture does: only its kernels wait for the replay."""

    def capture(self, body: Callable[[], None]) -> Again:
        graph = super().capture(body)
        body()
        return graph


def spoiling(capturer: FunctionCapturer, end_forward: Any, *args: Any, **kwargs: Any) -> None:
    """Bind the head, which takes the memory that was reserved."""
    end_forward(*args, **kwargs)
    for memory in capturer.reserved:
        memory.fill_(0xFF)


def make(
    device: torch.device = CPU,
    *,
    capturer: FunctionCapturer | None = None,
    graphs: bool = True,
    offload: bool = False,
    shape: Mapping[str, Any] = QWEN2.shapes["tiny"],
    target: str = "all-linear",
    block_size: int = 1,
    settled: bool = False,
    patch: Callable[[Any], None] | None = None,
) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**shape, "attention_dropout": 0.1})
    base = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=target)
    model: Any = get_peft_model(base, lora).train()
    if patch is not None:
        patch(base)
    poros.prepare(
        model,
        verbose=False,
        device=device,
        graphs="auto" if graphs else "off",
        offload_activations=offload,
        block_size=block_size,
    )
    if graphs and device.type == "cpu":
        handle = handle_of(model)
        units = handle.units
        capturer = capturer or FunctionCapturer()
        units.graphs = GraphExecutor(units.eager, CPU, capturer, settled=lambda: settled)
        units.end_forward = partial(spoiling, capturer, units.end_forward)
    return model


def handle_of(model: Any) -> Any:
    prepared = prepared_of(model)
    assert prepared is not None
    return prepared.handle


def batch(seed: int, device: torch.device, *, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 96, (2, length), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[0, : 1 + seed % 4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    loss = model(**batch(step, device)).loss
    loss.backward()
    return [loss.detach()]


Script = Callable[[Any, int, torch.device], list[torch.Tensor]]


def run(model: Any, script: Script, device: torch.device, *, steps: int = 4) -> list[torch.Tensor]:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    torch.manual_seed(5)
    found: list[torch.Tensor] = []
    for step in range(steps):
        found += script(model, step, device)
        found += [p.grad.clone() for p in params]
        found.append(torch.nn.utils.clip_grad_norm_(params, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in params), torch.get_rng_state()]


def later(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
    """A length that comes when another one has come often, and goes on coming."""
    loss = model(**batch(step, device, length=12 if step < 3 or step == 4 else 20)).loss
    loss.backward()
    return [loss.detach()]


def counted_run(
    model: Any, script: Script, device: torch.device
) -> tuple[list[int], list[torch.Tensor]]:
    """Run six steps, and return how many blocks ran eagerly in each, and what came out."""
    counts = [0]

    def counted(model: Any, step: int, device: torch.device) -> list[torch.Tensor]:
        found = script(model, step, device)
        counts.append(handle_of(model).counters()["eager_blocks"])
        return found

    found = run(model, counted, device, steps=6)
    return [after - before for before, after in pairwise(counts)], found


def graphs_kept(model: Any) -> int:
    """Return how many graphs there are, those that only a backward to come could ask for too."""
    gc.collect()
    return sum(
        thing.graph is not None
        for thing in gc.get_objects()
        if type(thing) in (ForwardEntry, BackwardEntry)
    )
