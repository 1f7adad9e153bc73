"""The whole system as real processes, started once: a pool of three workers, on free ports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from infra.exchange.client import ExchangeAdmin
from infra.local.stack import LocalStack

POOL = 3


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """Shared by all tests: one that kills a part starts it again before it ends."""
    folder = Path(tempfile.mkdtemp(prefix="berth-e2e-"))
    folder.chmod(0o755)  # PostgreSQL refuses to run as root and must reach its folder as another user
    try:
        with LocalStack(folder, pool_target=POOL, durable=True) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def admin(stack: LocalStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API with an administrator's key."""
    async with httpx.AsyncClient(
        base_url=stack.api_url, headers={"X-API-Key": stack.admin_key}, timeout=60.0, trust_env=False
    ) as client:
        yield client


@pytest.fixture
async def exchange(stack: LocalStack) -> AsyncIterator[ExchangeAdmin]:
    """The paper exchange's admin API: it sets the stage, and its ledger is the judge."""
    async with ExchangeAdmin(stack.exchange.admin_url) as client:
        yield client
