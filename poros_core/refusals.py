"""Models that something else has already placed, which ``prepare`` refuses."""

from __future__ import annotations

import torch
from torch import nn

from poros_core.errors import PrepareError

__all__ = ["refuse_placed"]

_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP",
    "DeepSpeedEngine": "DeepSpeed",
}


def refuse_placed(model: nn.Module) -> None:
    """Refuse a model that is wrapped, sharded or dispatched already.

    Args:
        model: what the user gave to ``prepare``.

    Raises:
        PrepareError: it is; the message says what to do first.
    """
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS:
                raise PrepareError(
                    f"The model is wrapped by {_WRAPPERS[kind.__name__]} already. Prepare it "
                    "first: poros.prepare(model), then hand the result to the Trainer, to "
                    "Accelerate, or to DistributedDataParallel."
                )
    how = _sharded_by(model)
    if how is not None:
        raise PrepareError(
            f"The model's weights are sharded over several processes by {how}, and Poros streams "
            "whole weights. Load the model whole in every process, without tp_plan, FSDP or "
            "ZeRO-3, for example with poros.load(), and prepare it then."
        )
    _refuse_dispatched(model)


def _sharded_by(model: nn.Module) -> str | None:
    distributed = torch.distributed.is_available()
    for param in model.parameters():
        if hasattr(param, "ds_id"):
            return "DeepSpeed ZeRO-3"
        if distributed and type(param.data).__name__ == "DTensor":
            return "tensor parallelism or FSDP (their parameters are DTensors)"
    return None


def _refuse_dispatched(model: nn.Module) -> None:
    places = {str(p.device) for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    offload = any(_offloads(hook) for hook in hooks)
    if len(places) > 1 or offload:
        where = ", ".join(sorted(places)) if len(places) > 1 else "host memory or disk"
        raise PrepareError(
            f"The model is dispatched over {where} by a device_map ({len(hooks)} modules carry "
            "Accelerate's hooks). Load it with poros.load(), or with device_map={'': 'cpu'}; "
            "Poros does the placing."
        )


def _offloads(hook: object) -> bool:
    inner = getattr(hook, "hooks", (hook,))
    return any(bool(getattr(one, "offload", False)) for one in inner)
