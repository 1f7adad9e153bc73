"""The log of a server process: one JSON line for each event, with all that was given beside its name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_SCRIPT = """
import logging, structlog
from infra.log import configure_log
configure_log("info", libraries=logging.{libraries})
structlog.get_logger().info("ours", pool="a")
logging.getLogger("temporalio.workflow").warning("pool_launches_fail", extra={{"pool": "a", "reason": "why"}})
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


def test_a_line_of_a_workflow_keeps_the_fields_beside_its_name() -> None:
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
