"""The directions in which packages may import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "poros": {"poros_core"},
    "poros_core": set(),
    "poros_families": {"poros_core"},
    "poros_loaders": {"poros_core"},
    "poros_runtimes": {"poros_core"},
}

ONLY_IN_LOADERS = {"bitsandbytes", "safetensors"}
NEVER_IN_FAMILIES = {"torch", "transformers", "peft"}


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import: lazy, typing-only, and by name too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def type_checking_lines(source: str) -> set[int]:
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def violations(package: str, source: str) -> list[str]:
    found = []
    typing_only = type_checking_lines(source)
    for line, module in imported(source):
        top = module.partition(".")[0]
        if top in MAY_IMPORT and top != package and top not in MAY_IMPORT[package]:
            found.append(f"line {line}: {package} imports {module}")
        if package != "poros_loaders" and top in ONLY_IN_LOADERS:
            found.append(f"line {line}: only poros_loaders may import {module}")
        if package == "poros_families" and top in NEVER_IN_FAMILIES and line not in typing_only:
            found.append(f"line {line}: a family imports {module}")
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_design(package: str) -> None:
    assert files(package)
    found = [
        f"{path.relative_to(ROOT)}: {violation}"
        for path in files(package)
        for violation in violations(package, path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_package_has_a_place_in_the_design() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests"} == set(MAY_IMPORT)
    assert all((ROOT / package / "py.typed").is_file() for package in MAY_IMPORT)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("poros_core", "import poros_families.qwen2"),
        ("poros_core", "def f():\n    from poros_loaders import x"),
        ("poros_core", "import importlib\nimportlib.import_module('poros_runtimes.streamed')"),
        ("poros_runtimes", "from poros_loaders.nf4 import x"),
        ("poros_loaders", "if TYPE_CHECKING:\n    from poros_runtimes import x"),
        ("poros_families", "from poros import prepare"),
        ("poros", "import poros_families"),
        ("poros_runtimes", "import bitsandbytes as bnb"),
        ("poros_core", "from safetensors.torch import load_file"),
        ("poros_families", "def f():\n    import torch"),
    ],
)
def test_a_planted_violation_is_found(package: str, source: str) -> None:
    assert len(violations(package, source)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("poros", "from poros_core.errors import PorosError"),
        ("poros_core", "from poros_core.plan import BlockPlan\nimport torch"),
        ("poros_loaders", "import bitsandbytes"),
        ("poros_families", "if TYPE_CHECKING:\n    from torch import nn"),
    ],
)
def test_a_permitted_import_passes(package: str, source: str) -> None:
    assert violations(package, source) == []
