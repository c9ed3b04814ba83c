"""Where blocks live and how they move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from poros_core.hookspecs import hookimpl
from poros_core.protocols import Runtime

if TYPE_CHECKING:
    from torch import nn

    from poros_core.host_store import HostStore
    from poros_core.plan import BlockPlan
    from poros_core.protocols import RuntimeHandle
    from poros_core.settings import Settings


class StreamedRuntime:
    """The base stands in host memory and streams through a small device window."""

    name = "streamed"

    def attach(
        self, model: nn.Module, *, plan: BlockPlan, settings: Settings, store: HostStore
    ) -> RuntimeHandle:
        """Attach to a model in place; see ``Runtime``."""
        from poros_runtimes.streamed.runtime import StreamedHandle

        return StreamedHandle(model, plan=plan, settings=settings, store=store)


@hookimpl
def poros_runtimes() -> Sequence[Runtime]:
    """Offer the built-in runtimes."""
    return (StreamedRuntime(),)
