"""Prints what an image installs, with versions and hashes:
what its extras need, as the locks pin it.

`python requirements.py server shioaji setuptools`, for `pip install --require-hashes`. A name that
is no extra is a package. The images use it so that the dependency layer can be built before the
source is copied; the SBOM of an image is made of it, too. With `--without-shioaji` the SDK is left
to `install_shioaji.py`. Standard library only.
"""

import re
import sys
import tomllib
from pathlib import Path

LOCKS = ("requirements.lock", "requirements-shioaji.lock")


def read_locks(folder: Path) -> str:
    """Returns the entries of all locks below `folder` that images install from."""
    return "".join((folder / name).read_text(encoding="utf-8") for name in LOCKS)


def wanted(pyproject: Path, extras: list[str]) -> list[str]:
    """Returns the requirement lines of the core and of these extras; a name that is no extra stands
    for itself."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [
        *project["dependencies"],
        *(line for extra in extras for line in optional.get(extra, [extra])),
    ]


def pinned(lock: str, lines: list[str]) -> str:
    """Returns the part of the lock that these requirements need, in turn. Raises KeyError for what
    is not in it."""
    entries = {entry.partition("==")[0]: entry for entry in re.split(r"\n(?=[a-z])", lock)[1:]}
    # Below each package the lock says which others need it.
    users = {
        name: set(re.findall(r"^    #(?: via)? +(\S+)", entries[name], re.M)) for name in entries
    }
    chosen = {re.split(r"[^a-z0-9-]", line.lower())[0] for line in lines}
    while needed := {name for name in entries.keys() - chosen if users[name] & chosen}:
        chosen |= needed
    return "\n".join(entries[name].rstrip() for name in sorted(chosen)) + "\n"


if __name__ == "__main__":
    given = sys.argv[1:]
    needed = wanted(Path("pyproject.toml"), [name for name in given if name != "--without-shioaji"])
    if "--without-shioaji" in given:
        needed = [line for line in needed if not line.startswith("shioaji")]
    sys.stdout.write(pinned(read_locks(Path()), needed))
