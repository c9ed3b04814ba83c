"""Moving the units of a loaded model into the host store, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from poros_core.berths import Berths
from poros_core.host_memory import HostBuffer, TensorEntry
from poros_core.host_store import HostStore, UnitImage
from poros_core.page_locking import makers
from poros_core.plan import BlockPlan, Unit

__all__ = ["place_units"]

_LaidOut = tuple[list[TensorEntry], HostBuffer]


def place_units(
    plan: BlockPlan,
    store: HostStore,
    *,
    berths: Berths,
    staged: bool,
    advance: Callable[[int], None],
    placed: Callable[[UnitImage], None],
) -> None:
    """Move every unit into the store: in its berth if it has one, else into a stretch of its own.

    Args:
        plan: the units.
        store: an empty store.
        berths: what was made for them beforehand.
        staged: leave layers pageable.
        advance: is told the bytes of each unit.
        placed: is given each unit. Head and embeddings come first: whoever looks at all of their
            bytes on a device does so while the layers are placed.

    Raises:
        PrepareError: host memory cannot be had or cannot be page-locked.
    """

    def lay_out(unit: Unit) -> _LaidOut:
        found = berths.take(unit)
        return store.lay_out(unit.refs, staged=_staged(unit)) if found is None else found

    def _staged(unit: Unit) -> bool:
        return staged and unit in plan.layers

    tables = [unit for unit in plan.units() if unit not in plan.layers]
    units = deque(unit for unit in (*tables, *plan.layers) if unit.refs)
    under_way: deque[tuple[Unit, Future[_LaidOut]]] = deque()
    workers = makers()
    with ThreadPoolExecutor(workers, thread_name_prefix="poros-place") as pool:
        while units or under_way:
            # no more than there are workers: what a unit was in before is free once it is placed
            while units and len(under_way) < workers:
                under_way.append((units[0], pool.submit(lay_out, units.popleft())))
            unit, laid_out = under_way.popleft()
            entries, buffer = laid_out.result()
            image = store.place(entries, buffer, staged=_staged(unit))
            placed(image)
            advance(image.nbytes)
