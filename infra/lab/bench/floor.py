"""The floor of the order benchmark: the same two Valkey hops with nothing in between.

`python -m infra.lab.bench.floor URL` is the other side: it pops a request and publishes an answer.
"""

from __future__ import annotations

import subprocess
import sys
import time
from uuid import uuid4

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

_PAYLOAD = b"x" * 400  # bytes; an order takes about as many


def _connect(url: str) -> Redis:
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=30.0)


def measure(url: str, n: int) -> list[float]:
    """Returns the seconds of `n` round trips:
    LPUSH, BLPOP in another process, PUBLISH, received."""
    name = uuid4().hex
    peer = subprocess.Popen([sys.executable, "-m", "infra.lab.bench.floor", url, name, str(n + 50)])
    try:
        client, listener = (
            _connect(url),
            _connect(url).pubsub(  # type: ignore[no-untyped-call]
                ignore_subscribe_messages=True
            ),
        )
        listener.subscribe(f"floor:{name}")
        listener.get_message(timeout=5.0)
        taken = []
        for _ in range(n + 50):
            started = time.perf_counter()
            client.lpush(f"floor:{{{name}}}", _PAYLOAD)
            while listener.get_message(timeout=10.0) is None:
                pass
            taken.append(time.perf_counter() - started)
        peer.wait(10)
        listener.close()
        client.close()
        return taken[50:]
    finally:
        peer.kill()
        peer.wait()


def serve(url: str, name: str, n: int) -> None:
    """Serves the worker's side: pops `n` requests, publishes an answer to each."""
    client = _connect(url)
    for _ in range(n):
        client.blpop([f"floor:{{{name}}}"], timeout=20)
        client.publish(f"floor:{name}", _PAYLOAD)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
