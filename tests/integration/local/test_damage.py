"""`berth up` on a data folder of which one file was damaged: a reason, no traceback, nothing left
running."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.local.stack import LocalStack

BERTH = str(Path(sys.executable).with_name("berth"))
GARBAGE = b"\xff\x00 this was something else once \n" * 300

pytestmark = [pytest.mark.drill, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def stopped_folder() -> Iterator[Path]:
    """A data folder of a stack that was up and was stopped."""
    folder = Path(tempfile.mkdtemp(prefix="berth-damage-"))
    folder.chmod(0o755)
    try:
        with LocalStack(folder / "data", pool_target=0, api_processes=1):
            pass
        yield folder / "data"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _manifest(folder: Path) -> Path:
    [manifest] = (folder / "valkey" / "appendonlydir").glob("*.manifest")
    return manifest


def _garbage(path: Path) -> None:
    assert path.is_file()
    path.write_bytes(GARBAGE)
    for rest in ("-wal", "-shm"):  # with them SQLite would put the file right
        path.with_name(path.name + rest).unlink(missing_ok=True)


def _cut_short(path: Path) -> None:
    """In the middle of the first line: cut between two lines it would be a whole one."""
    path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        pytest.param(
            "valkey", lambda folder: _cut_short(_manifest(folder)), id="valkey-manifest-cut-short"
        ),
        pytest.param(
            "valkey", lambda folder: _garbage(_manifest(folder)), id="valkey-manifest-garbage"
        ),
        pytest.param(
            "temporal", lambda f: _garbage(f / "temporal" / "temporal.db"), id="temporal-garbage"
        ),
        pytest.param(
            "exchange", lambda f: _garbage(f / "exchange" / "ledger.db"), id="exchange-garbage"
        ),
        pytest.param(
            "postgres",
            lambda f: (f / "postgres" / "data" / "global" / "pg_control").unlink(),
            id="postgres-control-file-gone",
        ),
    ],
)
def test_a_damaged_file_ends_up_with_the_parts_name_and_leaves_nothing_running(
    part: str,
    damage: Callable[[Path], None],
    stopped_folder: Path,
    folder: Path,
    port_environment: dict[str, str],
) -> None:
    shutil.copytree(stopped_folder, folder, ignore=shutil.ignore_patterns("*.sock"))
    damage(folder)
    done = subprocess.run(
        [BERTH, "up", "--pool", "0"],
        env=port_environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith(f"error: {part}"), done.stderr
    for trace in ("Traceback", 'File "'):  # nor the end of one, from the part's own log
        assert trace not in done.stdout + done.stderr
    # The fixture `folder` looks for processes that are left.
