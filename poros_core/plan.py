"""The block plan: what a model's units and blocks are, and what stays on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import frozen
from torch import nn

from poros_core.errors import PluginError, PrepareError, StateError
from poros_core.family import Family
from poros_core.protocols import TensorRef, WeightCodec

__all__ = ["BlockPlan", "Unit", "base_model_of", "build_plan", "group_layers"]


@frozen(kw_only=True)
class Unit:
    """What one copy moves.

    Attributes:
        name: ``"layer 12"`` or ``"head"``.
        module: the decoder layer or the head.
        refs: every frozen tensor of it that streams, in a fixed order.
        places: the frozen parameters that those tensors make up: the module that owns each, its
            name there, and the parameter.
    """

    name: str
    module: nn.Module
    refs: tuple[TensorRef, ...]
    places: tuple[tuple[nn.Module, str, nn.Parameter], ...]

    def keep_parameters(self) -> None:
        """Put back any parameter object that somebody replaced by another over the same bytes.

        PEFT's dequantisation does so on a CPU (``module.weight = module.weight.to(device)``); a
        unit binds the objects that it was planned with, so those must be the ones in the model.

        Raises:
            StateError: a parameter was replaced by one with bytes of its own.
        """
        for owner, name, param in self.places:
            found = owner._parameters.get(name)
            if found is param:
                continue
            if found is None or found.data_ptr() != param.data_ptr():
                raise StateError(
                    f"A base weight of {self.name} was replaced while the model was prepared, by "
                    "merging adapters for example. Load the model again; to merge, call "
                    "poros.unprepare(model) first."
                )
            owner._parameters[name] = param


@frozen(kw_only=True)
class BlockPlan:
    """The ordered blocks of a model, what precedes them and what follows.

    Attributes:
        model: the Transformers model, without PEFT's wrapping.
        decoder: the module whose forward runs the layers.
        layers: one unit per decoder layer, in the order of their calls. A layer without frozen
            tensors is a unit with no refs.
        head: the output embedding's unit, or None if it trains or there is none.
        embeddings: the decoder's tables, read from host memory in place: the input embedding's,
            and what some families look up for each layer. A table that trains is not among them,
            and one tied to the head is the head's.
        on_device: every other frozen parameter: final norm, towers, what is shared between layers.
        device: the compute device.
        codec: the codec of the quantised weights, or of the plain ones if none is quantised.
        shared: the family's ``shared``.
        breaks: numbers of the layers that must begin a block.
        codecs: every codec that lays a weight of this model out.
    """

    model: nn.Module
    decoder: nn.Module
    layers: tuple[Unit, ...]
    head: Unit | None
    embeddings: tuple[Unit, ...]
    on_device: tuple[nn.Parameter, ...]
    device: torch.device
    codec: WeightCodec
    codecs: tuple[WeightCodec, ...]
    shared: tuple[str, ...]
    breaks: frozenset[int]

    def blocks(self, block_size: int | Literal["all"]) -> list[range]:
        """Return the blocks as ranges of layer numbers."""
        return group_layers(len(self.layers), block_size, breaks=self.breaks)

    def units(self) -> list[Unit]:
        """Return every unit that stands in host memory."""
        return [*self.layers, *([] if self.head is None else [self.head]), *self.embeddings]

    @property
    def decoder_name(self) -> str:
        """The decoder's name in the model."""
        names: dict[int, str] = {id(m): name for name, m in self.model.named_modules()}
        return names[id(self.decoder)]

    def on_device_bytes(self) -> dict[str, int]:
        """Return the bytes of what stays on the device, by the module that it belongs to.

        A tower or projector is one entry; what belongs to the decoder, such as the final norm, is
        listed by the decoder's own parts.
        """
        names = {id(param): name for name, param in self.model.named_parameters()}
        decoder = self.decoder_name
        found: dict[str, int] = {}
        for param in self.on_device:
            if id(param) not in names:
                continue
            part = _part(names[id(param)], decoder=decoder)
            owner, _, name = names[id(param)].rpartition(".")
            nbytes = self._nbytes(self.model.get_submodule(owner), name, param)
            found[part] = found.get(part, 0) + nbytes
        return found

    def _nbytes(self, owner: nn.Module, name: str, param: nn.Parameter) -> int:
        for codec in self.codecs:
            if codec.claims(param):
                return sum(ref.get().nbytes for ref in codec.refs(owner, name, param))
        return param.nbytes


def group_layers(
    count: int, block_size: int | Literal["all"], *, breaks: Collection[int] = ()
) -> list[range]:
    """Split ``count`` layers into consecutive blocks.

    Args:
        count: how many layers there are.
        block_size: layers in a block, or ``"all"``; the last of a run may be shorter.
        breaks: layers that must begin a block, whatever its size.
    """
    size = count if block_size == "all" else block_size
    blocks: list[range] = []
    start = 0
    for end in [*sorted(b for b in breaks if 0 < b < count), count]:
        blocks += [range(first, min(first + size, end)) for first in range(start, end, size)]
        start = end
    return blocks


def base_model_of(model: nn.Module) -> nn.Module:
    """Return the Transformers model inside PEFT's wrapping, or the model itself."""
    get = getattr(model, "get_base_model", None)
    base: nn.Module = get() if callable(get) else model
    return base


def adapter_parameters(model: nn.Module) -> set[int]:
    """Return the ids of all parameters that belong to adapters, trainable at the moment or not.

    PEFT keeps the frozen original under ``base_layer`` or ``original_module`` inside a wrapper;
    everything else that a wrapper owns is the adapter's.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
            base = {id(p) for p in inner.parameters()} if isinstance(inner, nn.Module) else set()
            found |= {id(p) for p in module.parameters()} - base
    return found


class _Claims:
    """Asks the codecs which of them lays a parameter out."""

    def __init__(self, codecs: Sequence[tuple[WeightCodec, str]]) -> None:
        self._codecs = codecs
        self.used: dict[str, WeightCodec] = {}

    def codec(self, name: str, param: nn.Parameter) -> WeightCodec | None:
        claiming = [(codec, plugin) for codec, plugin in self._codecs if codec.claims(param)]
        if len(claiming) > 1:
            (first, plugin), (second, other) = claiming[:2]
            raise PluginError(
                f"Two plugins claim the weight '{name}' ({type(param).__name__}, {param.dtype}): "
                f"'{plugin}' as {first.name} and '{other}' as {second.name}. Uninstall one of "
                "them, or leave one out with POROS_DISABLE_PLUGINS."
            )
        if not claiming:
            return None
        codec = claiming[0][0]
        self.used.setdefault(codec.name, codec)
        return codec


def build_plan(
    model: nn.Module,
    *,
    family: Family,
    codecs: Sequence[tuple[WeightCodec, str]],
    device: torch.device,
) -> BlockPlan:
    """Find the units of a model.

    Args:
        model: the model as the user holds it, wrapped by PEFT or not.
        family: the family that covers it.
        codecs: the weight codecs and the plugins that they came from.
        device: the compute device.

    Raises:
        PrepareError: the model has no decoder layers, or a frozen weight that no codec knows.
        PluginError: two plugins claim the same weight.
    """
    base = base_model_of(model)
    decoder = family.decoder(base)
    layers = list(family.layers(decoder))
    if not layers:
        raise PrepareError(
            f"Family '{family.name}' found no decoder layers in {type(base).__name__}. Load the "
            "model with AutoModelForCausalLM."
        )
    claims = _Claims(codecs)
    adapters = adapter_parameters(model)
    uses = _uses_by_layer(layers)
    placed: set[int] = set()

    def unit(name: str, module: nn.Module) -> Unit:
        refs: list[TensorRef] = []
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for path, owner, attribute, param in _parameters(module):
            shared = uses.get(id(param), 1) > 1
            if param.requires_grad or id(param) in adapters or id(param) in placed or shared:
                continue
            codec = claims.codec(f"{name}.{path}", param)
            if codec is None:
                raise PrepareError(
                    f"No loader strategy knows the frozen weight '{path}' of {name}: "
                    f"{type(param).__name__}, {param.dtype}. Load the model as NF4 or BF16, or "
                    "install the plugin of its precision."
                )
            if not param.is_contiguous():
                continue
            placed.add(id(param))
            refs.extend(codec.refs(owner, attribute, param))
            places.append((owner, attribute, param))
        return Unit(
            name=name,
            module=module,
            refs=tuple(refs),
            places=tuple(places),
        )

    layer_units = tuple(unit(f"layer {index}", layer) for index, layer in enumerate(layers))
    head_module: object = base.get_output_embeddings()  # type: ignore[operator]
    head = unit("head", head_module) if isinstance(head_module, nn.Module) else None
    embeddings = [unit(name, table) for name, table in _tables(base, decoder, layers)]
    on_device = tuple(
        param for param in model.parameters() if id(param) not in placed and not param.requires_grad
    )
    main_codec = _main_codec(claims.used)
    for param in on_device:
        claims.codec("a weight that does not stream", param)
    return BlockPlan(
        model=base,
        decoder=decoder,
        layers=layer_units,
        head=head if head is not None and head.refs else None,
        embeddings=tuple(table for table in embeddings if table.refs),
        on_device=on_device,
        device=device,
        codec=main_codec,
        codecs=tuple(claims.used.values()),
        shared=family.shared,
        breaks=frozenset(family.breaks(decoder)),
    )


def _main_codec(used: Mapping[str, WeightCodec]) -> WeightCodec:
    if not used:
        raise PrepareError(
            "Every parameter of the model trains, so there is no frozen base to stream. Poros "
            "is for LoRA-like adapters: wrap the model with peft.get_peft_model first."
        )
    quantised = [codec for name, codec in used.items() if name != "bf16"]
    return quantised[0] if quantised else used["bf16"]


def _tables(
    base: nn.Module, decoder: nn.Module, layers: Sequence[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the input embedding, then the decoder's other tables.

    A table that an adapter wraps, or that trains, is read in ways that need the device.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    main: nn.Module = base.get_input_embeddings()  # type: ignore[operator]
    for name, module in [("embedding", main), *decoder.named_modules()]:
        plain = isinstance(module, nn.Embedding) and not module.weight.requires_grad
        again = name != "embedding" and module is main
        if plain and not again and id(module) not in inside:
            yield name, module


def _part(name: str, *, decoder: str) -> str:
    """Return which module a parameter is counted with; see ``BlockPlan.on_device_bytes``."""
    prefix = f"{decoder}." if decoder else ""
    inside = bool(prefix) and name.startswith(prefix)
    steps = name[len(prefix) :].split(".") if inside else name.split(".")
    if inside:
        return prefix + steps[0]
    depth = 2 if steps[0] == "model" else 1
    return ".".join(steps[:depth])


def _uses_by_layer(layers: Sequence[nn.Module]) -> dict[int, int]:
    uses: dict[int, int] = {}
    for layer in layers:
        for param in layer.parameters():
            uses[id(param)] = uses.get(id(param), 0) + 1
    return uses


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for attribute, param in owner._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                yield (f"{path}.{attribute}" if path else attribute, owner, attribute, param)


def config_mapping(model: nn.Module) -> dict[str, Any]:
    """Return a model's Transformers config as a plain mapping.

    Raises:
        PrepareError: it has none.
    """
    config = getattr(base_model_of(model), "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise PrepareError(
            f"{type(model).__name__} has no Transformers config, so its family cannot be told. "
            "Pass a Transformers model, wrapped by PEFT or not."
        )
    mapping: dict[str, Any] = config.to_dict()
    return mapping
