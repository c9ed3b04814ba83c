"""The plugin manager, and the registries that it fills."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pluggy
from attrs import frozen

from poros_core import hookspecs
from poros_core.errors import PluginError, SettingsError, UnsupportedModelError
from poros_core.family import Family
from poros_core.protocols import LoaderStrategy, Runtime, WeightCodec

__all__ = ["DISABLE_VARIABLE", "Plugins", "Registered", "Registry", "plugins"]

DISABLE_VARIABLE = "POROS_DISABLE_PLUGINS"
"""Environment variable with plugin names, separated by commas, that are left out."""

T = TypeVar("T")


@frozen
class Registered(Generic[T]):
    """A value and where it came from.

    Attributes:
        value: what the plugin offered.
        plugin: the plugin's name, which is its entry point's.
        distribution: name of the distribution that installed it, or None if it was registered by
            hand.
        version: that distribution's version, or None.
    """

    value: T
    plugin: str
    distribution: str | None
    version: str | None


class Registry(Generic[T]):
    """Values by name; a second plugin with the same name is an error, never a silent winner."""

    def __init__(self, kind: str, *, keys: Callable[[T], Iterable[str]]) -> None:
        self._kind = kind
        self._keys = keys
        self._by_key: dict[str, Registered[T]] = {}
        self._entries: list[Registered[T]] = []

    def add(self, entry: Registered[T]) -> None:
        """Add one entry under all its keys.

        Raises:
            PluginError: a key is taken; the message names both plugins.
        """
        keys = list(self._keys(entry.value))
        for key in keys:
            other = self._by_key.get(key)
            if other is not None:
                raise PluginError(
                    f"Two plugins offer the {self._kind} '{key}': '{other.plugin}' "
                    f"({_origin(other)}) and '{entry.plugin}' ({_origin(entry)}). Uninstall one, "
                    f"or leave one out with {DISABLE_VARIABLE}={entry.plugin}."
                )
        self._by_key.update(dict.fromkeys(keys, entry))
        self._entries.append(entry)

    def get(self, key: str) -> Registered[T] | None:
        """Return the entry with this key, or None."""
        return self._by_key.get(key)

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted(self._by_key)

    def __iter__(self) -> Iterator[Registered[T]]:
        return iter(self._entries)


def _origin(entry: Registered[Any]) -> str:
    if entry.distribution is None:
        return "registered by hand"
    return f"{entry.distribution} {entry.version}"


class Plugins:
    """Everything that plugins offer, resolved once."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self.families: Registry[Family] = Registry(
            "family", keys=lambda family: (family.name, *_types(family))
        )
        self.loaders: Registry[LoaderStrategy] = Registry(
            "loader strategy", keys=lambda loader: (f"{loader.precision}/{loader.strategy}",)
        )
        self.runtimes: Registry[Runtime] = Registry("runtime", keys=lambda runtime: (runtime.name,))
        self._fill(manager, "poros_families", self.families, Family)
        self._fill(manager, "poros_loaders", self.loaders, None)
        self._fill(manager, "poros_runtimes", self.runtimes, None)

    @staticmethod
    def _fill(
        manager: pluggy.PluginManager, hook: str, registry: Registry[T], kind: type[T] | None
    ) -> None:
        origin = {id(plugin): dist for plugin, dist in manager.list_plugin_distinfo()}
        caller: pluggy.HookCaller = getattr(manager.hook, hook)
        for impl in sorted(caller.get_hookimpls(), key=lambda impl: impl.plugin_name):
            offered = impl.function()
            if not isinstance(offered, Sequence):
                raise PluginError(
                    f"Plugin '{impl.plugin_name}': {hook}() must return a sequence, "
                    f"not {type(offered).__name__}."
                )
            dist = origin.get(id(impl.plugin))
            for value in offered:
                if kind is not None and not isinstance(value, kind):
                    raise PluginError(
                        f"Plugin '{impl.plugin_name}': {hook}() must return {kind.__name__} "
                        f"values, not {type(value).__name__}."
                    )
                registry.add(
                    Registered(
                        value,
                        impl.plugin_name,
                        dist.project_name if dist is not None else None,
                        dist.version if dist is not None else None,
                    )
                )

    def family_for(self, config: Mapping[str, Any]) -> Registered[Family]:
        """Return the family that covers a Transformers config given as a mapping.

        Raises:
            UnsupportedModelError: none does, or the family refuses this variant.
        """
        model_type = config.get("model_type")
        if _is_encoder_decoder(config):
            raise UnsupportedModelError(
                f"model_type '{model_type}' is an encoder-decoder model, which Poros does not "
                "support: its decoder reads the encoder's output in every layer. Choose a "
                "decoder-only model; `poros list-families` shows the covered ones."
            )
        covered = sorted({t for entry in self.families for t in entry.value.model_types})
        for entry in self.families:
            if model_type in entry.value.model_types:
                reason = entry.value.refuse(config)
                if reason is not None:
                    raise UnsupportedModelError(
                        f"Family '{entry.value.name}' does not cover this model: {reason}"
                    )
                return entry
        if _is_mixture(config):
            raise UnsupportedModelError(
                f"model_type '{model_type}' is a mixture-of-experts model, which Poros does not "
                "support: only dense models are. Choose a dense model; `poros list-families` "
                "shows the covered ones."
            )
        raise UnsupportedModelError(
            f"No family for model_type '{model_type}'. Installed families cover: "
            f"{', '.join(covered) or 'nothing'}. See `poros list-families`, or install or write a "
            "family plugin for it."
        )

    def family_named(self, name: str) -> Registered[Family]:
        """Return the family with this name.

        Raises:
            UnsupportedModelError: there is none.
        """
        for entry in self.families:
            if entry.value.name == name:
                return entry
        names = sorted(entry.value.name for entry in self.families)
        raise UnsupportedModelError(
            f"No family is named '{name}'. Installed: {', '.join(names) or 'none'}. "
            "See `poros list-families`."
        )

    def loader(self, precision: str, strategy: str) -> LoaderStrategy:
        """Return the loader strategy for a precision.

        Raises:
            SettingsError: there is none.
        """
        entry = self.loaders.get(f"{precision}/{strategy}")
        if entry is None:
            raise SettingsError(
                f"No loader strategy '{strategy}' for precision '{precision}'. Installed "
                f"(precision/strategy): {', '.join(self.loaders.keys()) or 'none'}."
            )
        return entry.value

    def runtime(self, name: str) -> Runtime:
        """Return the runtime with this name.

        Raises:
            SettingsError: there is none.
        """
        entry = self.runtimes.get(name)
        if entry is None:
            raise SettingsError(
                f"No runtime is named '{name}'. Installed: "
                f"{', '.join(self.runtimes.keys()) or 'none'}."
            )
        return entry.value

    def codecs(self) -> list[tuple[WeightCodec, str]]:
        """Return each distinct weight codec with the plugin that it came from."""
        found: dict[int, tuple[WeightCodec, str]] = {}
        for entry in self.loaders:
            found.setdefault(id(entry.value.codec), (entry.value.codec, entry.plugin))
        return list(found.values())


def _types(family: Family) -> list[str]:
    return [f"model_type {model_type}" for model_type in family.model_types]


def _is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    nested = isinstance(text, Mapping) and _is_encoder_decoder(text)
    return nested or bool(config.get("is_encoder_decoder"))


def _is_mixture(config: Mapping[str, Any]) -> bool:
    if str(config.get("model_type")).removesuffix("_text").endswith("_moe"):
        return True
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return True
    text = config.get("text_config")
    return isinstance(text, Mapping) and _is_mixture(text)


def make_manager() -> pluggy.PluginManager:
    """Return a manager that knows the hook specs and nothing else."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load_entry_points(manager: pluggy.PluginManager) -> None:
    """Register every installed entry point of the group ``poros``, less those left out.

    Raises:
        PluginError: a plugin cannot be imported, has a hook that does not exist, or a name in
            ``POROS_DISABLE_PLUGINS`` is not installed.
    """
    left_out = {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",")} - {""}
    entry_points = importlib.metadata.entry_points(group=hookspecs.PROJECT)
    unknown = left_out - {entry_point.name for entry_point in entry_points}
    if unknown:
        raise PluginError(
            f"{DISABLE_VARIABLE} names plugins that are not installed: "
            f"{', '.join(sorted(unknown))}. Installed: "
            f"{', '.join(sorted({e.name for e in entry_points})) or 'none'}."
        )
    seen: dict[str, importlib.metadata.EntryPoint] = {}
    for entry_point in entry_points:
        if entry_point.name in left_out:
            continue
        other = seen.setdefault(entry_point.name, entry_point)
        if other.value != entry_point.value:
            raise PluginError(
                f"Two distributions register the plugin name '{entry_point.name}': "
                f"'{other.value}' ({other.dist.name if other.dist else '?'}) and "
                f"'{entry_point.value}' ({entry_point.dist.name if entry_point.dist else '?'}). "
                f"Uninstall one, or leave both out with {DISABLE_VARIABLE}={entry_point.name}."
            )
    for name in sorted(seen):
        try:
            manager.load_setuptools_entrypoints(hookspecs.PROJECT, name=name)
            manager.check_pending()
        except Exception as error:
            raise PluginError(
                f"Plugin '{name}' ({seen[name].value}) cannot be loaded: {error}. Fix or uninstall "
                f"it, or leave it out with {DISABLE_VARIABLE}={name}."
            ) from error


@functools.cache
def plugins() -> Plugins:
    """Return what all installed plugins offer. Resolved once per process."""
    manager = make_manager()
    load_entry_points(manager)
    if not manager.get_plugins():
        raise PluginError(
            "No plugin is registered under the entry-point group 'poros', not even the built-in "
            "ones. Install the project (pip install -e .) instead of running it from a path."
        )
    return Plugins(manager)
