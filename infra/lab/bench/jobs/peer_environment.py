"""The Python environment of the peers: some of them cannot share one with Berth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: The folder from which peers' processes import `infra`.
ROOT = Path(__file__).resolve().parents[4]
PACKAGES = (
    "arq==0.28.0",
    "dramatiq[redis]==2.2.1",
    "huey==3.5.4",
    "procrastinate==3.10.0",
    "psycopg[binary]>=3.3",
    "rq>=2.12",
)


def peers_python(folder: Path) -> str:
    """Returns an interpreter with `PACKAGES`, made in this folder if it is not there."""
    python, installed = folder / "bin" / "python", folder / "berth-peers.txt"
    packages = "\n".join(PACKAGES)
    if not installed.exists() or installed.read_text(encoding="utf-8") != packages:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
        subprocess.run(install, check=True)
        installed.write_text(packages, encoding="utf-8")
    return str(python.absolute())
