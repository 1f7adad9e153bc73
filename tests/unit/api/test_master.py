"""The master of the API's processes gives up with a cause; it never keeps a port open that nobody
serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.processes.master import MAX_FAILED_STARTS, Master, listen_on


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with listen_on("127.0.0.1", 0) as listening:
        yield listening


async def test_it_gives_up_when_the_machine_refuses_the_successor_of_a_process_that_died(
    listening: socket.socket, tmp_path: Path
) -> None:
    # given a process that starts once, and whose successors the operating system cannot start
    command = tmp_path / "serve"
    command.write_text('#!/bin/sh\nrm "$0"\nexit 3\n')
    command.chmod(0o700)
    # when it dies
    async with asyncio.timeout(60):
        reason = await Master(listening, 1, [str(command)]).run()
    # then the one who started the master learns why
    assert reason.startswith(
        f"{MAX_FAILED_STARTS} processes of the API in a row ended before they served"
    )
    assert "FileNotFoundError" in reason
