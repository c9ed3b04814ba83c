"""The planner's arithmetic: against committed records, against models, and against itself."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import attrs
import pytest
from huggingface_hub.errors import NotASafetensorsRepoError, OfflineModeIsEnabled
from test_base_install import command
from test_cli import Cli, cli

import poros.cli.plan
from poros_core.errors import CheckpointError, PorosError, SettingsError
from poros_core.planner import Model, RunPlan, headers, memory, plan_run, read_model
from poros_core.planner.headers import hub_headers, local_headers
from poros_core.planner.memory import (
    block_workspace,
    device_memory,
    host_memory,
    resident_memory,
)
from poros_core.planner.settings import CHUNK, RunSettings, parse_rate
from poros_core.planner.step_time import CARDS, Rates, step_time, streamed_bytes
from poros_core.planner.weights import Weight, Weights, sort_weights
from poros_core.schedule import spread
from poros_core.sizes import parse_size
from poros_families import poros_families

__all__ = ["cli"]

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {family.name: family for family in poros_families()}
RECORDS = {
    path.name: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "docs" / "validation").glob("*.json"))
}
H200 = CARDS["h200"]


def config_of(family: str, shape: str) -> Mapping[str, Any]:
    return FAMILIES[family].shapes[shape]


def weights_of(family: str, shape: str) -> Weights:
    say = FAMILIES[family].weights
    assert say is not None
    return sort_weights(say(config_of(family, shape)))


def softcap_of(family: str, shape: str) -> bool:
    config = config_of(family, shape)
    return bool((config.get("text_config") or config).get("final_logit_softcapping"))


def qwen(shape: str) -> Weights:
    return weights_of("qwen2", shape)


def model_of(family: str, shape: str) -> Model:
    return Model(
        name=shape,
        family=family,
        weights=weights_of(family, shape),
        longest=config_of(family, shape)["max_position_embeddings"],
        softcap=False,
        disk=0,
        download=0,
    )


# against records


def measured(kind: str) -> list[Any]:
    return [
        pytest.param(record, id=name)
        for name, record in RECORDS.items()
        if record.get("kind") == kind
        and record.get("verdict") == "exact"
        and record["stack"]["gpu"] == "NVIDIA H200"
        and record["shape"] in FAMILIES[record["family"]].shapes
        and isinstance(record["block_size"], int)
        and plain(record)
    ]


def plain(record: Mapping[str, Any]) -> bool:
    """Say whether a record is of what the planner plans: no other kernels, no batches of records
    whose lengths change, nothing compiled."""
    settings = record.get("settings", {})
    usual = {
        "attention_kernels": "auto",
        "autocast": "off",
        "compile": False,
        "deterministic": True,
        "tf32": False,
        "backward": "each",
        "vram_budget": None,
        "offload_activations": False,
    }
    same = all(settings.get(name, value) == value for name, value in usual.items())
    whole = record.get("layers") is None or record["layers"]["trained"] == record["layers"]["of"]
    return same and whole and record.get("data") is None and record["batch"] == 1


GATES = measured("training-parity")
LOOPS = [p for p in measured("training-loop-parity") if p.values[0]["loop"] == "trainer"]


def run_of(record: Mapping[str, Any]) -> RunSettings:
    settings = record.get("settings", {"graphs": "off"})
    return RunSettings(
        precision=record["precision"],
        seq_len=record["seq_len"],
        batch=record["batch"],
        accumulate=record["accumulate"],
        rank=record["rank"],
        block_size=record["block_size"],
        graphs=settings.get("graphs", "auto") != "off",
        optimizer_state=settings.get("optimizer_state", "device"),
        host=settings.get("host") or "pinned",
    )


def test_there_are_records() -> None:
    assert len(GATES) >= 3
    assert LOOPS


@pytest.mark.parametrize("record", GATES)
def test_bytes_streamed_are_those_of_the_record(record: Mapping[str, Any]) -> None:
    weights, run = weights_of(record["family"], record["shape"]), run_of(record)
    predicted = run.accumulate * streamed_bytes(weights, run)
    streamed = record["arms"]["streamed"]["bytes_streamed_per_step"]
    assert predicted == pytest.approx(streamed, rel=0.02)


@pytest.mark.parametrize("record", GATES)
def test_peaks_of_gates(record: Mapping[str, Any]) -> None:
    weights, run = weights_of(record["family"], record["shape"]), run_of(record)
    softcap = softcap_of(record["family"], record["shape"])
    streamed = device_memory(weights, run, softcap=softcap).allocated
    checkpointing = record["settings"].get("resident_checkpointing", False)
    resident = resident_memory(weights, run, checkpointing=checkpointing, softcap=softcap).allocated
    kept = 2 * run.tokens * weights.vocabulary  # a gate does not hold a step's logits
    # what is said of a resident run is its reserved memory, which has room for a percent
    for name, predicted, least in (("streamed", streamed, 1.0), ("resident", resident, 0.99)):
        peak = record["arms"][name]["peak_allocated_bytes"]
        assert predicted / peak >= least, name
        assert (predicted - kept) / peak <= 1.1, name


@pytest.mark.parametrize("record", LOOPS)
def test_peaks_of_training_loops(record: Mapping[str, Any]) -> None:
    """Here a process holds one arm, so that reserved memory is its own."""
    weights = weights_of(record["family"], record["shape"])
    run = attrs.evolve(run_of(record), graphs=False, fused=True)
    memory = device_memory(weights, run)
    arm = record["arms"]["poros"]
    assert 1.0 <= memory.allocated / arm["peak_allocated_bytes"] <= 1.1
    assert 1.0 <= memory.reserved / arm["peak_reserved_bytes"] <= 1.1


TIMED = [p for p in GATES if p.values[0]["arms"]["streamed"]["step_seconds"] is not None]


@pytest.mark.parametrize("record", TIMED)
def test_step_times(record: Mapping[str, Any]) -> None:
    weights, run = weights_of(record["family"], record["shape"]), run_of(record)
    predicted = step_time(weights, run, H200).seconds
    assert predicted == pytest.approx(record["arms"]["streamed"]["step_seconds"], rel=0.2)


COSTS = [
    pytest.param(record, id=path.name)
    for path in sorted((ROOT / "benchmarks" / "records").glob("**/*.json"))
    if (record := json.loads(path.read_text(encoding="utf-8"))).get("kind") == "training-cost"
    and record["method"] == "poros"
    and record["outcome"] == "trained"
    and set(record["settings"]) - {"offload_activations"}
    == {"optimizer_state", "loss_chunk", "block_size", "vram_budget", "graphs"}
    and not record["settings"].get("offload_activations")
    and isinstance(record["settings"]["block_size"], int)
    and record["stack"]["gpu"] == "NVIDIA H200"
]


@pytest.mark.parametrize("record", COSTS)
def test_costs(record: Mapping[str, Any]) -> None:
    """One process, one model: what it reserves, and how long a step takes at the link's rate."""
    settings = record["settings"]
    run = RunSettings(
        precision=record["precision"],
        seq_len=record["seq_len"],
        batch=record["batch"],
        rank=record["rank"],
        block_size=settings["block_size"],
        graphs=settings["graphs"] != "off",
        optimizer_state=settings["optimizer_state"],
        fused=True,
        loss_chunk=settings["loss_chunk"],
    )
    weights = weights_of(record["family"], record["shape"])
    assert len(weights.layers) == record["layers"]
    if settings["vram_budget"] is None:
        memory = device_memory(weights, run)
        assert 1.0 <= memory.reserved / record["peak_reserved_bytes"] <= 1.1
        if not record.get("measured_before_in_process"):
            assert 1.0 <= memory.device / record["peak_device_bytes"] <= 1.1
    rates = attrs.evolve(H200, link=record["link_bytes_per_second"])
    resident = spread(record["resident_units"], layers=len(weights.layers))
    predicted = step_time(weights, run, rates, resident=resident)
    assert predicted.streamed == pytest.approx(record["bytes_streamed_per_step"], rel=0.02)
    assert predicted.seconds == pytest.approx(record["step_seconds"]["median"], rel=0.2)


def test_a_budget_counts_the_graphs_that_the_runtime_counts() -> None:
    from poros_runtimes.streamed import budget, residency

    assert residency._SIGNATURES[0] == 1 + memory._MORE
    assert memory._COUNTED_BYTES == budget._GRAPH >= memory._GRAPH_BYTES
    assert memory.more_graphs(RunSettings(block_size=3), layers=10) == 3 * 20 * budget._GRAPH
    assert memory.more_graphs(RunSettings(graphs=False), layers=10) == 0


@pytest.mark.parametrize(("shape", "gigabytes"), [("7b", 2.77), ("32b", 4.59), ("72b", 6.78)])
def test_the_moment_of_the_loss(shape: str, gigabytes: float) -> None:
    """Adapters, Adam, head, boundaries, three float32 tensors of logits and the bf16 one."""
    memory = device_memory(qwen(shape), RunSettings())
    assert memory.moment == "loss"
    parts = {k: v for k, v in memory.components.items() if k not in ("cuBLAS", "on the device")}
    assert set(parts) == {"arena", "adapters", "optimizer", "boundaries", "logits"}
    assert sum(parts.values()) / 1e9 == pytest.approx(gigabytes, abs=0.006)
    assert parts["arena"] == memory.head > memory.slots
    assert memory.graph_workspace == 0


# against models


@pytest.mark.parametrize(("family", "shape"), [("qwen2", "tiny"), ("gemma4", "tiny-e2b")])
def test_units_are_those_of_a_model(family: str, shape: str) -> None:
    """Sizes in the host store, in the head's unit and of LoRA are what a model really has."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig

    import poros
    from poros_core.prepare import prepared_of

    config = AutoConfig.for_model(**config_of(family, shape))
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = LoraConfig(r=4, target_modules="all-linear")
    model = poros.prepare(get_peft_model(base, lora), verbose=False)
    weights = weights_of(family, shape)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert weights.adapter_count(4) == trained
    prepared = prepared_of(model)
    assert prepared is not None
    plan = prepared.handle.plan  # type: ignore[attr-defined]
    sizes = [sum(-(-ref.get().nbytes // 256) * 256 for ref in unit.refs) for unit in plan.layers]
    assert weights.layer_bytes("bf16") == sizes
    assert weights.head_bytes == sum(ref.get().nbytes for ref in plan.head.refs)
    assert weights.table_bytes == sum(ref.get().nbytes for t in plan.embeddings for ref in t.refs)


def test_bytes_streamed_are_those_of_a_model() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    import poros
    from poros_core.prepare import prepared_of

    config = {**config_of("qwen2", "tiny"), "vocab_size": 2048}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    lora = LoraConfig(r=4, target_modules="all-linear")
    model = poros.prepare(get_peft_model(base, lora), verbose=False)
    prepared = prepared_of(model)
    assert prepared is not None
    ids = torch.ones(1, 4, dtype=torch.long)
    totals = []
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        totals.append(prepared.handle.counters()["bytes_streamed"])
    say = FAMILIES["qwen2"].weights
    assert say is not None
    weights = sort_weights(say(config))
    assert weights.head_bytes > device_memory(weights, RunSettings(precision="bf16")).slots
    assert totals[2] - totals[1] == streamed_bytes(weights, RunSettings(precision="bf16"))


def test_what_is_said_twice_is_the_same() -> None:
    from poros_core import chunked_loss, ring
    from poros_core.host_store import ALIGNMENT

    assert CHUNK == chunked_loss.CHUNK
    assert (
        host_memory(qwen("7b"), RunSettings(host="mmap"))["ring"]
        == ring.SLOTS * (qwen("7b").layer_bytes("nf4")[0])
    )
    assert sort_weights({"a.embed_tokens.weight": (1, 1), "a.layers.0.b.weight": (1,)}).layer_bytes(
        "bf16"
    ) == [ALIGNMENT]


def test_nf4_is_what_bitsandbytes_makes() -> None:
    import torch
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(128, 192), quant_type="nf4")
    tensors = [packed.nbytes, state.absmax.nbytes, state.code.nbytes]
    assert Weight("x.weight", (128, 192)).tensors("nf4") == tensors


# memory and time against themselves


@pytest.mark.parametrize("field", ["seq_len", "batch", "rank"])
def test_more_of_anything_takes_more(field: str) -> None:
    small = RunSettings()
    large = attrs.evolve(small, **{field: 2 * getattr(small, field)})
    assert device_memory(qwen("7b"), large).device > device_memory(qwen("7b"), small).device
    assert resident_memory(qwen("7b"), large, checkpointing=True).device > (
        resident_memory(qwen("7b"), small, checkpointing=True).device
    )


def test_the_optimizers_state_moves_to_the_host() -> None:
    there, here = RunSettings(optimizer_state="host", fused=True), RunSettings(fused=True)
    weights = qwen("32b")
    state = 8 * weights.adapter_count(16)
    assert host_memory(weights, there)["optimizer"] == state
    assert "optimizer" not in host_memory(weights, here)
    saved = device_memory(weights, here).allocated - device_memory(weights, there).allocated
    assert saved == state <= device_memory(weights, there).head
    wide = attrs.evolve(there, rank=64)
    assert 8 * weights.adapter_count(64) > weights.head_bytes
    assert device_memory(weights, wide).moment == "optimizer"
    slower = step_time(weights, there, H200).link - step_time(weights, here, H200).link
    assert slower == pytest.approx(2 * state / H200.link)


def test_long_sequences_need_room_for_a_layers_activations() -> None:
    run = RunSettings(seq_len=8192)
    weights = qwen("7b")
    memory = device_memory(weights, run)
    room = weights.head_bytes - memory.slots
    assert memory.graph_workspace > block_workspace(weights, run) - room > 0
    assert device_memory(weights, attrs.evolve(run, graphs=False)).graph_workspace == 0


def test_a_loss_in_chunks_has_fewer_logits() -> None:
    run = RunSettings(seq_len=8192)
    whole, chunked = (
        device_memory(qwen("7b"), attrs.evolve(run, loss_chunk=chunk)) for chunk in (None, CHUNK)
    )
    assert whole.components["logits"] == 8192 * 152064 * 14
    assert chunked.components.get("logits", 0) in (0, CHUNK * 152064 * 14)
    assert chunked.allocated < whole.allocated
    plan = planned("7b", run, vram=chunked.device)
    assert not plan.trains
    assert plan.fitting
    assert {option.loss_chunk for option in plan.fitting} == {CHUNK}


def test_larger_blocks_keep_fewer_boundaries() -> None:
    one, four = (RunSettings(seq_len=4096, block_size=size) for size in (1, 4))
    kept = [device_memory(qwen("7b"), run).components["boundaries"] for run in (one, four)]
    assert kept[0] == 4 * kept[1]
    assert block_workspace(qwen("7b"), four) > block_workspace(qwen("7b"), one)


def test_what_sets_the_pace() -> None:
    weights, rates = qwen("7b"), Rates(link=1e9, compute=1e15)
    assert step_time(weights, RunSettings(), rates).bound == "link"
    assert step_time(weights, RunSettings(), attrs.evolve(rates, compute=1e12)).bound == "compute"
    eager = step_time(weights, RunSettings(graphs=False), H200)
    assert eager.bound == "launches"
    assert 0.4 < eager.seconds < 0.6
    unknown = step_time(weights, RunSettings(), Rates(link=1e9))
    assert (unknown.compute, unknown.seconds) == (None, unknown.link)


def test_a_step_is_the_sum_of_its_phases() -> None:
    """With some layers resident the forward waits for the link and the backward for the GPU: the
    step takes longer than either of the two in sum."""
    weights, run = qwen("32b"), RunSettings(fused=True)
    some = step_time(weights, run, H200, resident=spread(17, layers=64))
    assert [phase.bound for phase in some.phases] == ["link", "link", "compute"]
    assert some.compute is not None
    assert some.seconds > 1.1 * max(some.link, some.compute)
    forward, _, backward = some.phases
    assert forward.seconds == pytest.approx(forward.link + (forward.compute or 0) / 64)
    assert backward.seconds == pytest.approx((backward.compute or 0) + backward.link / 64)
    assert some.seconds == pytest.approx(sum(p.seconds for p in some.phases) + H200.beside)
    everything = step_time(weights, run, H200, resident=frozenset(range(64)))
    assert [phase.link for phase in everything.phases][::2] == [0.0, 0.0]
    long = step_time(weights, attrs.evolve(run, seq_len=4096), H200)
    assert [phase.bound for phase in long.phases][::2] == ["compute", "compute"]


def test_micro_batches_and_the_optimizers_state_add_up() -> None:
    weights, run = qwen("7b"), RunSettings(optimizer_state="host")
    once, four = (step_time(weights, attrs.evolve(run, accumulate=n), H200) for n in (1, 4))
    moved = 16 * weights.adapter_count(run.rank) / H200.link
    assert once.optimizer == four.optimizer == pytest.approx(moved)
    launched = 28 * 7 * 2 * H200.optimizer
    apart = moved + launched
    assert four.seconds - apart == pytest.approx(4 * (once.seconds - apart))
    fused = step_time(weights, attrs.evolve(run, fused=True), H200)
    assert once.seconds - fused.seconds == pytest.approx(launched)
    assert four.link - moved == pytest.approx(4 * (once.link - moved))
    state = 8 * weights.adapter_count(run.rank)
    assert four.streamed - state == 4 * (once.streamed - state)


def test_nothing_is_dequantised_in_bf16() -> None:
    nf4, bf16 = (
        step_time(qwen("7b"), RunSettings(precision=precision), H200)
        for precision in ("nf4", "bf16")
    )
    assert nf4.compute is not None
    assert bf16.compute is not None
    matrices = sum(w.count for layer in qwen("7b").layers for w in layer if w.linear)
    assert nf4.compute - bf16.compute == pytest.approx(3 * matrices / H200.dequantise)
    assert bf16.link > 3 * nf4.link


# what fits


def planned(shape: str, run: RunSettings | None = None, **room: int) -> RunPlan:
    return plan_run(model_of("qwen2", shape), run or RunSettings(), rates=H200, **room)


@pytest.mark.parametrize("shape", ["7b", pytest.param("32b", marks=pytest.mark.slow)])
def test_a_budget_keeps_layers(shape: str) -> None:
    sizes = qwen(shape).layer_bytes("nf4")
    need = planned(shape).memory.device + memory.more_graphs(RunSettings(), layers=len(sizes))
    seconds, kept = [], []
    for vram in (need + sum(sizes) * part // 7 for part in range(8)):
        plan = planned(shape, vram=vram)
        assert plan.kept_time is not None
        assert plan.kept == (vram - need) // sizes[0]
        assert plan.kept_time.compute == plan.time.compute
        seconds.append(plan.kept_time.seconds)
        kept.append(plan.kept)
    assert kept[-1] == len(sizes)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == planned(shape).time.seconds
    everything = planned(shape, vram=need + sum(sizes)).kept_time
    assert everything is not None
    assert everything.streamed == qwen(shape).head_bytes
    assert planned(shape).kept_time is None


def test_a_32b_model_on_a_small_card() -> None:
    plan = planned("32b", vram=int(6.4e9), ram=int(64e9))
    assert plan.loads
    assert plan.trains
    assert plan.advice is None
    assert plan.longest is not None
    longer = attrs.evolve(plan.run, seq_len=plan.longest + 64)
    assert plan.longest >= 512
    assert not planned("32b", longer, vram=int(6.4e9), ram=int(64e9)).trains


def test_settings_that_save_memory_are_found() -> None:
    run = RunSettings(seq_len=2048, rank=64, fused=True)
    need = planned("7b", run).memory.device
    plan = planned("7b", run, vram=need - 1)
    assert not plan.trains
    assert plan.fitting
    assert all(device_memory(plan.model.weights, option).device < need for option in plan.fitting)
    assert planned("7b", run, vram=need).fitting[0] == run


def test_host_memory_that_is_too_small() -> None:
    plan = planned("72b", vram=int(80e9), ram=int(7e9))
    assert not plan.loads
    assert (plan.fitting, plan.longest) == ((), None)


def test_layers_in_files_where_memory_does_not_hold_them() -> None:
    plan = planned("72b", vram=int(80e9), ram=int(32e9))
    assert not plan.loads
    assert not plan.trains
    assert {option.host for option in plan.fitting} == {"mmap"}
    asked = planned("72b", RunSettings(host="mmap"), vram=int(80e9), ram=int(32e9))
    assert asked.loads
    assert asked.trains
    assert asked.host["ring"] == 3 * qwen("72b").layer_bytes("nf4")[0]
    assert "layers" not in asked.host
    assert asked.files == planned("72b").host["layers"]
    enough = planned("72b", vram=int(80e9), ram=int(64e9))
    assert {option.host for option in enough.fitting} == {"pinned"}


def test_where_resident_fits_it_is_the_right_choice() -> None:
    assert planned("7b", vram=int(80e9)).advice == "resident"
    assert planned("7b", vram=int(10e9)).advice == "checkpointing"
    assert planned("7b", vram=int(6e9)).advice is None
    assert planned("7b").advice is None


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (RunSettings(seq_len=40000), "--seq-len 40000 is more than the 32768 positions"),
        (RunSettings(block_size=99), "--block-size 99 is more than the 28 layers"),
    ],
)
def test_runs_that_cannot_be(run: RunSettings, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        planned("7b", run)


# reading


def write_checkpoint(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = {
        name: {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def test_headers_and_config_agree(tmp_path: Path) -> None:
    config = config_of("gemma4", "tiny-e2b")
    say = FAMILIES["gemma4"].weights
    assert say is not None
    folder = write_checkpoint(tmp_path / "model", config, say(config))
    from_headers = read_model(str(folder))
    from_config = read_model(str(folder / "config.json"))
    assert from_headers.weights == from_config.weights
    assert (from_headers.download, from_headers.disk) == (
        0,
        (folder / "model.safetensors").stat().st_size,
    )
    assert from_config.download == 2 * from_config.weights.count
    assert from_config.softcap


def test_towers_are_counted_from_headers_and_named_otherwise(tmp_path: Path) -> None:
    config = config_of("qwen3_5", "tiny-multimodal")
    say = FAMILIES["qwen3_5"].weights
    assert say is not None
    shapes = {
        name.replace("model.", "model.language_model.", 1): shape
        for name, shape in say(config).items()
    }
    shapes |= {"model.visual.blocks.0.mlp.weight": (64, 64), "mtp.layers.0.x.weight": (64, 64)}
    folder = write_checkpoint(tmp_path / "model", config, shapes)
    counted = read_model(str(folder)).weights
    assert [w.name for w in counted.towers] == ["model.visual.blocks.0.mlp.weight"]
    assert len(counted.layers) == 4
    named = read_model(str(folder / "config.json")).weights
    assert (named.towers, named.uncounted) == ((), ("vision_config",))
    assert named.layer_bytes("nf4") == counted.layer_bytes("nf4")


def test_a_quantised_checkpoint_is_planned_from_its_config(tmp_path: Path) -> None:
    config = config_of("qwen2", "tiny")
    packed = {
        f"model.layers.{number}.mlp.up_proj.weight{part}": shape
        for number in range(config["num_hidden_layers"])
        for part, shape in (("", (8192, 1)), (".absmax", (4,)))
    }
    packed["model.embed_tokens.weight"] = (512, 64)
    folder = write_checkpoint(tmp_path / "model", {**config, **NF4}, packed)
    model = read_model(str(folder))
    assert model.weights == qwen("tiny")
    assert (model.download, model.quantised) == (0, "nf4")
    assert plan_run(model, RunSettings(seq_len=32), rates=H200).loads
    with pytest.raises(CheckpointError, match="precision='bf16' cannot be had from it"):
        plan_run(model, RunSettings(seq_len=32, precision="bf16"), rates=H200)


NF4 = {
    "quantization_config": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
}


@pytest.mark.parametrize(
    "saved",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_4bit": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("inner", [False, True], ids=["config", "text_config"])
def test_what_a_load_refuses_as_quantised_is_not_planned(
    saved: dict[str, Any], inner: bool, tmp_path: Path
) -> None:
    from poros_loaders.bnb_config import _saved_config

    config = dict(config_of("qwen2", "tiny"))
    path = tmp_path / "config.json"
    if inner:
        config["text_config"] = {**config, "quantization_config": saved}
    else:
        config["quantization_config"] = saved
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        read_model(str(path))
    checkpoint: Any = SimpleNamespace(path=path)
    with pytest.raises(CheckpointError) as loading:
        _saved_config(checkpoint, saved)
    assert str(refused.value) == str(loading.value)


def test_shards_that_are_missing(tmp_path: Path) -> None:
    config = config_of("qwen2", "tiny")
    say = FAMILIES["qwen2"].weights
    assert say is not None
    shapes = say(config)
    folder = write_checkpoint(tmp_path / "model", config, shapes)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names = sorted(shapes)
    for shard, part in zip(shards, (names[:9], names[9:]), strict=True):
        write_checkpoint(folder, config, {name: shapes[name] for name in part})
        (folder / "model.safetensors").rename(folder / shard)
    assert len(read_model(str(folder)).weights.layers) == config["num_hidden_layers"]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
    assert local_headers(folder) is not None
    (folder / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of its 2 shards: {shards[1]}"):
        read_model(str(folder))
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lacks 1 of its 2 shards: \.\./x"):
        read_model(str(folder))
    for text in ("[]", "{}", '{"weight_map": 3}', "{"):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="has no 'weight_map'"):
            read_model(str(folder))
    index.unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of its 2 shards: number 2"):
        read_model(str(folder))


def test_a_config_of_another_model_than_the_headers(tmp_path: Path) -> None:
    config = config_of("qwen2", "tiny")
    say = FAMILIES["qwen2"].weights
    assert say is not None
    layers = config["num_hidden_layers"]
    folder = write_checkpoint(
        tmp_path / "model", {**config, "num_hidden_layers": layers + 3}, say(config)
    )
    with pytest.raises(CheckpointError, match=f"says {layers + 3} layers .* have {layers}"):
        read_model(str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 0}, "sizes cannot be a model's"),
        ({"hidden_size": 0}, "sizes cannot be a model's"),
        ({"hidden_size": -64}, "sizes cannot be a model's"),
        ({"hidden_size": "64"}, "config"),
        ({"hidden_size": 64.0}, "sizes cannot be a model's"),
        ({"vocab_size": []}, "config"),
        ({"num_hidden_layers": "four"}, "config"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"max_position_embeddings": [1]}, r"max_position_embeddings is \[1\]"),
        ({"text_config": ["x"]}, "text_config"),
        ({"text_config": "x"}, "text_config"),
    ],
    ids=str,
)
def test_configs_that_cannot_be(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_of("qwen2", "tiny"), **change}))
    with pytest.raises(CheckpointError, match=said):
        read_model(str(path))


def test_a_family_that_does_not_say_its_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("qwen2", "tiny")
    say = FAMILIES["qwen2"].weights
    assert say is not None
    silent = SimpleNamespace(value=SimpleNamespace(name="qwen2", weights=None))
    found = SimpleNamespace(family_for=lambda config: silent)
    monkeypatch.setattr("poros_core.planner.plugins", lambda: found)
    folder = write_checkpoint(tmp_path / "model", config, say(config))
    assert read_model(str(folder)).weights == qwen("tiny")
    with pytest.raises(CheckpointError, match="does not say its shapes from a config alone"):
        read_model(str(folder / "config.json"))


def test_a_config_that_says_too_little(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 4}))
    with pytest.raises(CheckpointError, match="does not say 'hidden_size'"):
        read_model(str(path))


def test_damaged_headers(tmp_path: Path) -> None:
    assert local_headers(tmp_path) is None
    texts = (b"none", b"[]", b"3", b'{"x": 1}', b'{"x": {"shape": "ab"}}', b"[" * 100_000)
    texts += (b'{"x": {"shape": [-1]}}', b'{"x": {"shape": [1.5]}}', b"\xff\xfe")
    whole = [struct.pack("<Q", len(text)) + text for text in texts]
    for content in (b"", b"\xff" * 16, *whole):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="is no safetensors file"):
            local_headers(tmp_path)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        sort_weights({"x.weight": (1,)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.N"):
        sort_weights({"model.embed_tokens.weight": (4, 4)})


def test_headers_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SimpleNamespace(shape=[4, 8], data_offsets=(10, 74))
    shards = {"a": SimpleNamespace(tensors={"x": tensor}), "b": SimpleNamespace(tensors={})}

    def answer(self: object, model: str, *, revision: str | None) -> Any:
        if model == "owner/torn":
            raise NotASafetensorsRepoError
        if model == "owner/far":
            raise OfflineModeIsEnabled
        return SimpleNamespace(files_metadata=shards)

    monkeypatch.setattr(headers.HfApi, "get_safetensors_metadata", answer)
    found = hub_headers("owner/name", revision=None)
    assert (found.shapes, found.missing, found.nbytes) == ({"x": (4, 8)}, 64, 0)
    with pytest.raises(CheckpointError, match="no safetensors files"):
        hub_headers("owner/torn", revision=None)
    with pytest.raises(CheckpointError, match="Name a local folder"):
        hub_headers("owner/far", revision=None)


# settings


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16GB", 16 * 10**9), ("1.5 GiB", 3 * 2**29), ("1000", 1000), ("2tb", 2 * 10**12)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text, what="x") == nbytes


def test_rates_and_what_is_neither() -> None:
    assert parse_rate("25GB/s", what="x", unit="GB/s", factor=1e9) == 25e9
    assert parse_rate("80", what="x", unit="TFLOPS", factor=1e12) == 80e12
    for text in ("", "GB", "-1GB", "0GB", "3 parsecs"):
        with pytest.raises(SettingsError, match="--ram must be a size such as 16GB"):
            parse_size(text, what="--ram")
    for text in ("", "0", "25GB"):
        with pytest.raises(SettingsError, match="must be a number of GB/s"):
            parse_rate(text, what="--link-rate", unit="GB/s", factor=1e9)
    with pytest.raises(SettingsError, match="seq_len must be 1 or more"):
        RunSettings(seq_len=0)


# the command


@pytest.fixture
def seven(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("qwen2", "7b")))
    return str(path)


@pytest.mark.parametrize("host", ["pageable", "mmap"])
def test_layers_that_are_not_page_locked_come_slower(host: Literal["pageable", "mmap"]) -> None:
    weights, run = qwen("7b"), RunSettings(host=host)
    locked = step_time(weights, RunSettings(), Rates(link=50e9))
    assert step_time(weights, run, Rates(link=50e9)) == locked  # nothing is known of them
    assert step_time(weights, run, Rates(link=50e9, ring=80e9)) == locked
    assert step_time(weights, RunSettings(), Rates(link=50e9, ring=20e9)) == locked
    slow = step_time(weights, run, Rates(link=50e9, ring=20e9))
    layers = locked.streamed - weights.head_bytes
    assert slow.link == pytest.approx(layers / 20e9 + weights.head_bytes / 50e9)
    memory, usual = host_memory(weights, run), host_memory(weights, RunSettings())
    assert memory.get("layers") == (usual["layers"] if host == "pageable" else None)
    assert memory["ring"] == 3 * weights.layer_bytes("nf4")[0]
    assert "ring" not in usual


def test_the_command(cli: Cli, seven: str) -> None:
    code, out, err = cli("plan", seven, "--vram-budget", "6GB", "--ram", "32GB", "--card", "h200")
    assert (code, err) == (0, "")
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines()[2:-3])
    assert rows["arena"] == "1.09 GB (slots 0.26 GB and head 1.09 GB, in turn)"
    assert rows["host memory"].startswith("5.85 GB, page-locked (layers 3.67 GB")
    assert "set by link" in rows["step, all streams"]
    assert rows["step, with the budget"].startswith("13 of 28 layers stay on the card: ")
    assert "It loads and trains." in out
    assert "The longest sequence that fits so has" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--vram-budget", "2GB"], 1, "no setting fits"),
        (["--vram-budget", "6GB", "--ram", "4GB"], 1, "It does not load"),
        (["--vram-budget", "6GB", "--ram", "8GB"], 1, "trains with poros.load(host='mmap'): as ex"),
        (["--ram", "8GB", "--host", "mmap"], 0, "to download, packed layers 3.67 GB, adapter"),
        (["--host", "pageable"], 0, "6.24 GB, page-locked but for layers (layers 3.67 GB, ring"),
        (["--host", "mmap", "--card", "h200"], 0, "which are not page-locked, at 25.5 GB/s"),
        (["--host", "mmap", "--link-rate", "12GB/s"], 0, "at 12.0 GB/s (as given); the"),
        (["--seq-len", "2048", "--vram-budget", "7.8GB"], 1, "trains with poros.offload_optim"),
        (["--vram-budget", "16GB"], 0, "is the right choice"),
        ([], 0, "Give --vram-budget and --ram"),
        (["--vram-budget", "6GB"], 0, "Host memory was not judged: give --ram."),
        (["--ram", "64GB"], 0, "The card's memory was not judged: give --vram-budget."),
        (["--compute-rate", "1TFLOPS"], 0, "set by compute"),
        (["--link-rate", "12GB/s"], 0, "at 12.0 GB/s (as given); the GPU's rate is not known"),
    ],
)
def test_verdicts(cli: Cli, seven: str, words: list[str], code: int, said: str) -> None:
    found, out, _ = cli("plan", seven, *words)
    assert (found, said in out) == (code, True), out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--precision", "fp4"], "precision must be one of: nf4, bf16"),
        (["--graphs", "maybe"], "graphs must be one of"),
        (["--card", "abacus"], "Rates were measured on h200 only"),
        (["--vram-budget", "big"], "--vram-budget must be a size"),
    ],
)
def test_bad_input(cli: Cli, seven: str, words: list[str], said: str) -> None:
    code, out, err = cli("plan", seven, *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_measured_link(cli: Cli, seven: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poros.cli.plan, "copy_rate", lambda: 12.5e9)
    code, out, _ = cli("plan", seven, "--link-rate", "measured")
    assert code == 0
    assert "at 12.5 GB/s (measured on this machine)" in out

    def nothing() -> float:
        raise PorosError("The copy rate cannot be measured here.")

    monkeypatch.setattr(poros.cli.plan, "copy_rate", nothing)
    code, _, err = cli("plan", seven, "--link-rate", "measured")
    assert (code, err) == (2, "Error: The copy rate cannot be measured here.\n")


def test_what_is_not_counted_is_said(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("gemma3", "tiny-multimodal")))
    assert "Not counted: vision_config" in cli("plan", str(path), "--seq-len", "64")[1]


def test_json_without_torch(seven: str) -> None:
    done = command("plan", seven, "--vram-budget", "16GB", "--ram", "64GB", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["device"]["peak_allocated_bytes"] == sum(answer["device"]["components"].values())
    assert answer["resident"]["right_choice"] == "resident"
    assert answer["trains"] is True
    assert answer["fitting"][0] == answer["settings"]
    assert answer["step"]["complete"] is False


def test_check_refuses_what_a_load_refuses_as_quantised(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {**config_of("qwen2", "tiny"), "quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    code, out, err = cli("check", str(path))
    assert code == 1
    assert "is quantised already, with 'gptq', and NF4 cannot be had from it" in out + err
    path.write_text(json.dumps({**config, **NF4}))
    assert cli("check", str(path))[0] == 0
