"""Errors that users see. Each message names what was wrong and what to do about it."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "GateError",
    "PluginError",
    "PorosError",
    "PrepareError",
    "SettingsError",
    "StateError",
    "UnsupportedModelError",
]


class PorosError(Exception):
    """Base of every error that Poros raises on purpose."""


class PluginError(PorosError):
    """A plugin is malformed, duplicated, or two plugins claim the same thing."""


class UnsupportedModelError(PorosError):
    """No family covers the model, or a family refuses this variant of it."""


class SettingsError(PorosError, ValueError):
    """A setting has a value that cannot be honoured."""


class CheckpointError(PorosError):
    """A checkpoint cannot be read as it stands: missing, truncated, or not what was asked for."""


class PrepareError(PorosError):
    """A model cannot be prepared or unprepared in its present state."""


class StateError(PorosError):
    """A prepared model is used in a way that would break the contract."""


class GateError(PorosError):
    """A gate cannot be run with this input."""
