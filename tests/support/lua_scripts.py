"""Contains a synchronous client for the scripts: hypothesis's state machines are synchronous."""

from __future__ import annotations

from typing import Any

from redis import Redis

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
