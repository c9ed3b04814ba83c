"""The arms of a gate: how each is built, and one training step of it."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import nn

from poros_core.accumulate import accumulate
from poros_core.call_state import rng_state, set_rng_state
from poros_core.gate.compare import StepView
from poros_core.gate.controls import disturb
from poros_core.gate.fault import FLIPPED_BIT, PlantedDefect, PlantedFault, plant
from poros_core.gate.meter import Meter
from poros_core.gate.modes import Modes, autocast, compile_layers
from poros_core.gate.options import GateOptions, Subject
from poros_core.load import choose_strategy, load
from poros_core.offload import OffloadedOptimizer, offload_optimizer
from poros_core.prepare import Prepared, prepare, prepared_of
from poros_core.protocols import LoadRequest

__all__ = ["CLIP", "LEARNING_RATE", "Arm", "Workshop"]

LEARNING_RATE = 2e-4
CLIP = 1.0


class Arm:
    """One side of a gate: a model, its optimizer, and a random-number stream of its own."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        *,
        meter: Meter,
        seed: int,
        modes: Modes | None = None,
        backward: str = "each",
        cache: bool = True,
    ) -> None:
        """Make an arm of a model that is ready to train.

        Args:
            name: what records call it.
            model: the model.
            meter: measures it.
            seed: of its random-number stream.
            modes: how it computes; None means the default.
            backward: as in ``GateOptions``.
            cache: whether forwards build a key/value cache, as they do by default.
        """
        self.name = name
        self.model = model
        self.meter = meter
        self.modes = modes or Modes()
        self.backward = backward
        self.cache = cache
        self.device = next(iter(_trainable(model).values())).device
        self.params = _trainable(model)
        self.start = {key: param.detach().cpu().clone() for key, param in self.params.items()}
        self.had_gradient: set[str] = set()
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=LEARNING_RATE)
        self._offloaded: OffloadedOptimizer | None = None
        torch.manual_seed(seed)
        self._rng = rng_state(self.device)

    def offload(self) -> None:
        """Keep the optimizer's state on the host between steps."""
        self._offloaded = offload_optimizer(self.optimizer)

    @property
    def host_state_bytes(self) -> int:
        """Bytes of optimizer state that stand on the host between steps."""
        return 0 if self._offloaded is None else self._offloaded.nbytes

    @property
    def prepared(self) -> Prepared | None:
        """What Poros knows of the model, or None for an arm that it does not touch."""
        return prepared_of(self.model)

    def counters(self) -> Mapping[str, int]:
        """Return the runtime's running totals; empty for an arm that Poros does not touch."""
        prepared = self.prepared
        return {} if prepared is None else dict(prepared.handle.counters())

    def view(self) -> StepView:
        """Return what the arm shows before its first step."""
        return StepView({"adapter_weights": self.params})

    def step(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> StepView:
        """Train one step, under the arm's own random-number stream."""
        set_rng_state(self.device, self._rng)
        with self.meter.step():
            losses = self._accumulate(batches)
            norms = _gradient_norms(self.params)
            total = nn.utils.clip_grad_norm_(self.params.values(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._rng = rng_state(self.device)
        stacked = torch.stack(list(norms.values()))
        usable = (stacked.isfinite() & (stacked > 0)).tolist()
        self.had_gradient |= {name for name, good in zip(norms, usable, strict=True) if good}
        return StepView(
            {
                "loss": {
                    **{f"micro-batch {i}": loss for i, loss in enumerate(losses)},
                    **{f"random-number state {i}": s for i, s in enumerate(self._rng)},
                },
                "grad_norms": {"global": total.detach(), **norms},
                "optimizer_state": self._optimizer_state(),
                "adapter_weights": self.params,
            }
        )

    def _accumulate(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Add up the gradients of a step's micro-batches; return their losses, detached."""
        if self.backward == "block-major" and self.prepared is not None:
            found = accumulate(self.model, batches, loss=self._loss)
            return [loss / len(batches) for loss in found]
        joint = self.backward == "joint"
        losses: list[torch.Tensor] = []
        for batch in batches:
            loss = self._loss(self.model, batch) / len(batches)
            if not joint:
                loss.backward()  # type: ignore[no-untyped-call]
                loss = loss.detach()
            losses.append(loss)
        if joint:
            total = torch.stack(losses).sum()
            total.backward()  # type: ignore[no-untyped-call]
        return [loss.detach() for loss in losses]

    def _loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        more = {} if self.cache else {"use_cache": False}
        with autocast(self.modes, self.device):
            loss: torch.Tensor = model(**batch, **more).loss
        return loss

    def state(self) -> dict[str, Any]:
        """Return what training goes on from, on the host: see ``load_state``."""
        return {
            "params": {name: param.detach().cpu().clone() for name, param in self.params.items()},
            "optimizer": _on_host(self.optimizer.state_dict()),
            "rng": [state.clone() for state in self._rng],
            "had_gradient": sorted(self.had_gradient),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where an arm of the same options stood, of whichever kind it was."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(state["params"][name])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._rng = tuple(state["rng"])
        self.had_gradient = set(state["had_gradient"])

    def untrained(self) -> list[str]:
        """Return the adapter tensors that never had a finite non-zero gradient, or did not move."""
        return [
            name
            for name, param in self.params.items()
            if name not in self.had_gradient or torch.equal(param.detach().cpu(), self.start[name])
        ]

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name} {key}": value
            for name, param in self.params.items()
            for key, value in self.optimizer.state[param].items()
        }


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list | tuple) else value


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _gradient_norms(params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return each gradient's norm; a parameter without a gradient counts as zero."""
    return {
        name: torch.zeros((), device=param.device)
        if param.grad is None
        else torch.linalg.vector_norm(param.grad)
        for name, param in params.items()
    }


@frozen(kw_only=True)
class Workshop:
    """Builds arms that differ in nothing but where the base is.

    Attributes:
        options: what the gate is asked to do.
        subject: what it runs on.
        path: the checkpoint.
        device: the compute device.
    """

    options: GateOptions
    subject: Subject
    path: Path
    device: torch.device

    @property
    def dtype(self) -> torch.dtype | None:
        """What a 4-bit base computes in: the loader's default, but float32 on a CPU, where
        bfloat16 is many times slower."""
        quantised = self.options.precision != "bf16"
        return torch.float32 if quantised and self.device.type == "cpu" else None

    def plain(self, path: Path) -> nn.Module:
        """Load a checkpoint as a user would without Poros."""
        request = LoadRequest(
            path=path,
            family=self.subject.family,
            device=self.device,
            dtype=self.dtype,
            from_pretrained=self._overrides(),
        )
        strategy = choose_strategy(self.options.precision, self.options.load_strategy, request)
        return strategy.load_resident(request)

    def resident(self, name: str) -> Arm:
        """Build an arm that Poros does not touch: plain Transformers and PEFT."""
        meter = Meter(self.device)
        with meter.building():
            torch.manual_seed(self.options.seed)
            model = self.plain(self.path)
            if self.options.checkpointing:
                how = {"use_reentrant": False}
                model.gradient_checkpointing_enable(how)  # type: ignore[operator]
            return self._arm(name, self._with_adapters(model), meter)

    def streamed(self) -> tuple[Arm, PlantedFault | PlantedDefect | None]:
        """Build the arm whose base streams, and plant a fault in it if asked to."""
        options = self.options
        meter = Meter(self.device)
        with meter.building():
            torch.manual_seed(options.seed)
            model = self._with_adapters(self._base())
            fault: PlantedFault | PlantedDefect | None = None
            if options.plant_fault or options.plant == FLIPPED_BIT:
                fault = plant(
                    model, family=self.subject.family, device=self.device, seed=options.seed
                )
            settings = options.settings
            prepare(
                model,
                block_size=settings.block_size,
                vram_budget=settings.vram_budget,
                graphs=settings.graphs,
                offload_activations=settings.offload_activations,
                copy_ahead=settings.copy_ahead,
                runtime=settings.runtime,
                verbose=False,
            )
            if options.plant is not None and options.plant != FLIPPED_BIT:
                fault = disturb(model, options.plant)
            arm = self._arm("streamed", model, meter)
            if options.optimizer_state == "host":
                arm.offload()
            return arm, fault

    def _base(self) -> nn.Module:
        """Load the streamed arm's base. Files that it is mapped from go when it is dropped."""
        options = self.options
        with tempfile.TemporaryDirectory(prefix="poros-gate-") as folder:
            base: nn.Module = load(
                self.path,
                precision=options.precision,
                load_strategy=options.load_strategy,
                host=options.host,
                cache=folder if options.host == "mmap" else False,
                device=self.device,
                dtype=self.dtype,
                **self._overrides(),
            )
            return base

    def _arm(self, name: str, model: nn.Module, meter: Meter) -> Arm:
        model.train()
        return Arm(
            name,
            model,
            meter=meter,
            seed=self.options.seed + 1,
            modes=self.options.modes,
            backward=self.options.backward,
            # without one a layer may compute in another layout: no arm has it then
            cache=not (self.options.modes.compile or self.options.checkpointing),
        )

    def _overrides(self) -> dict[str, Any]:
        """Return what every arm's config is told besides what the checkpoint says."""
        config, dropout = self.subject.config, self.options.dropout
        if not dropout:
            return {}
        own = {"attention_dropout": dropout}
        if "attention_dropout" in config:
            return dict(own)
        if "attention_dropout" in config.get("text_config", {}):
            return {"text_config": own}
        return {}

    def _outside_the_decoder(self, model: nn.Module) -> str:
        """Return a pattern for what no text-only batch trains: towers and projectors."""
        decoder = self.subject.family.decoder(model)
        path = next(name for name, module in model.named_modules() if module is decoder)
        return rf"(?!{re.escape(path)}\.).*"

    def _with_adapters(self, model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        if self.options.modes.compile:
            compile_layers(model, self.subject.family)
        torch.manual_seed(self.options.seed)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=self.subject.rank,
            lora_alpha=2 * self.subject.rank,
            lora_dropout=self.options.dropout,
            target_modules="all-linear",
            exclude_modules=self._outside_the_decoder(model),
        )
        wrapped: nn.Module = get_peft_model(model, config)
        return wrapped
