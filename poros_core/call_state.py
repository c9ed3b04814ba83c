"""Everything besides weights and inputs that decides a block's numbers, captured per call.

The recompute must see what the first forward saw: random-number state, autocast, which modules
train, which adapters are active, which kernels are allowed. It is captured into a value that
belongs to the call, so that two forwards before one backward do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import field, frozen
from torch import nn

__all__ = ["CallState", "capture", "restored"]


@frozen(eq=False)
class CallState:
    """What one call of a block saw.

    Attributes:
        device: the compute device.
        rng: states of the CPU generator and, with CUDA, the device's default generator.
        autocast: per device type: enabled, dtype.
        training: each module's train/eval mode.
        adapters: the switches of each adapter layer and of each module that trains as a whole.
        kernels: which attention kernels and matrix modes are allowed.
        hooks: the forward hooks inside the block, which some adapters set for one call only.
    """

    device: torch.device
    rng: tuple[torch.Tensor, ...] = field(repr=False)
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    training: tuple[bool, ...] = field(repr=False)
    adapters: tuple[_AdapterSwitches, ...] = field(repr=False)
    kernels: _Kernels
    hooks: tuple[_Hooks, ...] = field(repr=False)

    @property
    def flags(self) -> tuple[object, ...]:
        """All of it but the random-number state, to compare and hash."""
        return (self.autocast, self.training, self.adapters, self.kernels)


@frozen
class _Kernels:
    sdpa: tuple[bool, bool, bool, bool]
    matmul_precision: str
    reduced_precision: tuple[Any, Any]
    deterministic: bool
    warn_only: bool


@frozen(eq=False)
class _Hooks:
    """The forward hooks of one module."""

    module: nn.Module
    tables: tuple[dict[int, Any], ...]


_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@frozen
class _AdapterSwitches:
    disabled: bool
    active: str | tuple[str, ...]
    scaling: tuple[tuple[str, float], ...] = ()
    casts: bool | None = None


def rng_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of the default generators that a block on ``device`` can draw from."""
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def set_rng_state(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    """Put states back that ``rng_state`` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class BlockModules:
    """The modules of one block, listed once, so that a call only reads flags.

    Adapters that PEFT adds, replaces or removes later are found: every call compares which children
    each module has.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = tuple(roots)
        self._list()

    def _list(self) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        self.modules = [module for root in self._roots for module in root.modules()]
        self.tuners: list[Any] = [m for m in self.modules if isinstance(m, BaseTunerLayer)]
        self.wrappers: list[Any] = [
            m for m in self.modules if isinstance(m, AuxiliaryTrainingWrapper)
        ]
        self.inner = [m for m in self.modules if not any(m is root for root in self._roots)]
        self._children = [m._modules for m in self.modules if _can_grow(m)]
        self._found = [tuple(children.values()) for children in self._children]
        self._names = [m._parameters for m in self.modules if isinstance(m, nn.ParameterDict)]
        self._keys = [tuple(names) for names in self._names]

    def refresh(self) -> bool:
        """List the modules again if adapters came or went; say whether they did."""
        if [tuple(names) for names in self._names] == self._keys and all(
            tuple(children.values()) == found
            for children, found in zip(self._children, self._found, strict=True)
        ):
            return False
        self._list()
        return True


def is_capture_hook(hook: object) -> bool:
    """Say whether a forward hook is Transformers' own, which collects hidden states and
    attentions while a call asks for them, and stays installed after it."""
    return "output_capturing_hook" in getattr(hook, "__qualname__", "")


def _can_grow(module: nn.Module) -> bool:
    return bool(module._modules) or isinstance(module, nn.ModuleDict)


def capture(device: torch.device, modules: BlockModules) -> CallState:
    """Capture the state that a call of a block starts with. No device synchronisation."""
    return CallState(
        device=device,
        rng=rng_state(device),
        autocast=_autocast(device),
        training=tuple(module.training for module in modules.modules),
        adapters=_adapters(modules),
        kernels=_kernels(),
        hooks=_hooks(modules),
    )


@contextmanager
def restored(state: CallState, modules: BlockModules, *, rng: bool = True) -> Iterator[None]:
    """Run a recompute under a call's state, and put the caller's back afterwards, even after an
    exception.

    With ``rng`` off the random-number state is left alone, which a graph capture must not touch.

    Autocast runs without its weight cache: the cache would keep casts of this recompute's
    adapters for the rest of the caller's region.
    """
    with ExitStack() as stack:
        if rng:
            stack.callback(set_rng_state, state.device, rng_state(state.device))
        _restore_flags(stack, state, modules)
        for device_type, enabled, dtype in state.autocast:
            stack.enter_context(
                torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
            )
        if rng:
            set_rng_state(state.device, state.rng)
        yield


def ambient(device: torch.device) -> tuple[object, ...]:
    """Return the state that gradient kernels see, which is that of the backward's caller."""
    return (_autocast(device), _kernels())


def _hooks(modules: BlockModules) -> tuple[_Hooks, ...]:
    return tuple(
        _Hooks(module, tuple(dict(module.__dict__[name]) for name in _HOOK_TABLES))
        for module in modules.inner
        if module._forward_pre_hooks or module._forward_hooks
    )


def _set_hooks(modules: BlockModules, hooks: Sequence[_Hooks]) -> None:
    wanted = {id(entry.module): entry.tables for entry in hooks}
    for module in modules.inner:
        tables = wanted.get(id(module), ({},) * len(_HOOK_TABLES))
        for name, table in zip(_HOOK_TABLES, tables, strict=True):
            live = module.__dict__[name]
            if live or table:
                live.clear()
                live.update(table)


def _restore_flags(stack: ExitStack, state: CallState, modules: BlockModules) -> None:
    found_training = tuple(module.training for module in modules.modules)
    if found_training != state.training:
        stack.callback(_set_training, modules, found_training)
        _set_training(modules, state.training)
    found_adapters = _adapters(modules)
    stack.callback(_set_adapters, modules, found_adapters)
    _set_adapters(modules, state.adapters)
    found_hooks = _hooks(modules)
    if found_hooks or state.hooks:
        stack.callback(_set_hooks, modules, found_hooks)
        _set_hooks(modules, state.hooks)
    found_kernels = _kernels()
    if found_kernels != state.kernels:
        stack.callback(_set_kernels, found_kernels)
        _set_kernels(state.kernels)


def _autocast(device: torch.device) -> tuple[tuple[str, bool, torch.dtype], ...]:
    types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types
    )


def _set_training(modules: BlockModules, flags: Sequence[bool]) -> None:
    for module, flag in zip(modules.modules, flags, strict=True):
        module.training = flag


def _adapters(modules: BlockModules) -> tuple[_AdapterSwitches, ...]:
    return tuple(
        _AdapterSwitches(
            tuner._disable_adapters,
            _frozen_names(tuner._active_adapter),
            tuple(getattr(tuner, "scaling", {}).items()),
            tuner.__dict__.get("cast_input_dtype_enabled"),
        )
        for tuner in modules.tuners
    ) + tuple(
        _AdapterSwitches(wrapper._disable_adapters, _frozen_names(wrapper._active_adapter))
        for wrapper in modules.wrappers
    )


def _frozen_names(active: str | list[str]) -> str | tuple[str, ...]:
    return active if isinstance(active, str) else tuple(active)


def _names(active: str | tuple[str, ...]) -> str | list[str]:
    return active if isinstance(active, str) else list(active)


def _set_adapters(modules: BlockModules, switches: Sequence[_AdapterSwitches]) -> None:
    for tuner, switch in zip([*modules.tuners, *modules.wrappers], switches, strict=True):
        tuner._disable_adapters = switch.disabled
        tuner._active_adapter = _names(switch.active)
        if switch.scaling:
            tuner.scaling.update(switch.scaling)
        if switch.casts is not None:
            tuner.cast_input_dtype_enabled = switch.casts


def _kernels() -> _Kernels:
    cuda: Any = torch.backends.cuda
    return _Kernels(
        sdpa=(
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        matmul_precision=cuda.matmul.fp32_precision,
        reduced_precision=(
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_kernels(kernels: _Kernels) -> None:
    cuda: Any = torch.backends.cuda
    flash, efficient, math, cudnn = kernels.sdpa
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_math_sdp(math)
    cuda.enable_cudnn_sdp(cudnn)
    cuda.matmul.fp32_precision = kernels.matmul_precision
    half, brain = kernels.reduced_precision
    cuda.matmul.allow_fp16_reduced_precision_reduction = half
    cuda.matmul.allow_bf16_reduced_precision_reduction = brain
    torch.use_deterministic_algorithms(kernels.deterministic, warn_only=kernels.warn_only)
