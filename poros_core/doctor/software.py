"""Versions: what is installed, and what is known not to work together."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from poros_core.catalog import FamilyInfo, installed_families
from poros_core.doctor.findings import Finding, good, problem, warning
from poros_core.errors import PluginError, SettingsError
from poros_core.status import Stack, running_stack

__all__ = [
    "DISTRIBUTION",
    "bitsandbytes_finding",
    "bitsandbytes_libraries",
    "conflicts",
    "package_findings",
    "plugin_findings",
    "record_finding",
]

DISTRIBUTION = "poros-train"
_EXTRAS = ("ml", "train")
_NEEDED = "ml"
_REINSTALL = (
    "Install the versions that Poros is tested with, from its checkout: "
    "`pip install -e '.[ml]' -c constraints.txt`."
)

Version = Callable[[str], str | None]
Requires = Callable[[str], Sequence[str]]


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_requires(name: str) -> Sequence[str]:
    """Return what an installed distribution says that it requires."""
    return importlib.metadata.requires(name) or []


def package_findings(
    *, version: Version = installed_version, requires: Requires = installed_requires
) -> list[Finding]:
    """Say which packages are installed, and where their versions do not fit.

    Args:
        version: returns the version of a distribution, or None.
        requires: returns the requirements of an installed distribution.
    """
    needed = _names(requires(DISTRIBUTION), _NEEDED)
    optional = [name for name in _names(requires(DISTRIBUTION), "train") if version(name)]
    present = [name for name in needed if version(name)]
    missing = [name for name in needed if not version(name)]
    listed = ", ".join(f"{name} {version(name)}" for name in [*present, *optional])
    if missing:
        text = "; ".join(filter(None, (listed, f"not installed: {', '.join(missing)}")))
        found = [
            warning(
                "packages",
                f"{text}. list-families, check and plan work; loading and training do not",
                fix="Run `pip install 'poros-train[ml]'` (from a checkout: "
                "`pip install -e '.[ml]' -c constraints.txt`).",
            )
        ]
    else:
        found = [good("packages", listed)]
    names = [DISTRIBUTION, *present, *optional]
    return found + [
        problem("packages", text, fix=_REINSTALL)
        for text in conflicts(names, version=version, requires=requires)
    ]


def conflicts(
    names: Sequence[str],
    *,
    version: Version = installed_version,
    requires: Requires = installed_requires,
) -> list[str]:
    """Return where an installed distribution is not what another one requires.

    Args:
        names: whose requirements are looked at. Those of Poros include its extras, as far as
            they are installed.
        version: returns the version of a distribution, or None.
        requires: returns the requirements of an installed distribution.
    """
    found = []
    for name in names:
        extras = _EXTRAS if name == DISTRIBUTION else ("",)
        for text in requires(name):
            wanted = Requirement(text)
            if not any(_applies(wanted, extra) for extra in extras):
                continue
            have = version(wanted.name)
            if have is None and _applies(wanted, ""):
                found.append(f"{name} needs {wanted.name}, which is not installed")
            elif have is not None and not wanted.specifier.contains(have, prereleases=True):
                found.append(f"{name} wants {wanted.name}{wanted.specifier}, and {have} is there")
    return found


def _names(requirements: Sequence[str], extra: str) -> list[str]:
    parsed = [Requirement(text) for text in requirements]
    return [r.name for r in parsed if _applies(r, extra) and not _applies(r, "")]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def bitsandbytes_libraries() -> list[str]:
    """Return for which CUDA versions bitsandbytes brings a library, as ``["12.8", "13.0"]``."""
    spec = importlib.util.find_spec("bitsandbytes")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    names = [p.name for folder in folders for p in Path(folder).glob("libbitsandbytes_cuda*.so")]
    found = [re.match(r"libbitsandbytes_cuda(\d\d)(\d+)\.so", name) for name in names]
    return sorted(f"{match[1]}.{match[2]}" for match in found if match is not None)


def bitsandbytes_finding(cuda: str, libraries: Sequence[str]) -> Finding | None:
    """Judge whether bitsandbytes has kernels for torch's CUDA: it needs the same major version.

    Args:
        cuda: torch's CUDA version.
        libraries: for which versions there is a library.

    Returns:
        None if all is well.
    """
    if any(library.partition(".")[0] == cuda.partition(".")[0] for library in libraries):
        return None
    return problem(
        "bitsandbytes",
        f"no library for CUDA {cuda}, which torch is built with; it has "
        f"{', '.join(libraries) or 'none'}",
        fix="Run `pip install -U bitsandbytes`, or install torch for one of those versions.",
    )


def plugin_findings() -> list[Finding]:
    """Say whether plugins can be resolved."""
    try:
        families = installed_families()
    except (PluginError, SettingsError) as error:
        return [problem("plugins", str(error), fix="Do what the message says; see docs/design.md.")]
    names = sorted({info.plugin for info in families})
    text = f"{len(families)} families from {', '.join(names) or 'no plugin'}"
    if not families:
        return [warning("plugins", text, fix="Install Poros anew, or clear POROS_DISABLE_PLUGINS.")]
    return [good("plugins", text), record_finding(families, running=running_stack())]


def record_finding(families: Sequence[FamilyInfo], *, running: Stack | None) -> Finding:
    """Say whether committed gate records cover the stack that runs here.

    Args:
        families: the installed families, with their status on the stack.
        running: the stack; None if it is not known.
    """
    name = "gate records"
    covered = [info for info in families if info.status == "validated"]
    recorded = [info for info in families if info.records]
    if running is None:
        known = "; ".join(f"{info.title} {info.detail}" for info in covered)
        return warning(
            name,
            f"this stack is not known without torch. Validated: {known or 'none'}",
            fix="Install torch, then look again.",
        )
    if covered:
        listed = ", ".join(f"{info.title} ({info.detail})" for info in covered)
        return good(name, f"cover this stack for {listed}")
    nearest = f": {recorded[0].title} is {recorded[0].detail}" if recorded else ""
    shape = "tiny" if running.gpu is None else "0.5b"
    return warning(
        name,
        f"none covers this stack{nearest}",
        fix=f"Check it yourself: `poros gate --family qwen2 --shape {shape} --steps 50 "
        "--dropout 0.1`.",
    )
