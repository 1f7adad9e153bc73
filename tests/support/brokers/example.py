"""Builds and installs the broker of docs/how-to/add-a-broker.md, as its page says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "add-a-broker.md"
_BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.M | re.S)


def write_example(folder: Path) -> Path:
    """Write the page's files; returns the folder of the distribution."""
    project = folder / "berth-harbour"
    for name, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (project / "berth_harbour" / "__init__.py").touch()
    return project


def install(target: Path, *sources: Path) -> None:
    """Install distributions into a folder that can be put on the path, from copies of their
    sources."""
    copies = []
    for source in sources:
        copy = target.parent / f"source-{source.name}"
        shutil.copytree(
            source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        )
        copies.append(str(copy))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), *copies]
    subprocess.run(command, check=True, capture_output=True, text=True)
