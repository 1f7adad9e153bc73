"""Makes both clients of a served API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from infra.client.client import AsyncBerthClient, BerthClient
from tests.support.clients.connections import ClientCalls, Connect


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Connect:
    @asynccontextmanager
    async def of(url: str, key: str) -> AsyncIterator[ClientCalls]:
        url = url.removesuffix("/v1")
        if request.param == "blocking":
            with BerthClient(url, key) as blocking:
                yield ClientCalls(blocking)
        else:
            async with AsyncBerthClient(url, key) as client:
                yield ClientCalls(client)

    return of
