"""Everything that is installed is pinned by a hash, and the SBOM of an image says what is in it."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.images.requirements import pinned, read_locks, wanted

ROOT = Path(__file__).resolve().parents[3]
LOCK = read_locks(ROOT)
IMAGES = [["server", "setuptools"], ["server", "shioaji"], ["shioaji"], []]


def needed(lines: list[str]) -> set[str]:
    """Returns the names of what these requirements need here, in turn, as the installed packages
    say."""
    names: set[str] = set()
    pending = [(Requirement(line), "") for line in lines]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        names.add(name)
        for wanted_extra in ("", *requirement.extras):
            if (name, wanted_extra) not in seen:
                seen.add((name, wanted_extra))
                try:
                    pending += [(Requirement(line), wanted_extra) for line in requires(name) or ()]
                except PackageNotFoundError:
                    # The index may have none (infra/images/install_shioaji.py).
                    if name == "shioaji":
                        continue
                    pytest.fail(f"{name} is not installed")
    return names


def test_every_line_of_the_lock_has_a_version_and_hashes() -> None:
    entries = re.findall(
        r"^([a-z0-9-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", LOCK, re.M
    )
    assert len(entries) == len(re.findall(r"^[a-z]", LOCK, re.M)) > 100


@pytest.mark.parametrize("extras", IMAGES, ids=" ".join)
def test_an_image_installs_what_its_extras_need_by_hash(extras: list[str]) -> None:
    lines = wanted(ROOT / "pyproject.toml", extras)
    text = pinned(LOCK, lines)
    names = set(re.findall(r"^([a-z0-9-]+)==", text, re.M))
    missing = needed(lines) - names - {"pip", "setuptools", "wheel"}
    assert missing == set()
    assert text.count("==") == len(names) == text.count("# via")
    assert not names & {"pytest", "mypy", "mkdocs", "moto"}
    assert "shioaji" in extras or "shioaji" not in names


def test_a_package_that_the_lock_has_not_is_an_error() -> None:
    with pytest.raises(KeyError):
        pinned(LOCK, wanted(ROOT / "pyproject.toml", ["serber"]))


@pytest.mark.timeout(60)
def test_the_sbom_names_each_package_of_an_image_with_its_hashes(tmp_path: Path) -> None:
    lines = tmp_path / "worker.txt"
    lines.write_text(pinned(LOCK, wanted(ROOT / "pyproject.toml", ["shioaji"])), encoding="utf-8")
    made = tmp_path / "worker.cdx.json"
    tool = Path(sys.executable).with_name("cyclonedx-py")
    words = ["requirements", "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"]
    subprocess.run(
        [tool, *words, "--output-file", made, lines], check=True, capture_output=True, timeout=50
    )
    sbom = json.loads(made.read_text(encoding="utf-8"))
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "berth"
    named = {f"{component['name']}=={component['version']}" for component in sbom["components"]}
    assert named == set(re.findall(r"^\S+==[^ \\]+", lines.read_text(encoding="utf-8"), re.M))
    assert all(component["purl"].startswith("pkg:pypi/") for component in sbom["components"])
    references = [
        ref for component in sbom["components"] for ref in component["externalReferences"]
    ]
    assert sum(len(ref.get("hashes", ())) for ref in references) >= len(sbom["components"])
