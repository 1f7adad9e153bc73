"""Berth is installed without its extra `server`, as next to a worker."""

from __future__ import annotations

import subprocess
import sys


def test_the_command_says_which_extra_it_needs() -> None:
    program = "import sys; sys.modules['typer'] = None; import infra.cli.app"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("The command `berth` needs Berth's extra `server`"), done.stderr
    assert "Traceback" not in done.stderr
