"""The plugin manager and its registries: what a plugin may do, and every way it may go wrong."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, get_type_hints

import pluggy
import pytest
from conftest import PluginSite

from poros_core import hookspecs
from poros_core.errors import PluginError, SettingsError, UnsupportedModelError
from poros_core.family import Family
from poros_core.hookspecs import hookimpl
from poros_core.plugins import (
    DISABLE_VARIABLE,
    Plugins,
    load_entry_points,
    make_manager,
    plugins,
)

TOY = """
from poros_core.family import Family
from poros_core.hookspecs import hookimpl

@hookimpl
def poros_families():
    return [Family(name={name!r}, title="Toy", model_types=({model_type!r},), shapes={{}})]
"""

MISSPELT = TOY.format(name="toy", model_type="toy").replace(
    "def poros_families", "def poros_familys"
)

SPECS = [
    (name, spec)
    for name, spec in vars(hookspecs).items()
    if inspect.isfunction(spec) and name.startswith("poros_")
]


def toy(name: str = "toy", model_type: str = "toy_lm", **more: Any) -> Family:
    return Family(name=name, title=name.title(), model_types=(model_type,), shapes={}, **more)


def family_plugin(*families: Family) -> object:
    class Plugin:
        @hookimpl
        def poros_families(self) -> list[Family]:
            return list(families)

    return Plugin()


def hook_plugin(hook: str, offered: object) -> object:
    def implementation(self: object) -> object:
        return offered

    implementation.__name__ = hook
    return type("Plugin", (), {hook: hookimpl(implementation)})()


def resolve(**named: object) -> Plugins:
    manager = make_manager()
    for name, plugin in named.items():
        manager.register(plugin, name=name)
    manager.check_pending()
    return Plugins(manager)


def load_installed() -> Plugins:
    manager = make_manager()
    load_entry_points(manager)
    return Plugins(manager)


# Specs


@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_every_hook_is_documented_typed_and_tested(name: str, spec: Any) -> None:
    text = inspect.getdoc(spec) or ""
    assert "\nWhen: " in text
    assert "\nReturns: " in text
    hints = get_type_hints(spec)
    assert set(hints) == {*inspect.signature(spec).parameters, "return"}
    assert all(f"{parameter}:" in text for parameter in inspect.signature(spec).parameters)
    assert f"test_hook_{name}" in globals(), f"{name} has no test named test_hook_{name}"


def test_hook_poros_families() -> None:
    family = toy()
    found = resolve(mine=family_plugin(family)).family_for({"model_type": "toy_lm"})
    assert found.value is family
    assert (found.plugin, found.distribution, found.version) == ("mine", None, None)


def test_hook_poros_loaders() -> None:
    codec = object()
    loader = SimpleNamespace(precision="int3", strategy="streamed", codec=codec)
    other = SimpleNamespace(precision="int3", strategy="standard", codec=codec)
    found = resolve(mine=hook_plugin("poros_loaders", [loader, other]))
    assert found.loader("int3", "streamed") is loader
    assert found.codecs() == [(codec, "mine")]
    with pytest.raises(SettingsError, match="int3/standard, int3/streamed"):
        found.loader("nf4", "streamed")


def test_hook_poros_runtimes() -> None:
    runtime = SimpleNamespace(name="still")
    found = resolve(mine=hook_plugin("poros_runtimes", [runtime]))
    assert found.runtime("still") is runtime
    with pytest.raises(SettingsError, match="'fast'.*still"):
        found.runtime("fast")


def test_every_spec_is_a_hook_of_the_manager() -> None:
    assert {name for name, _ in SPECS} == {
        name for name in vars(make_manager().hook) if not name.startswith("_")
    }


# Choosing


def test_a_misspelt_hook_fails() -> None:
    with pytest.raises(pluggy.PluginValidationError, match="poros_familys"):
        resolve(mine=hook_plugin("poros_familys", []))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (toy("toy", "a"), toy("toy", "b")),
        (toy("one", "same"), toy("two", "same")),
    ],
)
def test_a_duplicate_names_both_plugins(one: Family, other: Family) -> None:
    with pytest.raises(PluginError, match=r"'first'.*'second'.*POROS_DISABLE_PLUGINS"):
        resolve(first=family_plugin(one), second=family_plugin(other))


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("poros_loaders", SimpleNamespace(precision="nf4", strategy="x", codec=None)),
        ("poros_runtimes", SimpleNamespace(name="streamed")),
    ],
)
def test_duplicate_loaders_and_runtimes_name_both_plugins(hook: str, value: object) -> None:
    with pytest.raises(PluginError, match=r"'first'.*'second'"):
        resolve(first=hook_plugin(hook, [value]), second=hook_plugin(hook, [value]))


@pytest.mark.parametrize("offered", [None, 7, {"a set"}])
def test_a_hook_that_returns_no_sequence_fails(offered: object) -> None:
    with pytest.raises(PluginError, match="'mine'.*must return a sequence"):
        resolve(mine=hook_plugin("poros_families", offered))


def test_a_hook_that_returns_the_wrong_values_fails() -> None:
    with pytest.raises(PluginError, match="'mine'.*Family values, not str"):
        resolve(mine=hook_plugin("poros_families", ["qwen2"]))


def test_an_unknown_model_type_lists_what_is_covered() -> None:
    found = resolve(mine=family_plugin(toy()))
    with pytest.raises(UnsupportedModelError, match="'foo'.*toy_lm.*poros list-families"):
        found.family_for({"model_type": "foo"})
    with pytest.raises(UnsupportedModelError, match="'foo'.*toy"):
        found.family_named("foo")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2_moe"},
        {"model_type": "qwen3_5_moe_text"},
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "olmoe", "num_experts": 64},
        {"model_type": "wrapper", "text_config": {"model_type": "x", "n_routed_experts": 4}},
    ],
)
def test_a_mixture_of_experts_is_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        resolve(mine=family_plugin(toy())).family_for(config)


def test_a_dense_model_with_empty_expert_fields_is_merely_unknown() -> None:
    with pytest.raises(UnsupportedModelError, match="No family for"):
        resolve().family_for({"model_type": "foo", "num_experts": None})


def test_a_refused_variant_says_why() -> None:
    family = toy(refuse=lambda config: "odd heads. Use even ones." if config["odd"] else None)
    found = resolve(mine=family_plugin(family))
    with pytest.raises(UnsupportedModelError, match=r"'toy' does not cover .*odd heads\. Use"):
        found.family_for({"model_type": "toy_lm", "odd": True})
    assert found.family_for({"model_type": "toy_lm", "odd": False}).value is family


# Entry points


def test_built_ins_come_through_the_entry_points() -> None:
    found = plugins().family_for({"model_type": "qwen2"})
    assert found.value.name == "qwen2"
    assert (found.plugin, found.distribution) == ("poros-families", "poros-train")


def test_an_installed_plugin_is_found_with_its_origin(plugin_site: PluginSite) -> None:
    plugin_site.install(
        "toy-poros",
        plugin="toy",
        module="toy_poros",
        source=TOY.format(name="toy", model_type="toy_lm"),
        version="3.1",
    )
    found = plugins().family_named("toy")
    assert (found.plugin, found.distribution, found.version) == ("toy", "toy-poros", "3.1")


def test_an_installed_duplicate_of_a_built_in_names_both(plugin_site: PluginSite) -> None:
    plugin_site.install(
        "toy-poros",
        plugin="toy",
        module="toy_poros",
        source=TOY.format(name="other", model_type="qwen2"),
    )
    with pytest.raises(PluginError, match=r"'poros-families' \(poros-train .*'toy' \(toy-poros 1"):
        load_installed()


def test_two_distributions_with_one_plugin_name_are_named(plugin_site: PluginSite) -> None:
    for number in ("one", "two"):
        plugin_site.install(
            f"toy-{number}",
            plugin="toy",
            module=f"toy_{number}",
            source=TOY.format(name=number, model_type=number),
        )
    with pytest.raises(PluginError, match=r"'toy'.*toy-(one|two).*toy-(one|two)"):
        load_installed()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (MISSPELT, "unknown hook 'poros_familys'"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
    ],
)
def test_a_broken_plugin_is_named_and_can_be_left_out(
    source: str, message: str, plugin_site: PluginSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin_site.install("toy-poros", plugin="toy", module="toy_poros", source=source)
    with pytest.raises(PluginError, match=rf"'toy' \(toy_poros\).*{message}.*{DISABLE_VARIABLE}"):
        load_installed()
    monkeypatch.setenv(DISABLE_VARIABLE, "toy")
    assert load_installed().family_named("qwen2")


def test_plugins_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, " poros-families ,")
    with pytest.raises(UnsupportedModelError, match="Installed: none"):
        load_installed().family_named("qwen2")


def test_leaving_out_what_is_not_installed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "poros-familys")
    with pytest.raises(PluginError, match="poros-familys.*Installed: .*poros-families"):
        load_installed()
