"""What is installed and what it covers, as plain values: for ``list-families`` and ``check``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from poros_core.errors import UnsupportedModelError
from poros_core.family import Family
from poros_core.plugins import Plugins, Registered, plugins
from poros_core.status import GateRecord, Stack, Status, family_status, running_stack

__all__ = ["Coverage", "FamilyInfo", "coverage", "installed_families"]


@frozen(kw_only=True)
class FamilyInfo:
    """One installed family.

    Attributes:
        name: the family's name.
        title: what a person calls it.
        model_types: the ``model_type`` values that it covers.
        status: whether a gate record validates it on the stack that runs here; without torch,
            on any.
        detail: on what the status rests, or what differs.
        records: the key figures of every record that validates it on some stack.
        plugin: name of the plugin that offers it.
        distribution: the distribution that installed the plugin; None if registered by hand.
        version: that distribution's version, or None.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    status: Status
    detail: str
    records: tuple[GateRecord, ...]
    plugin: str
    distribution: str | None
    version: str | None


@frozen(kw_only=True)
class Coverage:
    """Whether a model is covered.

    Attributes:
        model_type: what its config says.
        family: the family that covers it, or None.
        reason: why none does, and what to do instead; None if one does.
    """

    model_type: str
    family: FamilyInfo | None
    reason: str | None


def installed_families(*, source: Plugins | None = None) -> list[FamilyInfo]:
    """Return every installed family, sorted by name.

    Args:
        source: whose families; None means those of all installed plugins.

    Raises:
        PluginError: a plugin is malformed, or two claim the same thing.
    """
    families = (source or plugins()).families
    running = running_stack()
    return sorted((_info(entry, running) for entry in families), key=lambda info: info.name)


def coverage(config: Mapping[str, Any], *, source: Plugins | None = None) -> Coverage:
    """Say whether a family covers the model with this config.

    Args:
        config: a Transformers config as a mapping.
        source: whose families; None means those of all installed plugins.

    Raises:
        PluginError: a plugin is malformed, or two claim the same thing.
    """
    model_type = str(config.get("model_type"))
    try:
        entry = (source or plugins()).family_for(config)
    except UnsupportedModelError as error:
        return Coverage(model_type=model_type, family=None, reason=str(error))
    return Coverage(model_type=model_type, family=_info(entry, running_stack()), reason=None)


def _info(entry: Registered[Family], running: Stack | None) -> FamilyInfo:
    status = family_status(entry.value.name, running=running)
    return FamilyInfo(
        name=entry.value.name,
        title=entry.value.title,
        model_types=entry.value.model_types,
        status=status.word,
        detail=status.detail,
        records=status.records,
        plugin=entry.plugin,
        distribution=entry.distribution,
        version=entry.version,
    )
