"""Which code an orchestrator runs: the build id of its worker deployment version.

Two different workflow codes must never share a build id, or one would replay the other's histories unseen.
The same code must have the same id after a restart, or it would not find its workflows. So the id is the
release and a hash of all that decides what a workflow does.
"""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import version
from pathlib import Path

import workflows
from worker_runtime import protocol
from worker_runtime.protocol.errors import BerthError

#: What a replay depends on: the workflows, and the messages and errors of the protocol that they use.
#: Activities are left out: a replay takes their results from the history.
REPLAYED = (workflows, protocol)

_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:-|$)")


class CodeUnreadable(BerthError):
    """The source files of the workflows are not there, so that no build id can be made of them."""

    code = "CODE_UNREADABLE"


def build_id() -> str:
    """`<release>-<hash>`, like `0.1.0-4f0c2b9d8e71`. Raises `CodeUnreadable`."""
    return f"{version('berth')}-{code_hash([Path(package.__path__[0]) for package in REPLAYED])}"


def code_hash(folders: list[Path]) -> str:
    """Twelve hexadecimal digits of all Python files in these folders, their names included."""
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted(folder.rglob("*.py"))
        if not files:
            raise CodeUnreadable(f"no Python files in {folder}; set BERTH_BUILD_ID")
        for file in files:
            name = f"{folder.name}/{file.relative_to(folder).as_posix()}"
            content = file.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:12]


def release(build: str) -> tuple[int, ...] | None:
    """The release in a build id, comparable; None when an operator chose another form."""
    found = _RELEASE.match(build)
    return tuple(int(part) for part in found[1].split(".")) if found else None
