"""The follower of PostgreSQL's log next to a receiver that renames its files at any time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.systems.local import until

#: A receiver that does nothing; the follower's arguments for the real one follow.
FOLLOW = """
import sys
from pathlib import Path
from infra.recovery.log_follower import LogFollower
folder, spool = map(Path, sys.argv[1:])
LogFollower(folder, spool, [], max_spool_bytes=1).run(["/bin/sh", "-c", "exec sleep 60"], {})
"""


@pytest.mark.timeout(60)
def test_a_file_that_vanishes_while_the_spool_is_measured_does_not_end_the_follower(
    tmp_path: Path,
) -> None:
    spool, errors = tmp_path / "spool", tmp_path / "follower.log"
    spool.mkdir()
    (spool / "000000010000000000000001").write_bytes(b"x" * 65_536)
    # It is listed and not there, as is a file that was renamed since it was listed.
    (spool / "000000010000000000000002.partial").symlink_to(tmp_path / "renamed")
    with errors.open("wb") as output:
        follower = subprocess.Popen(
            [sys.executable, "-c", FOLLOW, str(tmp_path / "away"), str(spool)],
            stdout=output,
            stderr=output,
        )
    try:
        until(
            lambda: "log_spool_full" in errors.read_text() or follower.poll() is not None,
            "a look at the spool",
        )
        assert follower.poll() is None, errors.read_text()
    finally:
        follower.kill()
        follower.wait()
