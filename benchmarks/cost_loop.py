"""The plain training loop that training's cost is measured on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from cost_figures import Stopwatch, adamw, figures_of, the_loss, totals
from cost_work import Work
from device_figures import DeviceMemory
from profiled_steps import HOST_STEPS, profiled, wake_profiler


def _batches(work: Work, device: torch.device) -> list[dict[str, torch.Tensor]]:
    subject = work.subject()
    generator = torch.Generator().manual_seed(work.seed)
    shape = (subject.batch, subject.seq_len)
    extra = HOST_STEPS + work.profiled if work.profiled else 0
    made = []
    for _ in range(work.warmup + work.steps + extra):
        ids = torch.randint(3, subject.vocabulary, shape, generator=generator).to(device)
        made.append({"input_ids": ids, "labels": ids})
    return made


class Loop:
    """The plain training loop of one model."""

    def __init__(self, work: Work, model: Any, device: torch.device) -> None:
        self.model = model
        self.watch = Stopwatch(device)
        self.losses: list[torch.Tensor] = []
        self.optimizer, self.host_state = adamw(work, model)
        self._batches = iter(_batches(work, device))
        torch.manual_seed(work.seed + 1)

    def run(self, steps: int) -> Iterator[None]:
        """Train; yields after each step, at its mark."""
        model, optimizer = self.model, self.optimizer
        for _ in range(steps):
            batch = next(self._batches)
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.watch.mark()
            self.losses.append(outputs.loss.detach())
            yield  # ``outputs`` is held until the next forward has returned, as in a plain loop


def train(work: Work, model: Any, device: torch.device, memory: DeviceMemory) -> dict[str, Any]:
    """Train and return the figures."""
    if work.profiled:
        wake_profiler(device)
    with the_loss(work, model):
        loop = Loop(work, model, device)
        with memory.watching():
            for _ in loop.run(work.warmup - 1):
                memory.look()
        for _ in loop.run(1):  # its mark starts the first timed step
            pass
        first = totals(model)
        for _ in loop.run(work.steps):
            pass
        last = totals(model)
        seconds = loop.watch.seconds()[work.warmup - 1 :]
    found = figures_of(
        work,
        model,
        seconds=seconds,
        first=first,
        last=last,
        host_state=loop.host_state,
        memory=memory,
        device=device,
    )
    losses = [loss.item() for loss in loop.losses]
    if not work.profiled:
        return {**found, "losses": losses}
    with the_loss(work, model):
        return {**found, "losses": losses, "profile": profiled(loop, work.profiled, device)}
