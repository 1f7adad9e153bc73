"""Connects the scripts' client to an empty Valkey."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.local.servers import ValkeyServer
from tests.support.lua_scripts import Scripts


@pytest.fixture
def scripts(valkey_server: ValkeyServer) -> Iterator[Scripts]:
    client = Redis.from_url(valkey_server.url, retry=Retry(NoBackoff(), 0))
    client.flushall()
    yield Scripts(client)
    client.close()
