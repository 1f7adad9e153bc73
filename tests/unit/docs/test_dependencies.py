"""`docs/reference/dependencies.md` has a line for each direct dependency, and the lock holds each
of them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

from infra.images.requirements import read_locks

ROOT = Path(__file__).resolve().parents[3]


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement)[0].lower()


def _direct() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {_name(line) for lines in lists for line in lines} - {"berth"}


def test_every_direct_dependency_is_explained_and_nothing_else_is() -> None:
    text = (ROOT / "docs" / "reference" / "dependencies.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([^`]+)` \|", text, re.M)
    assert sorted(explained) == sorted(_direct())


def test_every_explanation_says_why_and_instead_of_what() -> None:
    text = (ROOT / "docs" / "reference" / "dependencies.md").read_text(encoding="utf-8")
    for line in re.findall(r"^\| `.+", text, re.M):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        assert all(cells), line


def test_the_lock_pins_every_direct_dependency_and_names_no_local_path() -> None:
    text = read_locks(ROOT) + (ROOT / "infra" / "aws" / "requirements.lock").read_text(
        encoding="utf-8"
    )
    pinned = set(re.findall(r"^([a-z0-9-]+)==", text, re.M))
    assert _direct() - pinned == set()
    assert "://" not in text


def test_every_installed_package_takes_the_oldest_python_that_is_promised() -> None:
    """What is installed comes from the locks. Debian 12 has 3.11.2, and installs nothing of a lock
    with one package that wants a later one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    python_ranges = {
        distribution.name: distribution.metadata.get_all("Requires-Python", [""])
        for distribution in distributions()
    }
    assert {
        name for name, versions in python_ranges.items() if oldest not in SpecifierSet(*versions)
    } == set()


def test_no_distribution_of_ours_names_another_one() -> None:
    """None of them is on an index, where these names are other people's: `berth` is on PyPI."""
    projects = [
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for path in (ROOT / "pyproject.toml", *ROOT.glob("infra/*/pyproject.toml"))
    ]
    ours = {project["name"] for project in projects}
    assert {"berth", "berth-testing"} <= ours
    for project in projects:
        extras = project.get("optional-dependencies", {}).values()
        lines = [project.get("dependencies", []), *extras]
        assert ours.isdisjoint(_name(line) for group in lines for line in group), project["name"]
