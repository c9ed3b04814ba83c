"""``prepare`` and ``unprepare``: the one line that a user adds, and its opposite."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from attrs import frozen
from torch import nn

from poros_core.errors import PrepareError, SettingsError
from poros_core.family import Family
from poros_core.host_store import HostStore
from poros_core.log import get_logger
from poros_core.panel import print_panel
from poros_core.plan import BlockPlan, base_model_of, build_plan, config_mapping
from poros_core.plugins import plugins
from poros_core.protocols import RuntimeHandle
from poros_core.refusals import refuse_placed
from poros_core.settings import Graphs, Settings

__all__ = ["Prepared", "prepare", "prepared_of", "unprepare"]

_log = get_logger("prepare")
_STATE = "_poros_prepared"
_INSIDE = "_poros_inside"
"""Attribute of a prepared model's decoder, which every wrapping of it contains."""
STORE = "_poros_store"
"""Attribute of a Transformers model that ``poros.load`` gave: its host store."""

_REFUSED_ADAPTERS = ("PREFIX_TUNING", "CARTRIDGE")

M = TypeVar("M", bound=nn.Module)


@frozen(eq=False)
class Prepared:
    """What Poros knows of a prepared model.

    Attributes:
        family: the family that covers it.
        plan: its units.
        settings: how it was prepared.
        store: the frozen base in host memory.
        handle: the runtime's handle.
    """

    family: Family
    plan: BlockPlan
    settings: Settings
    store: HostStore
    handle: RuntimeHandle


def prepare(
    model: M,
    *,
    block_size: int | Literal["all"] = 1,
    vram_budget: int | str | None = None,
    graphs: Graphs = "auto",
    offload_activations: bool = False,
    copy_ahead: bool = False,
    runtime: str = "streamed",
    device: torch.device | str | int | None = None,
    verbose: bool = True,
) -> M:
    """Stream a model's frozen base from host memory, in place.

    Training afterwards gives bit for bit what the fully resident model gives: loss, adapter
    weights, gradient norms and optimizer state, dropout included. The training loop, Trainer or
    TRL script stays as it is.

    Args:
        model: a Transformers model with PEFT adapters, loaded by ``poros.load`` or the ordinary
            way. Its base moves to host memory and the device memory that it had is freed.
        block_size: decoder layers that share one recompute boundary, or ``"all"``.
        vram_budget: device memory that the run may use, in bytes or as ``"16GB"``; what it leaves
            over keeps as many units as fit resident, from the second step on. ``"auto"`` takes
            what is free but a margin; None streams everything.
        graphs: whether blocks are captured as CUDA graphs: ``"auto"`` on CUDA, ``"on"``, ``"off"``.
        offload_activations: keep the hidden state that enters each block, but for the last, in
            page-locked host memory between its forward and its backward. Copies are overlapped
            with compute, and the bits are the same. For long sequences: on the device the
            hidden states of all blocks grow with the depth times the tokens.
        copy_ahead: between two losses, on CUDA, copy units into memory that the allocator has and
            nobody needs at the moment, and keep those that the next forward starts with. The
            allocator's peak is higher for it, of what it has given out and not of what it has
            reserved, and what it gives is still being measured; so it is off by default. The base
            must stand in page-locked memory.
        runtime: name of the runtime plugin.
        device: the compute device; None means the CUDA device that the model is on, else the
            current CUDA device, else the CPU.
        verbose: print a panel that says what was prepared and what is guaranteed.

    Returns:
        The same object.

    Raises:
        PrepareError: nothing trains, the model is prepared already, or it is wrapped, sharded or
            dispatched over devices.
        UnsupportedModelError: no family covers it.
        SettingsError: a setting cannot be honoured.
        PluginError: two plugins claim the same weight.
    """
    settings = Settings(
        block_size=block_size,
        vram_budget=vram_budget,
        graphs=graphs,
        offload_activations=offload_activations,
        copy_ahead=copy_ahead,
        runtime=runtime,
    )
    _check(model)
    family = plugins().family_for(config_mapping(model)).value
    base = base_model_of(model)
    store: HostStore | None = base.__dict__.get(STORE)
    target = _compute_device(model, store, device)
    plan = build_plan(model, family=family, codecs=plugins().codecs(), device=target)
    if settings.block_size != "all" and settings.block_size > len(plan.layers):
        raise SettingsError(
            f"block_size={settings.block_size}, but the model has {len(plan.layers)} layers. Use "
            "a smaller value, or 'all'."
        )
    if store is None:
        store = HostStore(target)
    handle = (
        plugins().runtime(settings.runtime).attach(model, plan=plan, settings=settings, store=store)
    )
    if target.type == "cuda":
        torch.cuda.empty_cache()
    prepared = Prepared(family, plan, settings, store, handle)
    model.__dict__[_STATE] = prepared
    plan.decoder.__dict__[_INSIDE] = True
    _log.info("prepared", family=family.name, layers=len(plan.layers), host_bytes=store.nbytes)
    if verbose:
        print_panel(model, family=family, plan=plan, settings=settings)
    return model


def unprepare(model: M, *, device: torch.device | str | int | None = None) -> M:
    """Undo ``prepare``: the same parameter objects, holding their own memory again.

    Args:
        model: the object that was given to ``prepare``.
        device: where the base goes; None means where each tensor was before.

    Returns:
        The same object.

    Raises:
        PrepareError: it is not prepared, or a backward is outstanding.
    """
    prepared = prepared_of(model)
    if prepared is None:
        raise PrepareError(
            "This model is not prepared. Pass the object that poros.prepare() was given."
        )
    prepared.handle.detach(None if device is None else torch.device(device))
    if device is not None:
        prepared.plan.model.__dict__.pop(STORE, None)
    del model.__dict__[_STATE]
    del prepared.plan.decoder.__dict__[_INSIDE]
    return model


def prepared_of(model: nn.Module) -> Prepared | None:
    """Return what Poros knows of a model, or None if it is not prepared."""
    prepared: Prepared | None = model.__dict__.get(_STATE)
    return prepared


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise PrepareError(
            f"poros.prepare() takes a model, not {type(model).__name__}. Pass what "
            "peft.get_peft_model() returned."
        )
    for module in model.modules():
        if _STATE in module.__dict__ or _INSIDE in module.__dict__:
            raise PrepareError(
                "This model is prepared already. Call poros.unprepare(model) first to change how."
            )
    refuse_placed(model)
    config_mapping(model)
    if not any(param.requires_grad for param in model.parameters()):
        raise PrepareError(
            "No parameter of the model trains, so there is nothing to stream for. Add an adapter "
            "first: model = peft.get_peft_model(model, peft.LoraConfig(...)). If it was loaded "
            "with PeftModel.from_pretrained, pass is_trainable=True."
        )
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type.value in _REFUSED_ADAPTERS:
            raise PrepareError(
                f"Adapter '{name}' is {config.peft_type.value.lower()}: it trains a key/value "
                "cache that is filled before the first layer, which a recompute cannot repeat. "
                "Use LoRA or prompt tuning."
            )
    meta = [name for name, param in model.named_parameters() if param.device.type == "meta"]
    if meta:
        raise PrepareError(
            f"The model has weights without data ({meta[0]} and {len(meta) - 1} more are on the "
            "meta device). Load the checkpoint first, for example with poros.load()."
        )


def _compute_device(
    model: nn.Module, store: HostStore | None, device: torch.device | str | int | None
) -> torch.device:
    if device is not None:
        wanted = named_device(device)
        if store is not None and wanted != store.device:
            raise PrepareError(
                f"The model was loaded for {store.device}, so it cannot be prepared for {wanted}. "
                f"Call poros.load(..., device='{wanted}')."
            )
        return wanted
    if store is not None:
        return store.device
    for param in model.parameters():
        if param.device.type == "cuda":
            return param.device
    return default_device()


def default_device() -> torch.device:
    """Return the current CUDA device, or the CPU where there is none."""
    return named_device("cuda" if torch.cuda.is_available() else "cpu")


def named_device(device: torch.device | str | int) -> torch.device:
    """Return the device of that name, with its index if it is a CUDA device.

    Args:
        device: the name, or the number of a CUDA device.

    Raises:
        SettingsError: there is no such device, or not on this machine.
    """
    wanted = _device(device)
    if wanted.type == "cpu":
        return wanted
    if not torch.cuda.is_available():
        why = "sees no CUDA device" if torch.version.cuda else "is built without CUDA"
        raise SettingsError(
            f"device={device!r} asks for CUDA, and this torch ({torch.__version__}) {why}; "
            "`poros doctor` says more. Install a torch that is built for CUDA on a machine with an "
            "NVIDIA driver, or pass device='cpu'."
        )
    count = torch.cuda.device_count()
    index: int | None = wanted.index
    if index is not None and index >= count:
        raise SettingsError(
            f"device={device!r}: CUDA devices here are numbered 0 to {count - 1}. Pass one of "
            "those, and look at CUDA_VISIBLE_DEVICES if one is missing."
        )
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _device(device: object) -> torch.device:
    try:
        if isinstance(device, torch.device):
            found = device
        elif isinstance(device, int) and not isinstance(device, bool):
            found = torch.device("cuda", device)
        elif isinstance(device, str):
            found = torch.device(device)
        else:
            raise TypeError
    except (RuntimeError, TypeError) as error:
        raise _no_device(device) from error
    if found.type not in ("cpu", "cuda"):
        raise _no_device(device)
    return found


def _no_device(device: object) -> SettingsError:
    return SettingsError(
        "device must be 'cpu', 'cuda', 'cuda:0' or another number, that number, or the "
        f"torch.device of such a name; got {device!r}."
    )
