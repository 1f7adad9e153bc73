"""A worker process loads few modules: each one costs memory in each of thousands of workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FORBIDDEN = (
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
)


@pytest.mark.parametrize(
    "modules",
    ["worker_runtime.__main__", "worker_runtime.__main__, worker_runtime.brokers.paper.broker"],
)
def test_a_worker_loads_no_server_library_no_event_loop_and_no_broker_sdk(modules: str) -> None:
    # Only what the import adds: an editable installation loads modules of its own at start.
    program = (
        f"import sys; before = set(sys.modules); import {modules};"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "worker_runtime" in loaded
    assert loaded.isdisjoint(_FORBIDDEN)


def test_the_zygote_loads_no_adapter() -> None:
    program = (
        "import sys, worker_runtime.__main__;"
        "print(*(name for name in sys.modules if name.startswith('worker_runtime.brokers.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["worker_runtime.brokers.port"]
