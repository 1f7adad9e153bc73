"""A synchronous client for the scripts: hypothesis's state machines are synchronous."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.local.servers import ValkeyServer
from worker_runtime.protocol.scripts import Script


class Scripts:
    """Runs scripts and decodes what they return."""

    def __init__(self, client: Redis) -> None:
        self.client = client

    def run(self, script: Script, keys: list[str], *args: Any) -> Any:
        return _text(self.client.eval(script.source, len(keys), *keys, *args))


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_text(item) for item in value]
    return value


@pytest.fixture
def scripts(valkey_server: ValkeyServer) -> Iterator[Scripts]:
    client = Redis.from_url(valkey_server.url, retry=Retry(NoBackoff(), 0))
    client.flushall()
    yield Scripts(client)
    client.close()
