"""A user's gate: leading layers, fingerprints from elsewhere, the report and the model card."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from poros_core.errors import GateError
from poros_core.gate import GateOptions, arms
from poros_core.gate import options as gate_options
from poros_core.gate.arms import Arm, Workshop
from poros_core.gate.card import BEGIN, END, card_section, check_card, write_card
from poros_core.gate.evidence import Evidence
from poros_core.gate.fingerprints import sealed
from poros_core.gate.html_report import html_report
from poros_core.gate.layers import cut_checkpoint, leading
from poros_core.gate.meaning import proof, to_repeat
from poros_core.gate.options import subject_of
from poros_core.gate.packed_checkpoint import write_packed_checkpoint
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.gate.record import GateResult
from poros_core.gate.run import GateFiles, run_gate
from poros_core.plugins import plugins
from poros_core.settings import Settings
from poros_core.status import read_records

CPU = torch.device("cpu")
SHORT = GateOptions(family="qwen2", shape="tiny", layers=1, steps=2, dropout=0.1)
SHAPES = {
    (entry.value.name, name): shape
    for entry in plugins().families
    for name, shape in entry.value.shapes.items()
}


class Page(HTMLParser):
    """What a page consists of; void elements aside, every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def named(page: Page, tag: str) -> list[dict[str, str | None]]:
    return [attributes for name, attributes in page.tags if name == tag]


# leading layers


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_a_cut_config_keeps_the_kinds_of_its_layers(layers: int) -> None:
    whole = SHAPES["gemma4", "tiny-e2b"]
    cut = leading(whole, layers)
    assert cut["num_hidden_layers"] == layers
    assert cut["layer_types"] == whole["layer_types"][:layers]
    assert cut["num_kv_shared_layers"] == max(0, layers - 4)
    assert whole["num_hidden_layers"] == 6
    multimodal = leading(SHAPES["gemma3", "tiny-multimodal"], 2)
    assert multimodal["text_config"]["num_hidden_layers"] == 2
    assert leading(whole, 6) == whole


def test_a_checkpoint_is_cut_byte_for_byte(tmp_path: Path) -> None:
    source, target = tmp_path / "whole", tmp_path / "cut"
    target.mkdir()
    whole = SHAPES["gemma3", "tiny-multimodal"]
    write_random_checkpoint(
        whole, source, seed=1, dtype=torch.bfloat16, device=CPU, max_shard_bytes=60_000
    )
    files = sorted(source.glob("*.safetensors"))
    assert len(files) > 2
    cut_checkpoint(source, target, config=leading(whole, 1), whole=4)
    before = {name: t for file in files for name, t in load_file(file).items()}
    after = {
        name: t for file in target.glob("*.safetensors") for name, t in load_file(file).items()
    }
    gone = before.keys() - after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert {re.sub(r".*\.layers\.(\d+)\..*", r"\1", name) for name in gone} == {"1", "2", "3"}
    assert not any("vision" in name for name in gone)
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == after.keys()


@pytest.mark.slow
def test_a_model_s_leading_layers_are_gated_and_said_to_be_no_more(
    gate_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    source, file = tmp_path / "my-model", tmp_path / "records" / "r.json"
    html, card = tmp_path / "r.html", tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n\n# A model")
    file.parent.mkdir()
    write_random_checkpoint(
        SHAPES["qwen2", "tiny"], source, seed=1, dtype=torch.bfloat16, device=CPU
    )
    code, out, _ = gate_cli(
        *("--model", str(source), "--layers", "2", "--steps", "2", "--seq-len", "16"),
        *("--batch", "2", "--rank", "2", "--json", str(file)),
        *("--html", str(html), "--card", str(card)),
    )
    record = json.loads(file.read_text())
    assert (code, record["verdict"], record["kind"]) == (0, "exact", "leading-layers-parity")
    assert record["layers"] == {"trained": 2, "of": 4}
    assert record["evidence"]["adapter_tensors"] == 2 * 7 * 2
    assert "It holds for the first 2 of 4 layers and is no claim about the rest." in out
    check_page(html.read_text(encoding="utf-8"))
    check_written_card(card.read_text(encoding="utf-8"))
    # and it validates no family
    record["stack"]["gpu"], record["shape"] = "NVIDIA H200", "7b"
    file.write_text(json.dumps(record))
    assert read_records([file.parent]) == []


def check_page(html: str) -> None:
    page = Page(html)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert "http" not in html
    (resident, streamed) = named(page, "polyline")
    assert resident["points"] == streamed["points"]
    assert len((streamed["points"] or "").split()) == 2
    text = " ".join(page.text)
    assert "Poros gate: qwen2 my-model, NF4" in text
    assert "Memory is not measured on a CPU." in text
    assert "first 2 of 4 layers" in text


def check_written_card(card: str) -> None:
    assert card.startswith("---\nlicense: mit\n---\n\n# A model\n\n" + BEGIN)
    assert "**exact**" in card
    assert "\n$ poros gate --model my-model --steps 2 --seq-len 16 --batch 2 --rank 2" in card


def test_a_checkpoint_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    config = leading(SHAPES["gemma4", "tiny-e2b"], 2)
    with pytest.raises(GateError, match="per-layer inputs are one tensor"):
        cut_checkpoint(tmp_path, tmp_path, config=config, whole=6)
    config = leading(SHAPES["qwen2", "tiny"], 2)
    with pytest.raises(GateError, match="holds no safetensors file"):
        cut_checkpoint(tmp_path, tmp_path, config=config, whole=4)


def test_as_many_layers_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = Workshop.resident

    def small(self: Workshop, name: str) -> Arm:
        tried.append(self.subject.depth)
        if self.subject.depth > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, name)

    monkeypatch.setattr(Workshop, "resident", small)
    result = run_gate(attrs.evolve(SHORT, layers="fit"))
    assert tried == [4, 2, 2]
    assert (result.verdict, result.record["layers"]) == ("exact", {"trained": 2, "of": 4})
    with pytest.raises(GateError, match="Use --layers fit for as many leading layers as fit"):
        run_gate(attrs.evolve(SHORT, layers=3))


# random weights that are written quantised


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("family", "shape"), [("qwen2", "tiny"), ("gemma3", "tiny-multimodal")], ids=str
)
def test_rolled_weights_are_those_of_a_quantised_model(
    family: str, shape: str, tmp_path: Path
) -> None:
    options = GateOptions(family=family, shape=shape, weights="rolled")
    workshop = Workshop(options=options, subject=subject_of(options), path=tmp_path, device=CPU)
    plain, saved, rolled = (tmp_path / name for name in ("plain", "saved", "rolled"))
    rolled.mkdir()
    config = workshop.subject.config
    write_random_checkpoint(config, plain, seed=0, dtype=torch.bfloat16, device=CPU)
    model: Any = workshop.plain(plain)
    model.save_pretrained(saved)
    write_packed_checkpoint(config, rolled, seed=0, device=CPU, load=workshop.plain)
    expected, found = tensors_of(saved), tensors_of(rolled)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == shapes
    first = next(n for n in found if "layers.0.mlp.up_proj.weight" in n and "vision" not in n)
    for name in (first, f"{first}.absmax", first.replace("mlp.up_proj", "input_layernorm")):
        if name not in found:
            continue
        layers = [found[name.replace("layers.0.", f"layers.{i}.")] for i in range(4)]
        assert torch.equal(layers[0], expected[name])
        assert all(not torch.equal(a, b) for a, b in itertools.combinations(layers, 2))
        # all of a kind hold the same values in another order
        same = [torch.equal(a.flatten().sort()[0], layers[0].flatten().sort()[0]) for a in layers]
        assert same.count(True) >= 3


def test_a_gate_on_rolled_weights_is_exact() -> None:
    result = run_gate(attrs.evolve(SHORT, layers=3, weights="rolled"))
    assert (result.verdict, result.record["settings"]["weights"]) == ("exact", "rolled")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "bf16"}, "is for quantised bases"),
        ({"family": "gemma4", "shape": "tiny-e2b", "layers": None}, "layers share tensors"),
        ({"shape": None, "model": "x/y", "seq_len": 8}, "--model has its own"),
    ],
)
def test_weights_that_cannot_be_rolled(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SHAPES["qwen2", "tiny"]
    monkeypatch.setattr(gate_options, "read_config", lambda model: whole)
    with pytest.raises(GateError, match=message):
        run_gate(attrs.evolve(SHORT, weights="rolled", **changes))


# what a budget explains


def test_a_budget_explains_units_that_stay() -> None:
    def problems(**changes: Any) -> list[str]:
        given: dict[str, Any] = {"resident_units": 2, "least_bytes": 100, "untrained": []}
        counters = [{"bytes_streamed": 120}]
        return Evidence(counters=counters, **{**given, **changes}).problems()

    assert problems() == ["2 units stayed on the device without a budget"]
    assert problems(budget=500, resident_bytes=400) == []
    assert problems(budget="auto", resident_bytes=400) == []
    (too_much,) = problems(budget=500, resident_bytes=501)
    assert too_much.endswith("stayed on the device, more than the budget of 500")
    (too_little,) = problems(budget=500, least_bytes=121)
    assert "a smaller --vram-budget shows streaming" in too_little


def test_micro_batches_that_stream_each_for_itself_void_a_block_major_gate() -> None:
    def problems(streamed: int) -> list[str]:
        counters = [{"bytes_streamed": 120}, {"bytes_streamed": streamed}]
        return Evidence(
            counters=counters, resident_units=0, least_bytes=100, untrained=[], most_bytes=150
        ).problems()

    assert problems(150) == []
    assert problems(151)[0].startswith("a step streamed 151 bytes, and its micro-batches together")


def test_activations_are_no_weights() -> None:
    def problems(activation_bytes: int) -> list[str]:
        step = {"bytes_streamed": 120, "activation_bytes": activation_bytes}
        return Evidence(counters=[step], resident_units=0, least_bytes=100, untrained=[]).problems()

    assert problems(40) == []
    assert problems(42)[0].startswith("a step streamed 99 bytes")


def test_activations_that_stay_on_the_device_void_a_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = arms.prepare

    def forgetful(model: Any, *, offload_activations: bool, **rest: Any) -> Any:
        return real(model, **rest)

    asked = attrs.evolve(SHORT, layers=2, settings=Settings(offload_activations=True))
    found = run_gate(asked)
    assert (found.verdict, found.record["arms"]["streamed"]["activation_bytes_per_step"] > 0) == (
        *("exact", True),
    )
    monkeypatch.setattr(arms, "prepare", forgetful)
    assert run_gate(asked).void_reasons == ["no activation went to the host, which was asked for"]


# fingerprints


@pytest.fixture(scope="module")
def fingerprints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GateResult]:
    file = tmp_path_factory.mktemp("fingerprints") / "f.json"
    return file, run_gate(SHORT, command="poros gate ...", files=GateFiles(write_fingerprints=file))


def forged(file: Path, folder: Path, change: Callable[[Any], object], *, seal: bool = True) -> Path:
    """Return a copy that was changed, and that its seal fits if that is made anew."""
    content = json.loads(file.read_text())
    change(content)
    copied = folder / "elsewhere.json"
    copied.write_text(json.dumps(sealed(content) if seal else content))
    return copied


def elsewhere(file: Path, folder: Path, **stack: str) -> Path:
    return forged(file, folder, lambda content: content["stack"].update(stack))


def test_on_an_equal_stack_fingerprints_decide_on_bits(
    fingerprints: tuple[Path, GateResult],
) -> None:
    file, written = fingerprints
    result = run_gate(SHORT, files=GateFiles(against=file))
    record = result.record
    assert (written.verdict, result.verdict, result.exit_status) == ("exact", "exact", 0)
    assert record["arms"].keys() == {"streamed"}
    assert (record["control"], record["control_exact"]) == (None, None)
    assert record["against"]["same_stack"] is True
    assert record["losses"]["streamed"] == written.record["losses"]["resident"]
    assert "by SHA-256 of every loss" in record["proof"]


def test_one_bit_is_found_by_fingerprints(fingerprints: tuple[Path, GateResult]) -> None:
    planted = attrs.evolve(SHORT, plant="flipped-bit")
    result = run_gate(planted, files=GateFiles(against=fingerprints[0]))
    assert (result.verdict, result.exit_status) == ("diverged", 1)
    assert str(result.divergence).startswith("step 1, loss, micro-batch 0: other bits; 1 of 1")
    assert result.record["surfaces"]["grad_norms"]["exact"] is False


def test_a_bit_that_no_known_value_shows_is_found(
    fingerprints: tuple[Path, GateResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Arm.step

    def step(self: Arm, batches: Any) -> Any:
        view = real(self, batches)
        name = next(name for name in self.params if "lora_A" in name)
        with torch.no_grad():
            self.params[name].view(-1)[3] += 1e-3  # one between the known ones
        return view

    monkeypatch.setattr(Arm, "step", step)
    result = run_gate(SHORT, files=GateFiles(against=fingerprints[0]))
    assert result.verdict == "diverged"
    assert result.divergence is not None
    assert (result.divergence.surface, result.divergence.differing) == ("adapter_weights", 0)
    assert "lora_A" in result.divergence.tensor


def test_on_another_stack_only_closeness_is_told(
    fingerprints: tuple[Path, GateResult], tmp_path: Path
) -> None:
    file = elsewhere(fingerprints[0], tmp_path, gpu="another GPU", torch="2.10.0")
    same = run_gate(SHORT, files=GateFiles(against=file))
    assert (same.verdict, same.exit_status) == ("other-stack", 3)
    assert same.record["against"]["differing"] == ["gpu", "torch"]
    assert all(s["max_abs_difference"] == 0.0 for s in same.record["surfaces"].values())
    planted = attrs.evolve(SHORT, plant="flipped-bit")
    other = run_gate(planted, files=GateFiles(against=file))
    assert (other.verdict, other.record["steps_compared"]) == ("other-stack", 2)
    difference = other.record["surfaces"]["loss"]["max_abs_difference"]
    assert difference > 0
    assert f"loss {difference:.2e}" in other.record["proof"]
    assert "nothing about bits" in other.record["proof"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "was written with seed 0, not 5"),
        ({"steps": 3}, "has 2 steps, fewer than --steps 3"),
        ({"layers": 3}, "was written with layers 1, not 3"),
        ({"seq_len": 9, "batch": 1}, r"with seq_len None, not 9 \(and batch differ too\)"),
    ],
)
def test_fingerprints_of_another_training_are_refused(
    change: dict[str, Any], message: str, fingerprints: tuple[Path, GateResult]
) -> None:
    with pytest.raises(GateError, match=message):
        run_gate(attrs.evolve(SHORT, **change), files=GateFiles(against=fingerprints[0]))


def test_fingerprints_of_other_inputs_are_refused(
    fingerprints: tuple[Path, GateResult], tmp_path: Path
) -> None:
    content = json.loads(fingerprints[0].read_text())
    assert content["checkpoint"].keys() == {"config.json", "model.safetensors"}
    content["checkpoint"]["model.safetensors"]["samples_sha256"] = "0"
    other, none = tmp_path / "other", tmp_path / "none"
    other.write_text(json.dumps(sealed(content)))
    none.write_text(json.dumps({"kind": "training-parity"}))
    with pytest.raises(GateError, match=r"other inputs: model\.safetensors is another"):
        run_gate(SHORT, files=GateFiles(against=other))
    with pytest.raises(GateError, match="holds no fingerprints"):
        run_gate(SHORT, files=GateFiles(against=none))


def set_losses(content: Any, value: float) -> None:
    for step in content["steps"]:
        step["surfaces"]["loss"]["values"]["micro-batch 0"] = [value]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("asked"), "has no 'asked'"),
        (lambda c: c.pop("stack"), "has no 'stack'"),
        (lambda c: c.pop("steps"), "has no 'steps'"),
        (lambda c: c.update(checkpoint=[]), "has no 'checkpoint'"),
        (lambda c: c.pop("version"), "another version of Poros wrote it"),
        (lambda c: c["steps"].reverse(), "has no step 1 where that belongs"),
        (lambda c: c["steps"][1]["surfaces"].pop("loss"), "step 2 has no 'loss'"),
        (lambda c: c["steps"][0]["surfaces"]["loss"].pop("values"), "step 1 has no 'loss'"),
        (lambda c: set_losses(c, 9.0), "contradicts itself: at step 1 its hash of loss is"),
    ],
)
def test_fingerprints_that_lack_something_are_refused(
    change: Callable[[Any], object],
    message: str,
    fingerprints: tuple[Path, GateResult],
    tmp_path: Path,
) -> None:
    with pytest.raises(GateError, match=message):
        run_gate(SHORT, files=GateFiles(against=forged(fingerprints[0], tmp_path, change)))


def test_fingerprints_that_were_changed_are_refused(
    fingerprints: tuple[Path, GateResult], tmp_path: Path
) -> None:
    file = forged(fingerprints[0], tmp_path, lambda c: set_losses(c, 9.0), seal=False)
    with pytest.raises(GateError, match="was changed since it was written"):
        run_gate(SHORT, files=GateFiles(against=file))


def test_a_stack_that_does_not_say_all_is_another_one(
    fingerprints: tuple[Path, GateResult], tmp_path: Path
) -> None:
    file = forged(fingerprints[0], tmp_path, lambda c: c["stack"].pop("gpu"))
    result = run_gate(SHORT, files=GateFiles(against=file))
    assert (result.verdict, result.record["against"]["differing"]) == ("other-stack", ["gpu"])


def test_on_a_cpu_bits_are_of_its_model_and_threads(
    fingerprints: tuple[Path, GateResult], tmp_path: Path
) -> None:
    stack = json.loads(fingerprints[0].read_text())["stack"]
    assert stack["cpu_threads"] == 1
    assert stack["cpu_kernels"] == torch.backends.cpu.get_cpu_capability()
    for name, value in (("cpu_threads", 3), ("cpu_model", "another")):
        file = forged(
            fingerprints[0], tmp_path, lambda c, n=name, v=value: c["stack"].update({n: v})
        )
        result = run_gate(SHORT, files=GateFiles(against=file))
        assert (result.verdict, result.record["against"]["differing"]) == ("other-stack", [name])


def test_a_difference_without_bound_is_null_in_a_record(
    fingerprints: tuple[Path, GateResult], tmp_path: Path
) -> None:
    def change(content: Any) -> None:
        content["stack"]["torch"] = "9.9"
        set_losses(content, float("nan"))
        for step in content["steps"]:
            step["surfaces"]["loss"]["sha256"] = "0"

    file = forged(fingerprints[0], tmp_path, change)
    record = run_gate(SHORT, files=GateFiles(against=file)).record
    assert record["against"]["largest"]["loss"] is None
    json.dumps(record, allow_nan=False)


def test_a_record_names_its_fingerprints(fingerprints: tuple[Path, GateResult]) -> None:
    file = fingerprints[0]
    record = run_gate(SHORT, files=GateFiles(against=file)).record
    against = record["against"]
    assert (against["file"], against["command"]) == ("f.json", "poros gate ...")
    assert against["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert to_repeat(record).endswith("--dropout 0.1 --layers 1 --against f.json")
    assert "--against f.json" in card_section(record)


def test_resuming_goes_without_fingerprints(fingerprints: tuple[Path, GateResult]) -> None:
    resumed = attrs.evolve(SHORT, resume_at=1)
    with pytest.raises(GateError, match="--resume-at goes without --against"):
        run_gate(resumed, files=GateFiles(against=fingerprints[0]))


# the report and the card


def test_the_report_of_a_divergence_names_it_and_escapes() -> None:
    result = run_gate(attrs.evolve(SHORT, plant="early-read"), command="poros gate <b>")
    record = json.loads(json.dumps(result.record, allow_nan=False))
    record["shape"] = "<script>alert(1)</script>"
    for number, arm in enumerate(record["arms"].values()):
        arm["peak_allocated_bytes"] = 10**9 * (number + 1)
    page = Page(html_report(record))
    text = " ".join(page.text)
    assert named(page, "script") == []
    assert "First divergence: step 1, loss," in text
    assert "layers are computed before their weights have arrived" in text
    widths = [float(rect["width"] or 0) for rect in named(page, "rect")]
    assert widths == sorted(widths)
    assert widths[2] == pytest.approx(3 * widths[0], rel=1e-3)


def test_a_card_is_written_again_in_place(
    fingerprints: tuple[Path, GateResult], tmp_path: Path
) -> None:
    card = tmp_path / "README.md"
    record = fingerprints[1].record
    card.write_text("# A model\n")
    write_card(card, record)
    card.write_text(card.read_text() + "\n## Licence\n")
    once = card.read_text()
    write_card(card, record)
    assert card.read_text() == once
    write_card(card, {**record, "verdict": "diverged"})
    changed = card.read_text()
    assert "**diverged**" in changed
    assert "**exact**" not in changed
    assert changed.endswith(END + "\n\n## Licence\n")
    new = tmp_path / "NEW.md"
    write_card(new, record)
    assert new.read_text().startswith(BEGIN)


def test_a_card_names_no_folder_of_this_machine(fingerprints: tuple[Path, GateResult]) -> None:
    record = dict(fingerprints[1].record)
    asked = {**record["asked"], "shape": None, "model": "/home/me/secret/my-model"}
    section = card_section({**record, "asked": asked, "shape": asked["model"]})
    assert "secret" not in section
    assert "qwen2 my-model, NF4" in section
    assert "--model my-model" in section
    hub = {**asked, "model": "Qwen/Qwen2.5-7B"}
    assert "qwen2 Qwen/Qwen2.5-7B" in card_section({**record, "asked": hub, "shape": hub["model"]})


@pytest.mark.parametrize("text", [BEGIN, END, END + BEGIN, BEGIN + END + BEGIN])
def test_a_card_with_broken_markers_is_refused_before_the_gate(
    text: str, gate_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    card = tmp_path / "README.md"
    card.write_text(text)
    code, out, err = gate_cli("--family", "qwen2", "--shape", "tiny", "--card", str(card))
    assert (code, out) == (2, "")
    assert "Remove what is left of them" in err
    with pytest.raises(GateError):
        check_card(card)
    assert card.read_text() == text


def test_what_is_proved_is_said_for_every_verdict(fingerprints: tuple[Path, GateResult]) -> None:
    record: dict[str, Any] = json.loads(json.dumps(fingerprints[1].record))
    assert "On another stack it shows nothing." in record["proof"]
    record["layers"]["trained"] = 4
    assert "of 4 layers" not in proof(record)
    record["settings"]["deterministic"] = False
    assert "free to be not deterministic" in proof(record)
    found = {"step": 3, "surface": "loss", "tensor": "micro-batch 0"}
    record["control"]["first_divergence"] = found
    said = {verdict: proof({**record, "verdict": verdict}) for verdict in VERDICTS}
    assert "(step 3, loss, micro-batch 0)" in said["not-deterministic"]
    assert "2 of 2 steps were equal" in said["unfinished"]
    assert said["void"].startswith("Nothing:")
    assert "differ where the record says" in said["diverged"]


VERDICTS = ("diverged", "not-deterministic", "unfinished", "void")
