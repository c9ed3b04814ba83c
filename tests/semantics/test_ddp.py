"""DistributedDataParallel over gloo: gradients of both ranks are the resident ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from semantics.arms import NF4, Arm, batches, build, compare, play


def _work(rank: int, world: int, folder: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    build(NF4)  # first: with a process group only rank 0 would write the checkpoint
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )

    def script(arm: Arm) -> None:
        wrapped = DistributedDataParallel(arm.model, **options)
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(4, seed=rank)):
            if number % 2 == 0:
                with wrapped.no_sync():
                    wrapped(**batch).loss.backward()
                continue
            loss = wrapped(**batch).loss
            loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    arms = [play(script, NF4, streamed=streamed, late=False) for streamed in (False, True)]
    try:
        compare(arms[0].notes, arms[1].notes)
    except pytest.fail.Exception as failure:
        Path(folder, f"failure-{rank}").write_text(str(failure))
    Path(folder, f"done-{rank}").touch()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="default"), pytest.param({"find_unused_parameters": True}, id="unused")],
)
def test_equal_on_every_rank(world: int, options: dict[str, Any], tmp_path: Path) -> None:
    mp.spawn(_work, (world, str(tmp_path), options), nprocs=world)
    assert [(tmp_path / f"done-{rank}").exists() for rank in range(world)] == [True] * world
    assert [p.read_text() for p in sorted(tmp_path.glob("failure-*"))] == []
