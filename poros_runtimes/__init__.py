"""Where blocks live and how they move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from poros_core.errors import SettingsError
from poros_core.hookspecs import hookimpl
from poros_core.protocols import Runtime

if TYPE_CHECKING:
    import torch
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


class ResidentRuntime:
    """Moves nothing: a model that was loaded onto the device stays there.

    For telling whether a difference comes from streaming. A gate's resident arm is not this: Poros
    does not touch it at all.
    """

    name = "resident"

    def attach(
        self, model: nn.Module, *, plan: BlockPlan, settings: Settings, store: HostStore
    ) -> RuntimeHandle:
        """Attach to a model, which changes nothing; see ``Runtime``.

        Raises:
            SettingsError: activations were to be offloaded, or units to be copied ahead.
        """
        if settings.offload_activations:
            raise SettingsError(
                "runtime='resident' moves nothing, so it cannot offload activations. Leave "
                "offload_activations=True out, or use runtime='streamed'."
            )
        if settings.copy_ahead:
            raise SettingsError(
                "runtime='resident' copies nothing, so it cannot copy ahead. Leave copy_ahead=True "
                "out, or use runtime='streamed'."
            )
        return ResidentHandle(len(plan.layers))


class ResidentHandle:
    """A model that does not stream."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def detach(self, device: torch.device | None) -> None:
        """Do nothing: nothing was changed."""

    def counters(self) -> Mapping[str, int]:
        """Return zeros, and every layer as resident."""
        return {
            "activation_bytes": 0,
            "bytes_streamed": 0,
            "copies": 0,
            "eager_blocks": 0,
            "graph_replays": 0,
            "resident_units": self._layers,
        }


@hookimpl
def poros_runtimes() -> Sequence[Runtime]:
    """Offer the built-in runtimes."""
    return (StreamedRuntime(), ResidentRuntime())
