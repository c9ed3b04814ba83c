"""The checks of the contract kit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from poros_core.conformance.bench import Batch, Bench, ConformanceError
from poros_core.conformance.manifest import tensor_manifest
from poros_core.gate.arms import Arm
from poros_core.gate.compare import Comparison, Divergence, StepView
from poros_core.gate.evidence import Evidence
from poros_core.gate.fault import PlantedFault
from poros_core.gate.run import least_bytes
from poros_core.load import choose_strategy, load
from poros_core.plugins import plugins
from poros_core.prepare import prepare, unprepare
from poros_core.protocols import LoadRequest

__all__ = [
    "check_evaluation",
    "check_load_bytes",
    "check_planted_fault",
    "check_training",
    "check_unprepare",
]

_NEW_TOKENS = 3
"""The first comes from the prompt, the others from a cache that one token was added to, and two."""


def check_load_bytes(bench: Bench) -> None:
    """Check that every way to load gives the same bytes: parameters, buffers, and the state of
    quantised weights, each by dtype, shape and SHA-256.

    Raises:
        ConformanceError: a tensor differs between the streamed load, the standard load and what
            Transformers' own ``from_pretrained`` gives.
    """
    workshop = bench.workshop
    precision = workshop.options.precision
    request = LoadRequest(
        path=workshop.path, family=workshop.subject.family, device=workshop.device
    )
    reference = tensor_manifest(choose_strategy(precision, "auto", request).load_resident(request))
    names = [entry.value.strategy for entry in plugins().loaders]
    for strategy in dict.fromkeys(names):
        if plugins().loaders.get(f"{precision}/{strategy}") is None:
            continue
        model = load(
            workshop.path, precision=precision, load_strategy=strategy, device=workshop.device
        )
        found = tensor_manifest(model)
        wrong = [n for n in {**reference, **found} if reference.get(n) != found.get(n)]
        if wrong:
            raise ConformanceError(
                f"{bench.title}: loading {precision} with strategy '{strategy}' gives other bytes "
                f"than from_pretrained in {len(wrong)} of {len(reference)} tensors, first "
                f"'{wrong[0]}': {found.get(wrong[0])} instead of {reference.get(wrong[0])}."
            )


def check_training(bench: Bench) -> None:
    """Check that training is exact: loss, gradient norms, optimizer state and adapter weights,
    with dropout, accumulation, padded batches, at every block size.

    Raises:
        ConformanceError: something differs, or the run does not prove that the base streamed and
            that every adapter trained.
    """
    while len(bench.trace) < bench.steps:
        bench.step("training")
    padded = any((b["attention_mask"] == 0).any() for batches, _ in bench.trace for b in batches)
    assert padded, "no batch was padded"
    for arm in bench.streamed.values():
        _check_all_streams(bench, arm)
        evidence = Evidence(
            counters=bench.counters[arm.name],
            resident_units=arm.counters()["resident_units"],
            least_bytes=bench.workshop.options.accumulate * least_bytes(arm),
            untrained=arm.untrained(),
        )
        problems = evidence.problems()
        if problems:
            raise ConformanceError(f"{bench.title}, training, {arm.name}: {'; '.join(problems)}.")


def check_evaluation(bench: Bench) -> None:
    """Check that evaluation logits, and ``generate`` with and without cache, are the resident
    model's. A training step before makes the adapters count; one after, or the training check
    if it is still to come, shows that training goes on exactly, as that of the control does, which
    is not evaluated unless something differs.

    Raises:
        ConformanceError: something differs.
    """
    if not bench.trace:
        bench.step("training before evaluation")
    assert bench.resident is not None
    assert bench.control is not None
    batch = next(bench.batches)
    with _layout_kept(bench.resident.model):
        reference = _evaluate(bench.resident.model, batch)
    for arm in bench.streamed.values():
        for what, tensor in _evaluate(arm.model, batch).items():
            if not torch.equal(tensor, reference[what]):
                _check_control_evaluates(bench, batch, reference)
                raise ConformanceError(
                    f"{bench.title}, evaluation: {what} of {arm.name} differ from resident's."
                )
    if len(bench.trace) >= bench.steps:
        bench.step("training after evaluation")


def check_planted_fault(bench: Bench) -> tuple[PlantedFault, Divergence]:
    """Check that the training check can fail: flip one bit of one streamed weight.

    Returns:
        The bit, and where it first showed.

    Raises:
        ConformanceError: nothing differed.
    """
    if not bench.trace:
        bench.step("training")
    options = attrs.evolve(bench.workshop.options, plant_fault=True)
    arm, fault = attrs.evolve(bench.workshop, options=options).streamed()
    assert isinstance(fault, PlantedFault)
    comparison = Comparison()
    for step, (batches, reference) in enumerate(bench.trace, start=1):
        view = arm.step(batches)
        shown = StepView({name: view.surfaces[name] for name in reference.surfaces})
        comparison.compare(reference, shown, step=step)
        if comparison.first is not None:
            return fault, comparison.first
    raise ConformanceError(
        f"{bench.title}: a bit of '{fault.tensor}' was flipped and nothing differed in "
        f"{len(bench.trace)} steps. Check that the layers that the family names are those that "
        "compute."
    )


def check_unprepare(bench: Bench) -> None:
    """Check that a model that was loaded the ordinary way is, after ``prepare``, a step and
    ``unprepare``, what it was: the same parameter objects with the same bytes in the same place,
    no attribute left behind that the step leaves on no resident model, and the next step exact.

    Raises:
        ConformanceError: something is not as it was.
    """
    bench.build()
    assert bench.resident is not None
    assert bench.control is not None
    model = bench.control.model
    objects = {name: id(param) for name, param in model.named_parameters()}
    places = {name: param.device for name, param in model.named_parameters()}
    frozen_bytes = tensor_manifest(model, frozen=True)
    attributes, resident_had = _attributes(model), _attributes(bench.resident.model)
    prepare(model, block_size=min(2, bench.layers), verbose=False)
    bench.step("prepare of a resident model", streamed=False)
    unprepare(model)
    resident_has = _attributes(bench.resident.model).items()
    attributes |= {name: kind for name, kind in resident_has if resident_had.get(name) != kind}
    params = dict(model.named_parameters())
    for what, before, after in (
        ("parameter objects", objects, {name: id(param) for name, param in params.items()}),
        ("devices", places, {name: param.device for name, param in params.items()}),
        ("bytes of the base", frozen_bytes, tensor_manifest(model, frozen=True)),
        ("module attributes", attributes, _attributes(model)),
    ):
        wrong = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if wrong:
            raise ConformanceError(
                f"{bench.title}, unprepare: {len(wrong)} {what} are not as they were, first "
                f"'{wrong[0]}': {after.get(wrong[0])} instead of {before.get(wrong[0])}."
            )
    bench.step("unprepare", streamed=False)
    bench.reset()


def _check_control_evaluates(
    bench: Bench, batch: Batch, reference: dict[str, torch.Tensor]
) -> None:
    """Raise another error if two resident models differ too."""
    assert bench.control is not None
    with _layout_kept(bench.control.model):
        control = _evaluate(bench.control.model, batch)
    wrong = [what for what in reference if not torch.equal(control[what], reference[what])]
    if wrong:
        raise ConformanceError(
            f"{bench.title}, evaluation: {wrong[0]} of two resident models differ, so nothing can "
            "be said of streaming. Find the kernel that is not deterministic."
        )


def _evaluate(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return logits of a padded batch, and greedy continuations of left-padded prompts."""
    generator: Any = model
    prompt = batch["input_ids"][:, :8]
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    model.eval()
    with torch.no_grad():
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        found = {"logits": model(**inputs).logits}
        for use_cache in (True, False):
            found[f"tokens generated with use_cache={use_cache}"] = generator.generate(
                input_ids=prompt,
                attention_mask=mask,
                do_sample=False,
                use_cache=use_cache,
                min_new_tokens=_NEW_TOKENS,
                max_new_tokens=_NEW_TOKENS,
            )
    model.train()
    return found


def _check_all_streams(bench: Bench, arm: Arm) -> None:
    prepared = arm.prepared
    assert prepared is not None
    named, asked = len(prepared.plan.layers), bench.layers
    if named != asked:
        raise ConformanceError(
            f"{bench.title}: the family's layers returns {named} layers and the config asks for "
            f"{asked}. Return all layers that the decoder's forward calls."
        )
    stay = {id(param) for param in prepared.plan.on_device}
    for unit in prepared.plan.layers:
        left = [name for name, param in unit.module.named_parameters() if id(param) in stay]
        if left:
            raise ConformanceError(
                f"{bench.title}: {len(left)} frozen weights of {unit.name} stay on the device "
                f"(first: '{left[0]}'). Check what the family's layers returns."
            )


@contextmanager
def _layout_kept(model: nn.Module) -> Iterator[None]:
    """Keep a resident model's weights as they were loaded, as streaming does: some precisions
    repack them for inference on a CPU, which rounds."""
    codecs = [codec for codec, _ in plugins().codecs()]
    put_back = [codec.keep_layout(module) for module in model.modules() for codec in codecs]
    yield
    for put in put_back:
        put()


def _attributes(model: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}": type(value).__name__
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
    }
