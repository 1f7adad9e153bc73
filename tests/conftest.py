"""Real servers for the whole suite: started once, on free ports, each test on data of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from infra import valkey
from infra.local.servers import PostgresServer, TemporalServer, ValkeyServer
from workflows.names import SEARCH_ATTRIBUTES

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """A folder that other users may pass through: PostgreSQL refuses to run as root."""
    path = Path(tempfile.mkdtemp(prefix="berth-tests-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A folder with a path short enough for a Unix socket (107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="berth-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def valkey_server(server_directory: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(server_directory / "valkey", durable=False) as server:
        yield server


@pytest.fixture
async def valkey_client(valkey_server: ValkeyServer) -> AsyncIterator[Redis]:
    """A client of an empty Valkey."""
    client = valkey.connect(valkey_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def postgres_server(server_directory: Path) -> Iterator[PostgresServer]:
    with PostgresServer(server_directory / "postgres", durable=False) as server:
        yield server


@pytest.fixture
def empty_database(postgres_server: PostgresServer) -> str:
    """URL of a new, empty database."""
    return postgres_server.create_database(f"test_{os.getpid()}_{next(_numbers)}")


@pytest.fixture(scope="session")
def temporal_server(server_directory: Path) -> Iterator[TemporalServer]:
    with TemporalServer(
        server_directory / "temporal", durable=False, search_attributes=SEARCH_ATTRIBUTES
    ) as server:
        yield server
