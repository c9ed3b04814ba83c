"""What to say when a part of Poros needs packages that the base install leaves out."""

from __future__ import annotations

__all__ = ["missing_extra"]

_EXTRAS = {
    "accelerate": "ml",
    "bitsandbytes": "ml",
    "numpy": "ml",
    "peft": "ml",
    "safetensors": "ml",
    "tokenizers": "ml",
    "torch": "ml",
    "transformers": "ml",
    "datasets": "train",
    "trl": "train",
    "matplotlib": "report",
}


def missing_extra(error: ModuleNotFoundError, *, what: str) -> str | None:
    """Return a sentence that names the extra to install.

    Args:
        error: the import that failed.
        what: what the user asked for, for example ``"poros.load"``.

    Returns:
        None if the missing module is in no extra, so that the failure is something else.
    """
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    if extra is None:
        return None
    return (
        f"{what} needs {package}, which the base install leaves out. Run "
        f"`pip install 'poros-train[{extra}]'` (from a source checkout: "
        f"`pip install -e '.[{extra}]'`)."
    )
