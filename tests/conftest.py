"""What every test shares: one thread, poisoned slots, no network."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.update(
    {
        "POROS_POISON": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }
)
for _name in ("POROS_DISABLE_PLUGINS", "POROS_DEBUG", "FORCE_COLOR"):
    os.environ.pop(_name, None)

SLOW = Path(__file__).with_name("slow.txt")
HAS_TORCH = importlib.util.find_spec("torch") is not None

if HAS_TORCH:
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what ``slow.txt`` lists, and skip GPU tests where no device is."""
    lines = SLOW.read_text(encoding="utf-8").splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker("slow")
    collected = {item.nodeid for item in items}
    files = {name.split("::")[0] for name in collected}
    gone = {name for name in listed - collected if name.split("::")[0] in files}
    if gone and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"{SLOW.name} lists what is no test: {', '.join(sorted(gone))}")
    if HAS_TORCH and torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Keep what the imports made out of every later garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class PluginSite:
    """A folder on ``sys.path`` into which a test installs plugin distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(
        self, distribution: str, *, plugin: str, module: str, source: str, version: str = "1.0"
    ) -> None:
        """Lay out what pip would: a module, its metadata, and an entry point."""
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[poros]\n{plugin} = {module}\n")
        self.modules.append(module)


@pytest.fixture
def plugin_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSite]:
    """Give a place for third-party plugins, with the process-wide plugins resolved anew."""
    from poros_core.plugins import plugins

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    site = PluginSite(folder)
    plugins.cache_clear()
    yield site
    plugins.cache_clear()
    for module in site.modules:
        sys.modules.pop(module, None)


@pytest.fixture
def gate_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``poros gate``: its status, output and errors."""
    from poros.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["poros", "gate", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run
