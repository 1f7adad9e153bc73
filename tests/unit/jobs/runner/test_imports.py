"""A runner loads few modules: each one costs memory in each runner and child."""

from __future__ import annotations

import subprocess
import sys

_FORBIDDEN = {
    "temporalio",
    "fastapi",
    "sqlalchemy",
    "boto3",
    "pydantic",
    "redis",
    "uvicorn",
    "structlog",
    "asyncio",
    "ssl",
    "logging",
    "subprocess",
    "multiprocessing",
    "concurrent",
    "http",
    "email",
    "workflows",
    "activities",
    "api",
    "infra",
    "shioaji",
    "cryptography",
}


def test_a_runner_loads_no_server_library_and_no_broker() -> None:
    program = (
        "import sys; before = set(sys.modules); import worker_runtime.jobs.__main__;"
        "print(*{name for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert {name.split(".")[0] for name in loaded}.isdisjoint(_FORBIDDEN)
    assert not [name for name in loaded if name.startswith("worker_runtime.brokers")]
