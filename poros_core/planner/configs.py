"""What a plan takes from a config: checked, since anybody may have written it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from poros_core.errors import CheckpointError

__all__ = ["check_layers", "longest_of", "quantised_with", "shapes_of", "text_of"]

Shapes = Mapping[str, tuple[int, ...]]


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config says of the decoder.

    Raises:
        CheckpointError: that is no JSON object.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"The config's text_config is {text!r} and must be a JSON object. Download the config "
            "again."
        )
    return text


def longest_of(text: Mapping[str, Any]) -> int:
    """Return how many positions a decoder has; 0 if its config does not say.

    Raises:
        CheckpointError: it says something that is no number of positions.
    """
    longest = text.get("max_position_embeddings")
    if longest is None:
        return 0
    if type(longest) is not int or longest < 1:
        raise CheckpointError(
            f"The config's max_position_embeddings is {longest!r} and must be a whole number, 1 or "
            "more. Download the config again."
        )
    return longest


def quantised_with(name: str, config: Mapping[str, Any]) -> str | None:
    """Return with what a checkpoint is quantised already; None if it is not.

    Args:
        name: what it was asked for as.
        config: its config.

    Raises:
        CheckpointError: with something that ``poros.load`` refuses; the reason is that of
            ``poros_loaders.bnb_config``, which needs torch. A test holds the two together.
    """
    found = [c.get("quantization_config") for c in (config, text_of(config))]
    saved = next((each for each in found if isinstance(each, Mapping)), None)
    if saved is None:
        return None
    method = saved.get("quant_method", "bitsandbytes")
    if method == "bitsandbytes" and saved.get("load_in_4bit"):
        method = saved.get("bnb_4bit_quant_type", "fp4")
        if method == "nf4":
            return "nf4"
    raise CheckpointError(
        f"Checkpoint '{name}' is quantised already, with '{method}', and NF4 cannot be had from it "
        "without rounding twice. Give the unquantised checkpoint, or one that was saved from a "
        "bitsandbytes NF4 model."
    )


def shapes_of(say: Callable[[Mapping[str, Any]], Shapes], config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a model's weights, as its family says them from its config.

    Raises:
        CheckpointError: the config does not say enough for that, or what cannot be.
    """
    try:
        shapes = say(config)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"The config does not say {error}, which the shapes of its layers depend on. Name a "
            "folder with the checkpoint, whose headers are read."
        ) from error
    except (ArithmeticError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"The config's sizes cannot be a model's ({error}). Download the config again, or name "
            "a folder with the checkpoint, whose headers are read."
        ) from error
    for weight, shape in shapes.items():
        if not all(type(extent) is int and extent > 0 for extent in shape):
            raise CheckpointError(
                f"The config's sizes cannot be a model's: by them {weight} has the shape "
                f"{list(shape)}. Download the config again."
            )
    return shapes


def check_layers(found: int, text: Mapping[str, Any], *, name: str) -> None:
    """Refuse headers of more or fewer layers than the config says.

    Args:
        found: how many layers the headers have.
        text: what the config says of the decoder.
        name: what the model was asked for as.

    Raises:
        CheckpointError: they have.
    """
    said = text.get("num_hidden_layers")
    if said is not None and said != found:
        raise CheckpointError(
            f"The config of '{name}' says {said!r} layers (num_hidden_layers), and the headers of "
            f"its files have {found}. Config and files are of different models, or files are "
            "missing; download them again together."
        )
