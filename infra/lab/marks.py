"""Reads a user's mark and metadata in Valkey, as often as a measurement needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.local.process import ServerFailed
from worker_runtime.protocol import keys

#: Seconds between two checks; a check takes 0.1 ms.
_POLL_INTERVAL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class PolledMark:
    """A user's mark at one moment; the epoch is 0 when there is none."""

    epoch: int = 0
    worker_id: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        return self.metadata.get("state", "")

    @property
    def session(self) -> int:
        """Number of the session process: grows when it was replaced in place."""
        return int(self.metadata.get("session", 0))


class MarkPoller:
    """Polls marks over one connection. Not for several threads at once."""

    def __init__(self, url: str) -> None:
        self._client: Any = Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, decode_responses=True
        )

    def close(self) -> None:
        self._client.close()

    def read_mark(self, user_id: str) -> PolledMark:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.get(keys.mark(user_id))
        pipeline.hgetall(keys.metadata(user_id))
        mark, metadata = pipeline.execute()
        if not mark:
            return PolledMark()
        epoch, _, worker_id = mark.partition(":")
        return PolledMark(epoch=int(epoch), worker_id=worker_id, metadata=metadata)

    def wait(self, user_id: str, good: Callable[[PolledMark], bool], until: float) -> PolledMark:
        """Returns the first mark that is `good`.
        Raises `ServerFailed` at `until` (monotonic seconds)."""
        while not good(seen := self.read_mark(user_id)):
            if time.monotonic() > until:
                raise ServerFailed(
                    f"the mark of {user_id} has not become what was expected: {seen}"
                )
            time.sleep(_POLL_INTERVAL_S)
        return seen
