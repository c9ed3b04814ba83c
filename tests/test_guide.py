"""The guide "Write a family in one file" says what the code says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer
import yaml
from conftest import PluginSite

from poros.cli import app
from poros_core import hookspecs, protocols
from poros_core.conformance import check_family
from poros_core.family import Family
from poros_core.plugins import plugins

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")]
GUIDE = (ROOT / "docs" / "write-a-family.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)(?: (\w+)=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOOKS = {name for name, value in vars(hookspecs).items() if hasattr(value, "poros_spec")}


def blocks(kind: str) -> list[tuple[str, str]]:
    """Return value and text of every block of the guide that is marked with ``kind=value``."""
    return [(value, text) for _, name, value, text in BLOCK.findall(GUIDE) if name == kind]


def file(name: str) -> str:
    return next(text for value, text in blocks("file") if value == name)


def normal(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "None")
    return ast.unparse(ast.parse(text))


def promised(module: str, text: str) -> dict[str, list[str]]:
    """Return what a stub in the guide says, one line per member."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [_stub(node)]
        else:
            assert isinstance(node, ast.ClassDef), module
            found[node.name] = [_member(member) for member in node.body]
    return found


def _stub(node: ast.FunctionDef) -> str:
    assert node.returns is not None
    return f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


def _member(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign):
        optional = "" if node.value is None else " = ..."
        return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{optional}"
    assert isinstance(node, ast.FunctionDef)
    if node.decorator_list:
        assert [ast.unparse(decorator) for decorator in node.decorator_list] == ["property"]
        assert node.returns is not None
        return f"{node.name}: {ast.unparse(node.returns)}"
    return _stub(node)


def actual(value: Any) -> list[str]:
    """Return the same of the code."""
    if inspect.isfunction(value):
        return [_source(value)]
    if attrs.has(value):
        return [
            f"{a.name}: {normal(a.type)}{'' if a.default is attrs.NOTHING else ' = ...'}"
            for a in attrs.fields(value)
        ]
    lines = []
    for name, member in vars(value).items():
        if isinstance(member, property):
            assert member.fget is not None
            lines.append(f"{name}: {normal(inspect.signature(member.fget).return_annotation)}")
        elif inspect.isfunction(member) and not name.startswith("_"):
            lines.append(_source(member))
    return lines


def _source(function: Any) -> str:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    return _stub(node)


STUBS = [
    (module, name, lines)
    for module, text in blocks("signatures")
    for name, lines in promised(module, text).items()
]


@pytest.mark.parametrize(("module", "name", "lines"), STUBS, ids=[stub[1] for stub in STUBS])
def test_signatures_are_the_codes(module: str, name: str, lines: list[str]) -> None:
    assert lines == actual(getattr(importlib.import_module(module), name))


def test_every_hook_attribute_and_protocol_is_in_the_guide() -> None:
    names = {name for _, name, _ in STUBS}
    contracts = {name for name in protocols.__all__ if name != "BlockPlan"}
    assert names == {"Family", "check_family", *HOOKS, *contracts}
    assert len(HOOKS) == 3
    for word in (*HOOKS, *(a.name for a in attrs.fields(Family))):
        assert len(re.findall(rf"^\| `{word}` \| \S", GUIDE, re.MULTILINE)) == 1, word


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_every_hook_says_when_it_is_called_and_what_it_returns(hook: str) -> None:
    document = inspect.getdoc(getattr(hookspecs, hook))
    assert document is not None
    assert "When: " in document
    assert "Returns: " in document
    plugin_tests = (ROOT / "tests" / "test_plugins.py").read_text(encoding="utf-8")
    assert hook in plugin_tests


@pytest.mark.parametrize(
    ("stub", "changed"),
    [
        ("def poros_families() -> Sequence[Family]: ...", "def poros_families() -> Family: ..."),
        ("    shared: tuple[str, ...] = ...\n", "    shared: tuple[str, ...]\n"),
        ("    shared: tuple[str, ...] = ...\n", ""),
        ("steps: int = 2", "steps: int = 3"),
        ("def claims(self, param: nn.Parameter)", "def claims(self, weight: nn.Parameter)"),
    ],
)
def test_a_guide_that_is_out_of_date_is_found(stub: str, changed: str) -> None:
    assert GUIDE.count(stub) == 1
    wrong = [
        name
        for _, kind, module, text in BLOCK.findall(GUIDE.replace(stub, changed))
        if kind == "signatures"
        for name, lines in promised(module, text).items()
        if lines != actual(getattr(importlib.import_module(module), name))
    ]
    assert len(wrong) == 1


def test_the_package_of_the_guide_fits_its_file() -> None:
    project = tomllib.loads(file("pyproject.toml"))
    entry_points = project["project"]["entry-points"][hookspecs.PROJECT]
    assert entry_points == {"poros-olmo2": "poros_olmo2"}
    assert project["tool"]["setuptools"]["py-modules"] == ["poros_olmo2"]
    assert project["project"]["dependencies"] == ["poros-train"]
    compile(file("poros_olmo2.py"), "poros_olmo2.py", "exec")


def test_the_family_of_the_guide_conforms(plugin_site: PluginSite) -> None:
    source = file("poros_olmo2.py")
    assert not re.search(r"^\s*(import|from) (torch|transformers)", source, re.MULTILINE)
    plugin_site.install(
        "poros-olmo2", plugin="poros-olmo2", module="poros_olmo2", source=source, version="0.1.0"
    )
    assert plugins().family_named("olmo2").plugin == "poros-olmo2"
    test = ast.parse(file("test_conformance.py"))
    calls = [ast.unparse(node) for node in ast.walk(test) if isinstance(node, ast.Call)]
    assert calls == ["check_family('olmo2')"]
    check_family("olmo2", block_sizes=(2,), steps=1)


def commands(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8")
    return [shlex.split(line, comments=True) for line in re.findall(r"^\$ (.+)$", text, re.M)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for command in commands(page):
        if command[0] != "poros":
            continue
        known = {opt for param in group.commands[command[1]].params for opt in param.opts}
        asked = {word for word in command[2:] if word.startswith("--")}
        assert asked <= known, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_on_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-")
        for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        assert (page.parent / path).exists(), link
        assert path or anchor in headings, link


def test_notes_that_the_design_names_are_in_the_source() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("poros_*/**/*.py"))
    named = re.findall(r"\[Note: [^\]]+\]", (ROOT / "docs" / "design.md").read_text("utf-8"))
    assert len(set(named)) >= 8
    for note in named:
        assert f"\n{note}\n" in inspect.cleandoc(source) or f" {note}\n" in source, note


def test_the_request_form_asks_for_what_a_family_needs() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/architecture-request.yml").read_text())
    fields = {entry["id"]: entry for entry in form["body"] if "id" in entry}
    required = {name for name, f in fields.items() if f.get("validations", {}).get("required")}
    assert {"model", "model-type", "check", "config", "transformers", "kind"} <= required
    assert {"layers", "crosses", "tiny"} <= set(fields)
    for entry in form["body"]:
        assert entry["type"] in {"markdown", "input", "textarea", "dropdown", "checkboxes"}
        assert entry["type"] == "markdown" or entry["attributes"]["label"]
