"""The drain that compose runs before it stops the node's container, against a real node."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.compose import drain, health


def test_a_node_is_drained_and_goes_on(short_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = short_directory / "node.sock"
    node = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "infra.node",
            "--socket",
            str(path),
            "--state",
            str(short_directory / "state"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 20
        while health.main(["unix", str(path)]) and time.monotonic() < until:
            assert node.poll() is None
            time.sleep(0.02)
        assert drain.main([str(path)]) == 0
        assert capsys.readouterr().out == "0 workers stopped\n"
        assert health.main(["unix", str(path)]) == 0
    finally:
        node.send_signal(signal.SIGTERM)
        assert node.wait(20) == 0


def test_without_a_node_it_says_so(short_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain.main([str(short_directory / "none.sock")]) == 1
    assert "none.sock" in capsys.readouterr().err
