"""The suite on a machine that has Python and make, and nothing that somebody installed by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import NEEDS

ROOT = Path(__file__).resolve().parents[2]
#: What each Debian has: its essential packages, and util-linux and mount, which are in every image.
ESSENTIAL = (
    "awk", "bash", "cat", "chmod", "chown", "cp", "cut", "date", "dd", "df", "dirname", "env",
    "expr", "find", "grep", "gzip", "head", "hostname", "id", "install", "kill", "ln", "ls",
    "mkdir", "mktemp", "mount", "mv", "nice", "nproc", "readlink", "rm", "rmdir", "sed", "seq",
    "setpriv", "sh", "sleep", "sort", "stat", "su", "tail", "tar", "tee", "test", "touch", "tr",
    "true", "umount", "uname", "uniq", "unshare", "wc", "xargs",
)  # fmt: skip
#: Tests that need what such a machine does not have, next to tests of the same files that need
#: nothing.
AFFECTED = (
    "tests/compose",
    "tests/containers",
    "tests/e2e/test_page.py",
    "tests/integration/api/test_nginx.py",
    "tests/integration/api/test_pgbouncer.py",
    "tests/integration/local/test_two_releases.py",
    "tests/unit/docs/test_compose_setup.py",
    "tests/unit/docs/test_monitoring.py",
)
#: Their needs, and what the line about it says to install.
MISSING = {
    "browser": "chromium",
    "compose": "get_docker.sh",
    "compose command": "get_docker.sh",
    "containers": "get_docker.sh",
    "history": "git",
    "nginx": "nginx-light",
    "pgbouncer": "pgbouncer",
    "promtool": "prometheus",
}


def make_path(folder: Path) -> Path:
    """Makes a folder for PATH with the essential programs, Python and make."""
    folder.mkdir()
    for name in (*ESSENTIAL, "make"):
        if program := shutil.which(name):
            (folder / name).symlink_to(program)
    (folder / "python3").symlink_to(Path(sys.executable).resolve())
    return folder


def run_affected(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "DOCKER_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *AFFECTED],
        cwd=ROOT,
        env=environment | {"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", [False, True], ids=["no docker", "a docker client alone"])
def test_what_a_bare_machine_cannot_run_is_reported_in_a_line_each_and_the_rest_passes(
    tmp_path: Path, client: bool
) -> None:
    path = make_path(tmp_path / "bin")
    if client:  # without plugins and without a daemon
        (path / "docker").write_text(
            "#!/bin/sh\necho 'unknown flag' >&2\nexit 125\n", encoding="utf-8"
        )
        (path / "docker").chmod(0o755)
    done = run_affected(path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("NOT RUN: ")]
    for need, remedy in MISSING.items():
        [line] = [line for line in lines if line.startswith(f"NOT RUN: {NEEDS[need].tests}: ")]
        assert remedy in line
    assert len(lines) == len(MISSING)
    assert ("no plugin `compose`" in done.stdout) == client
    assert " passed" in done.stdout
    assert "SKIPPED" not in done.stdout
