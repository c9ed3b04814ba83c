"""Contracts between core and the loaders and runtimes that plug into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

if TYPE_CHECKING:
    import torch
    from torch import nn

    from poros_core.berths import Berths
    from poros_core.family import Family
    from poros_core.host_store import HostStore
    from poros_core.plan import BlockPlan
    from poros_core.settings import Settings

__all__ = ["LoadRequest", "LoaderStrategy", "Runtime", "RuntimeHandle", "TensorRef", "WeightCodec"]


class TensorRef(Protocol):
    """One place in a model where bytes can be bound: a parameter's data, or a part of its
    quantisation state.

    ``key`` is equal for two refs exactly if they name the same place, and stays so when PEFT
    wraps the module that owns it.
    """

    @property
    def name(self) -> str:
        """What it is called inside its parameter, for example ``"data"`` or ``"absmax"``."""
        ...

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place: ``(id of the owning object, attribute)``."""
        ...

    def get(self) -> torch.Tensor:
        """Return the tensor bound now."""
        ...

    def set(self, value: torch.Tensor) -> None:
        """Bind ``value``: no copy, no change of dtype, shape or the object that owns it."""
        ...


class WeightCodec(Protocol):
    """What a precision knows of how one weight is laid out in tensors.

    The runtime knows nothing of NF4 or of any other precision: it asks the codec which tensors a
    frozen parameter consists of, and moves them.
    """

    @property
    def name(self) -> str:
        """The precision, for example ``"nf4"``."""
        ...

    @property
    def title(self) -> str:
        """What the panel prints, for example ``"NF4"``."""
        ...

    def claims(self, param: nn.Parameter) -> bool:
        """Say whether this codec is the one that lays out ``param``. Cheap; no side effects."""
        ...

    def refs(self, module: nn.Module, name: str, param: nn.Parameter) -> Sequence[TensorRef]:
        """Return every tensor that must be where ``param`` is computed with.

        Args:
            module: the module that owns the parameter.
            name: its name in that module.
            param: the parameter, already claimed by this codec.

        Raises:
            PrepareError: the parameter is in a state that cannot be streamed.
        """
        ...

    def keep_layout(self, module: nn.Module) -> Callable[[], None]:
        """Keep ``module`` from rearranging its own weight while it streams.

        Called once for every module that owns a streamed parameter, when a runtime attaches.

        Returns:
            What puts the module back as it was.
        """
        ...


@frozen(kw_only=True)
class LoadRequest:
    """What ``poros.load`` asks of a loader strategy.

    Attributes:
        path: a local folder that holds the checkpoint.
        family: the family that covers it.
        device: where the model will compute.
        dtype: the dtype of what is not quantised; None means the checkpoint's own.
        quantization_config: the user's ``BitsAndBytesConfig``, or None for the defaults.
        from_pretrained: further keyword arguments for Transformers' ``from_pretrained``.
        trust_remote_code: passed on to Transformers; off unless the user turned it on.
        land: called with a finished tensor of a weight that the loader quantised; returns it in
            host memory. None leaves that to the loader.
        berths: where finished tensors of quantised weights go instead, if the loader says
            beforehand how large they will be. None if there are none.
        advance: called with the bytes of what was read since, while the loader works; None if
            nobody wants to know.
    """

    path: Path
    family: Family
    device: torch.device
    dtype: torch.dtype | None = None
    quantization_config: Any = None
    from_pretrained: Mapping[str, Any] = field(factory=dict)
    trust_remote_code: bool = False
    land: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    berths: Berths | None = field(default=None, repr=False)
    advance: Callable[[int], None] | None = field(default=None, repr=False)


class LoaderStrategy(Protocol):
    """One way to read base weights from disk."""

    @property
    def precision(self) -> str:
        """The precision that it gives, for example ``"nf4"``."""
        ...

    @property
    def strategy(self) -> str:
        """How it loads, for example ``"streamed"`` or ``"standard"``."""
        ...

    @property
    def codec(self) -> WeightCodec:
        """The codec of this precision. Strategies of one precision share one codec."""
        ...

    def cannot(self, request: LoadRequest) -> str | None:
        """Return the named reason why this strategy cannot serve the request, or None.

        Read from config and headers; no weight is touched. ``auto`` falls back to another
        strategy of the same precision only on such a reason, and reports it.
        """
        ...

    def load(self, request: LoadRequest) -> nn.Module:
        """Return the Transformers model. Frozen weights may stand on the host or the device.

        Raises:
            CheckpointError: the checkpoint is damaged, or keys are missing or unexpected.
        """
        ...

    def load_resident(self, request: LoadRequest) -> nn.Module:
        """Return an ordinary, fully resident model for a gate's resident arm, as the user would
        load it without Poros: Transformers' ``from_pretrained`` and nothing else."""
        ...


@runtime_checkable
class RuntimeHandle(Protocol):
    """What a runtime leaves on a prepared model."""

    def detach(self, device: torch.device | None) -> None:
        """Undo everything: same parameter objects, forwards and attributes as before.

        Args:
            device: where the base goes; None means where each tensor was.

        Raises:
            PrepareError: a backward is outstanding.
        """
        ...

    def counters(self) -> Mapping[str, int]:
        """Return running totals: ``bytes_streamed`` (all that was copied to the device: units, and
        activations where they are offloaded), ``activation_bytes`` (activations alone, both ways),
        ``copies`` (of units), ``eager_blocks``, ``graph_replays``, and ``resident_units``."""
        ...


class Runtime(Protocol):
    """Where blocks live and how they move."""

    @property
    def name(self) -> str:
        """What settings call it: ``"streamed"`` or ``"resident"``."""
        ...

    def attach(
        self, model: nn.Module, *, plan: BlockPlan, settings: Settings, store: HostStore
    ) -> RuntimeHandle:
        """Attach to a model in place. Called once by ``prepare``; never on the hot path.

        Args:
            model: the model as the user holds it.
            plan: its units, and what stays on the device.
            settings: how it is prepared.
            store: where the base goes; it may hold units already.
        """
        ...
