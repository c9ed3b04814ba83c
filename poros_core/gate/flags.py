"""A gate's options as flat settings: what a matrix row says, and what a record was asked.

One table serves rows, records and command lines, so that a record can be run again by its flags
and a row can tell whether a record is its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs

from poros_core.errors import GateError
from poros_core.gate.modes import Modes
from poros_core.gate.options import GateOptions
from poros_core.settings import Settings

__all__ = ["SETTINGS", "command_of", "flags_of", "options_of", "same_settings", "settings_of"]

_PREPARED = tuple(
    field.name for field in attrs.fields(Settings) if field.name not in ("runtime", "poison")
)
_MODES = tuple(field.name for field in attrs.fields(Modes))
_OWN = tuple(
    field.name for field in attrs.fields(GateOptions) if field.name not in ("settings", "modes")
)
SETTINGS = (*_OWN, *_MODES, *_PREPARED)
"""Names of all settings."""

_TYPES: Mapping[str, Any] = {
    name: hint
    for owner in (Settings, Modes, GateOptions)
    for name, hint in get_type_hints(owner).items()
    if name in SETTINGS
}


def options_of(settings: Mapping[str, Any]) -> GateOptions:
    """Return options from flat settings; what is not named keeps its default.

    Raises:
        GateError: there is no such setting, or its value is not allowed.
        SettingsError: the same, of those that ``prepare`` takes.
    """
    unknown = sorted(settings.keys() - set(SETTINGS))
    if unknown:
        raise GateError(
            f"A gate has no setting '{unknown[0]}'. It has: {', '.join(sorted(SETTINGS))}."
        )
    given = dict(settings)
    if isinstance(given.get("data"), str):
        given["data"] = Path(given["data"])
    for name, value in given.items():
        if not _fits(value, _TYPES[name]):
            raise GateError(
                f"The setting '{name}' is {value!r}, of the type {type(value).__name__}; it takes "
                f"{_told(_TYPES[name])}."
            )
    return GateOptions(
        **{name: given[name] for name in _OWN if name in given},
        modes=Modes(**{name: given[name] for name in _MODES if name in given}),
        settings=Settings(**{name: given[name] for name in _PREPARED if name in given}),
    )


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a value is of a type; which values of it are allowed is asked elsewhere."""
    return any(
        isinstance(value, int | float if kind is float else kind)
        and (kind is bool or not isinstance(value, bool))
        for kind in _kinds(hint)
    )


def _kinds(hint: Any) -> set[type]:
    """Return the types that a hint is made of."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    parts = get_args(hint)
    return {kind for part in parts for kind in _kinds(part)} if parts else {hint}


def _told(hint: Any) -> str:
    kinds = _kinds(hint) - {type(None)}
    return " or ".join(sorted("text" if kind is str else kind.__name__ for kind in kinds))


def settings_of(options: GateOptions) -> dict[str, Any]:
    """Return all settings, flat and fit for JSON. Data is named by its file, without a folder."""
    own = {name: getattr(options, name) for name in _OWN}
    own["data"] = None if options.data is None else options.data.name
    modes = {name: getattr(options.modes, name) for name in _MODES}
    prepared = {name: getattr(options.settings, name) for name in _PREPARED}
    return {**own, **modes, **prepared}


def same_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two gates were asked for alike. A setting that a record is too old to have had
    its default then."""
    default = settings_of(GateOptions())
    return {**default, **one} == {**default, **other}


def flags_of(options: GateOptions) -> list[str]:
    """Return the command line's flags for these options, those with their default left out."""
    asked, default = settings_of(options), settings_of(GateOptions())
    if options.data is not None:
        asked["data"] = str(options.data)
    flags: list[str] = []
    for name, value in asked.items():
        if value == default[name]:
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            flags += [flag, str(value)]
    return flags


def command_of(options: GateOptions) -> str:
    """Return the command that asks for this gate, without the files that it leaves."""
    return shlex.join(["poros", "gate", *flags_of(options)])
