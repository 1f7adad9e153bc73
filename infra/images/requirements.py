"""Prints what an image installs: the core dependencies of pyproject.toml and those of the named extras.

`python requirements.py server shioaji`. The images use it so that the dependency layer can be built before
the source is copied. Standard library only.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def wanted(pyproject: Path, extras: list[str]) -> list[str]:
    """Requirement lines. Raises KeyError for an extra that does not exist."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(wanted(Path("pyproject.toml"), sys.argv[1:])) + "\n")
