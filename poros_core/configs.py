"""Reading a model's ``config.json``, from a folder or the Hub, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from poros_core.errors import CheckpointError

__all__ = ["auto_class", "read_config"]

_CONFIG = "config.json"
_TIMEOUT_S = 5.0
_TOWERS = ("vision_config", "audio_config")


def auto_class(config: Mapping[str, Any]) -> str:
    """Return the name of the Transformers auto class that builds a config's model.

    A config that describes a tower besides the text decoder is a multimodal model, and is built
    with its towers; any other is a causal language model.

    Args:
        config: the config as a mapping.
    """
    multimodal = any(config.get(tower) is not None for tower in _TOWERS)
    return "AutoModelForImageTextToText" if multimodal else "AutoModelForCausalLM"


def read_config(model: str, *, revision: str | None = None) -> Mapping[str, Any]:
    """Return a model's Transformers config as a mapping. Downloads nothing but that one file.

    Args:
        model: a folder, a ``config.json`` file, or a Hub id. ``HF_HUB_OFFLINE`` is honoured: only
            the local cache is looked at then.
        revision: the Hub revision; None means the default branch.

    Raises:
        CheckpointError: there is none, it cannot be reached, or it is not a Transformers config.
    """
    local = Path(model).expanduser()
    path = _local_config(local) if _is_local(model, local) else _hub_config(model, revision)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON: {error}. Download or save the model again."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{path} is not a Transformers config: it has no 'model_type'. Name the folder or Hub "
            "id of a model in Transformers format."
        )
    return config


def _is_local(model: str, local: Path) -> bool:
    return local.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1


def _local_config(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name a folder that holds {_CONFIG}.")
    config = path / _CONFIG
    if config.is_file():
        return config
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} holds a PEFT adapter, not a model. Name its base model instead "
            "('base_model_name_or_path' in its adapter_config.json)."
        )
    raise CheckpointError(f"{path} holds no {_CONFIG}. Name the folder of a Transformers model.")


def _hub_config(model: str, revision: str | None) -> Path:
    try:
        found = hf_hub_download(
            model, _CONFIG, revision=revision, local_files_only=not _reachable(model, revision)
        )
        return Path(found)
    except HFValidationError as error:
        raise CheckpointError(
            f"'{model}' is neither a folder here nor a valid Hub id ('owner/name')."
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"Access to '{model}' is gated. Accept its terms on its Hub page, then log in with "
            "`hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"The Hub has no model '{model}' (or it is private), and there is no folder of that "
            "name here. Check the spelling, or log in with `hf auth login`."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(_unreachable(model)) from error
    except EntryNotFoundError as error:
        raise CheckpointError(
            f"'{model}' on the Hub has no {_CONFIG}. Name a model in Transformers format."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{_CONFIG} of '{model}' cannot be fetched: {error}") from error


def _reachable(model: str, revision: str | None) -> bool:
    """Ask the Hub once, without the retries that would hold up a machine that is offline."""
    if is_offline_mode():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(model, _CONFIG, revision=revision), timeout=_TIMEOUT_S)
    except HfHubHTTPError:
        raise
    except (HTTPError, OSError):
        return False
    return True


def _unreachable(model: str) -> str:
    if is_offline_mode():
        return (
            f"HF_HUB_OFFLINE is set, and {_CONFIG} of '{model}' is not in the local cache. Unset "
            "it, download the model first, or name a local folder."
        )
    return (
        f"The Hub cannot be reached (offline?), and {_CONFIG} of '{model}' is not in the "
        "local cache. Check the connection, or name a local folder."
    )
