"""``poros plan``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import attrs
import typer
from rich.text import Text

from poros.cli.output import print_json, print_line, print_rows
from poros_core.doctor import copy_rate
from poros_core.errors import SettingsError
from poros_core.planner import HOST_MARGIN, RunPlan, plan_run, read_model
from poros_core.planner.memory import CONTEXT_BYTES, Memory
from poros_core.planner.settings import RunSettings, parse_rate
from poros_core.planner.step_time import ASSUMED_LINK, CARDS, Rates, StepTime
from poros_core.planner.weights import checked_precision
from poros_core.sizes import parse_size

__all__ = ["register"]

DOES_NOT_FIT = 1
_MEASURED = "measured"
_SMALL = 5_000_000
"""Bytes below which a part is not shown."""
_ADVICE = {
    "resident": "The base fits on the device, activations and all: the plain resident run, without "
    "Poros, is the right choice.",
    "checkpointing": "The base fits on the device with gradient checkpointing: the plain resident "
    "run, without Poros, is the right choice.",
}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("plan")(plan)


def plan(
    model: Annotated[str, typer.Argument(help="A local folder, a config.json, or a Hub id.")],
    vram_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the card, as 16GB.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the host, as 64GB.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences per micro-batch.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    rank: Annotated[int, typer.Option(help="LoRA rank, on all linear layers.")] = 16,
    precision: Annotated[str, typer.Option(help="Of the base: nf4, bf16.")] = "nf4",
    block_size: Annotated[int, typer.Option(help="Layers that share one recompute boundary.")] = 1,
    graphs: Annotated[str, typer.Option(help="CUDA graphs: auto, on, off.")] = "auto",
    optimizer_state: Annotated[
        str, typer.Option(help="Where the optimizer state is between steps: device, host.")
    ] = "device",
    fused: Annotated[
        bool, typer.Option("--fused", metavar="", help="AdamW is fused, as in HF Trainer.")
    ] = False,
    loss_chunk: Annotated[
        int | None,
        typer.Option(
            help="Tokens with logits at a time, with poros.chunked_loss.", show_default="all"
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(help=f"Take the rates measured on a card: {', '.join(CARDS)}."),
    ] = None,
    link_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="From page-locked memory to the card, as 25GB/s, or 'measured' on this machine.",
            show_default=f"{ASSUMED_LINK / 1e9:.0f}GB/s, PCIe 4 x16",
        ),
    ] = None,
    compute_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="What the card reaches, as 80TFLOPS.", show_default="not known"
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    json_output: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Say whether a model will load and train, and what that takes, from its config and headers.

    By arithmetic: needs no weights and no GPU. Exit status: 0 it trains as asked, as far as sizes
    were given; 1 it does not fit; 2 bad input.
    """
    run = RunSettings(
        precision=checked_precision(precision),
        seq_len=seq_len,
        batch=batch,
        accumulate=accumulate,
        rank=rank,
        block_size=block_size,
        graphs=_one_of(graphs, "graphs", ("auto", "on", "off")) != "off",
        optimizer_state=cast(
            Literal["device", "host"],
            _one_of(optimizer_state, "optimizer_state", ("device", "host")),
        ),
        fused=fused,
        loss_chunk=loss_chunk,
    )
    vram = None if vram_budget is None else parse_size(vram_budget, what="--vram-budget")
    room = None if ram is None else parse_size(ram, what="--ram")
    rates = _rates(card=card, link=link_rate, compute=compute_rate)
    result = plan_run(read_model(model, revision=revision), run, rates=rates, vram=vram, ram=room)
    if json_output:
        print_json(_as_json(result, rates))
    else:
        _print(result, rates)
    if not result.trains:
        raise typer.Exit(DOES_NOT_FIT)


def _one_of(value: str, what: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise SettingsError(f"{what} must be one of: {', '.join(allowed)}; got '{value}'.")
    return value


def _rates(*, card: str | None, link: str | None, compute: str | None) -> Rates:
    if card is not None and card.lower() not in CARDS:
        raise SettingsError(
            f"Rates were measured on {', '.join(CARDS)} only, not on '{card}'. Give --link-rate "
            "and --compute-rate."
        )
    assumed = Rates(link=ASSUMED_LINK, source="assumed: PCIe 4 x16")
    rates = assumed if card is None else CARDS[card.lower()]
    if link == _MEASURED:
        rates = attrs.evolve(rates, link=copy_rate(), source="measured on this machine")
    elif link is not None:
        given = parse_rate(link, what="--link-rate", unit="GB/s", factor=1e9)
        rates = attrs.evolve(rates, link=given, source="as given")
    if compute is not None:
        given = parse_rate(compute, what="--compute-rate", unit="TFLOPS", factor=1e12)
        rates = attrs.evolve(rates, compute=given)
    return rates


# showing it


def _print(plan: RunPlan, rates: Rates) -> None:
    model, run = plan.model, plan.run
    print_line(
        Text.assemble(
            ("Poros plan  ", "bold"),
            f"{model.name} ({model.family}, {model.weights.count / 1e9:.2f} billion parameters), "
            f"{run.precision.upper()}; {run.accumulate} x {run.batch} x {run.seq_len} tokens, LoRA "
            f"rank {run.rank}, block size {run.block_size}, CUDA graphs "
            f"{'on' if run.graphs else 'off'}\n",
        )
    )
    print_rows([*_device_rows(plan.memory), *_other_rows(plan, rates)])
    for line in _verdict(plan):
        print_line(line)


def _device_rows(memory: Memory) -> list[tuple[str | Text, str | Text]]:
    found: list[tuple[str | Text, str | Text]] = [
        (Text("device memory", style="bold"), f"at its peak, the {memory.moment}")
    ]
    parts = sorted(memory.components.items(), key=lambda item: -item[1])
    for name, nbytes in [*parts, *_around(memory).items()]:
        if nbytes < _SMALL:
            continue
        note = ""
        if name == "arena":
            note = f" (slots {_gb(memory.slots)} and head {_gb(memory.head)}, in turn)"
        found.append((f"  {name}", f"{_gb(nbytes)}{note}"))
    return [*found, ("  card must have", Text(_gb(memory.device), style="bold"))]


def _around(memory: Memory) -> dict[str, int]:
    found = {
        "graph workspace outside the arena": memory.graph_workspace,
        "the allocator's gaps": memory.gaps,
        "CUDA graphs": memory.graphs,
        "CUDA context": CONTEXT_BYTES,
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _other_rows(plan: RunPlan, rates: Rates) -> list[tuple[str | Text, str | Text]]:
    model = plan.model
    parts = ", ".join(f"{name} {_gb(nbytes)}" for name, nbytes in plan.host.items())
    adapter = 4 * model.weights.adapter_count(plan.run.rank)
    resident = f"{_gb(plan.resident.device)}; with checkpointing {_gb(plan.checkpointed.device)}"
    rows = {
        "host memory": f"{_gb(plan.host_bytes)}, page-locked ({parts})",
        "disk": f"{_gb(model.download)} to download, adapter {_gb(adapter)}",
        "step, all streams": _step_text(plan.time, rates),
    }
    if plan.kept_time is not None and plan.kept:
        layers = len(model.weights.layers)
        rows["step, with the budget"] = (
            f"{plan.kept} of {layers} layers stay on the card: {_step_text(plan.kept_time, rates)}"
        )
    rows["without Poros"] = f"card must have {resident}"
    return [(Text(name, style="bold"), text) for name, text in rows.items()]


def _step_text(time: StepTime, rates: Rates) -> str:
    link = f"{time.link:.3f} s for {_gb(time.streamed)} at {rates.link / 1e9:.1f} GB/s"
    if time.compute is None:
        return (
            f"at least {time.seconds:.3f} s: link {link} ({rates.source}); the GPU's rate is not "
            "known (--compute-rate)"
        )
    return (
        f"{time.seconds:.3f} s, set by {time.bound}: link {link} ({rates.source}), compute "
        f"{time.compute:.3f} s"
    )


def _verdict(plan: RunPlan) -> list[Text]:
    lines = [Text("")]
    if plan.model.weights.uncounted:
        missing = ", ".join(plan.model.weights.uncounted)
        lines.append(
            Text(
                f"Not counted: {missing}, which stays on the device. Name a folder with the "
                "checkpoint, whose headers are read.",
                style="yellow",
            )
        )
    if plan.vram is None and plan.ram is None:
        lines.append(Text("Give --vram-budget and --ram to have it judged."))
        return lines
    if not plan.loads:
        lines.append(
            Text(
                f"It does not load: the base and {_gb(HOST_MARGIN)} for the process need more host "
                f"memory than {_gb(plan.ram or 0)}.",
                style="red",
            )
        )
    elif plan.trains:
        lines.append(Text("It loads and trains.", style="green"))
    elif plan.fitting:
        changed = _changes(plan.run, plan.fitting[0])
        lines.append(Text(f"It loads, and trains with {changed}.", style="yellow"))
    else:
        lines.append(
            Text(
                "It loads, and does not train: no setting fits. Take a shorter sequence, a smaller "
                "batch or a lower rank.",
                style="red",
            )
        )
    if plan.longest is not None:
        lines.append(Text(f"The longest sequence that fits so has {plan.longest} tokens."))
    if plan.advice is not None:
        lines.append(Text(_ADVICE[plan.advice], style="yellow"))
    return lines


def _changes(asked: RunSettings, option: RunSettings) -> str:
    found = []
    if option.optimizer_state != asked.optimizer_state:
        found.append("poros.offload_optimizer")
    if option.block_size != asked.block_size:
        found.append(f"block_size={option.block_size}")
    if option.graphs != asked.graphs:
        found.append("graphs='off'")
    if option.loss_chunk != asked.loss_chunk:
        found.append(
            f"poros.chunked_loss(chunk={option.loss_chunk}), a loss whose bits are its own"
        )
    return ", ".join(found)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _as_json(plan: RunPlan, rates: Rates) -> dict[str, Any]:
    model = plan.model
    return {
        "model": model.name,
        "family": model.family,
        "parameters": model.weights.count,
        "layers": len(model.weights.layers),
        "not_counted": list(model.weights.uncounted),
        "settings": attrs.asdict(plan.run),
        "device": _memory_json(plan.memory),
        "resident": {
            "plain": _memory_json(plan.resident),
            "checkpointing": _memory_json(plan.checkpointed),
            "right_choice": plan.advice,
        },
        "host_bytes": plan.host_bytes,
        "host": dict(plan.host),
        "disk": {
            "checkpoint_bytes": model.disk,
            "download_bytes": model.download,
            "adapter_bytes": 4 * model.weights.adapter_count(plan.run.rank),
        },
        "step": _time_json(plan.time),
        "kept_layers": plan.kept,
        "step_with_budget": None if plan.kept_time is None else _time_json(plan.kept_time),
        "rates": attrs.asdict(rates),
        "vram_budget": plan.vram,
        "ram": plan.ram,
        "loads": plan.loads,
        "trains": plan.trains,
        "fitting": [attrs.asdict(option) for option in plan.fitting],
        "longest_seq_len": plan.longest,
    }


def _time_json(time: StepTime) -> dict[str, Any]:
    return {
        "seconds": time.seconds,
        "complete": time.compute is not None,
        "bound": time.bound,
        "link_seconds": time.link,
        "compute_seconds": time.compute,
        "launch_seconds": time.launch,
        "beside_seconds": time.beside,
        "bytes_streamed": time.streamed,
    }


def _memory_json(memory: Memory) -> dict[str, Any]:
    return {
        "moment": memory.moment,
        "components": dict(memory.components),
        "slots_bytes": memory.slots,
        "head_bytes": memory.head,
        **{name.replace(" ", "_"): nbytes for name, nbytes in _around(memory).items()},
        "peak_allocated_bytes": memory.allocated,
        "peak_reserved_bytes": memory.reserved,
        "peak_device_bytes": memory.device,
    }
