"""Runs a program where other users reach the interpreter, as they do where Python is installed for
all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import needs

#: In a mount namespace of the node's own, others may pass the closed folder ($1) above the
#: interpreter ($2).
_OPENED = """
set -e
mkdir -p "$3/$2"
mount --bind "$1/$2" "$3/$2"
mount --rbind "$3" "$1"
shift 3
exec "$@"
"""


def opened_interpreter(folder: Path) -> list[str]:
    """Returns what to put before a command, so that other users reach the interpreter."""
    interpreter = Path(sys.executable).resolve()
    closed = next(
        (
            parent_folder
            for parent_folder in reversed(interpreter.parents)
            if not parent_folder.stat().st_mode & 0o001
        ),
        None,
    )
    if closed is None:
        return []
    root = folder / "opened"
    root.mkdir()
    root.chmod(0o755)
    below = interpreter.relative_to(closed).parts[0]
    before = ["unshare", "--mount", "sh", "-c", _OPENED, "sh", str(closed), below, str(root)]
    tried = subprocess.run([*before, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        needs.skip(
            "root",
            f"{closed} is closed for others, and this machine has no mount namespaces: "
            f"{tried.stderr}",
        )
    return before
