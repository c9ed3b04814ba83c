"""``poros plan``."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import attrs
import typer

from poros.cli.output import print_json
from poros.cli.plan_text import as_json, print_plan
from poros_core.doctor import copy_rate
from poros_core.errors import SettingsError
from poros_core.planner import plan_run, read_model
from poros_core.planner.settings import RunSettings, parse_rate
from poros_core.planner.step_time import ASSUMED_LINK, CARDS, Rates
from poros_core.planner.weights import checked_precision
from poros_core.sizes import parse_size

__all__ = ["register"]

DOES_NOT_FIT = 1
_MEASURED = "measured"


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
    host: Annotated[
        str,
        typer.Option(
            help="Where layers stand: pinned (page-locked memory), pageable, mmap (files)."
        ),
    ] = "pinned",
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
        host=cast(
            Literal["pinned", "pageable", "mmap"],
            _one_of(host, "host", ("pinned", "pageable", "mmap")),
        ),
        loss_chunk=loss_chunk,
    )
    vram = None if vram_budget is None else parse_size(vram_budget, what="--vram-budget")
    room = None if ram is None else parse_size(ram, what="--ram")
    rates = _rates(card=card, link=link_rate, compute=compute_rate)
    result = plan_run(read_model(model, revision=revision), run, rates=rates, vram=vram, ram=room)
    if json_output:
        print_json(as_json(result, rates))
    else:
        print_plan(result, rates)
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
