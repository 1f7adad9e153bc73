"""The log of a server process: one JSON line for each event, with all that was given next to its
name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

_SCRIPT = """
import logging, structlog
from infra.log import configure_log
configure_log("info", libraries=logging.{libraries})
structlog.get_logger().info("ours", pool="a")
workflow = logging.getLogger("temporalio.workflow")
workflow.warning("pool_launches_fail", extra={{"pool": "a", "reason": "why"}})
logging.getLogger("some.library").info("chatty")
"""


def lines(libraries: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(libraries=libraries)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_of_a_workflow_keeps_the_fields_next_to_its_name() -> None:
    ours, workflows = lines("WARNING")
    assert (ours["event"], ours["pool"], ours["level"]) == ("ours", "a", "info")
    assert {name: workflows[name] for name in ("event", "pool", "reason", "level")} == {
        "event": "pool_launches_fail",
        "pool": "a",
        "reason": "why",
        "level": "warning",
    }


def test_libraries_are_logged_from_their_own_level_on() -> None:
    assert [line["event"] for line in lines("INFO")] == ["ours", "pool_launches_fail", "chatty"]


_FLOOD = """
import os, sys, time
import structlog
from infra.log import configure_log
configure_log("info")
log = structlog.get_logger()
began = time.monotonic()
for number in range(20_000):
    log.info("line", number=number, text="x" * 100)
os.write(1, f"{time.monotonic() - began}\\n".encode())
"""


def run_with_log(output: int) -> tuple[int, float]:
    """Returns the exit code of a program that logs a lot, and the seconds that it took to log."""
    done = subprocess.run(
        [sys.executable, "-c", _FLOOD],
        stdout=subprocess.PIPE,
        stderr=output,
        check=False,
        timeout=60,
    )
    return done.returncode, float(done.stdout)


def test_a_pipe_that_nobody_reads_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    try:
        code, seconds = run_with_log(writing)
        assert code == 0
        assert seconds < 30
        assert len(os.read(reading, 1 << 16)) > 0
    finally:
        os.close(reading)
        os.close(writing)


def test_a_log_on_a_full_disk_raises_nothing() -> None:
    with open("/dev/full", "wb") as full:
        code, _ = run_with_log(full.fileno())
    assert code == 0


def test_a_log_whose_reader_went_away_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, _ = run_with_log(writing)
    finally:
        os.close(writing)
    assert code == 0


def test_what_was_logged_last_is_written_and_what_was_dropped_is_counted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FLOOD], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    dropped = sum(line["count"] for line in lines if line["event"] == "log_lines_dropped")
    numbers = [line["number"] for line in lines if line["event"] == "line"]
    assert numbers == sorted(numbers)
    assert len(numbers) + dropped == 20_000
