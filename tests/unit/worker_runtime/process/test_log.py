"""The log has nothing that a library prints."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import os
from worker_runtime.process.log import Log, silence_libraries

early = Log("INFO", process="session")
early.info("before")
silence_libraries()
silence_libraries()
os.write(1, b"canary on standard output")
os.write(2, b"canary on standard error")
early.info("after")
"""


def test_what_native_code_prints_is_dropped_and_the_log_continues() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, check=True, timeout=30
    )
    assert done.stdout == b""
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["before", "after"]
