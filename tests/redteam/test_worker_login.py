"""Attacks with what a worker has of Valkey: a user of its own."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError, ResponseError

from tests.support.systems.attacked import POOL, VALKEY_USERS, AttackedSystem, read_owner
from tests.support.systems.local import until
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from worker_runtime.protocol.worker_reports import sign_event

pytestmark = pytest.mark.skipif(not VALKEY_USERS, reason="workers have the server's password here")


def test_a_flood_of_genuine_events_delays_nobody_and_ends_its_author(
    system: AttackedSystem,
) -> None:
    """With the worker's own Valkey user, which reaches its own list and the bell."""
    hostile, stolen = system.hostile()
    event = WorkerEvent(
        worker_id=stolen.config.worker_id,
        user_id=stolen.user_id,
        epoch=stolen.epoch,
        sequence=10,
        kind=WorkerEventKind.RECONNECTING,
        at_ms=time.time_ns() // 1_000_000,
        detail="x" * 1000,
    )
    entry, worker_id = sign_event(event, stolen.message_keys.assignment), stolen.config.worker_id
    refused = threading.Event()

    def flood() -> None:
        with Redis.from_url(stolen.config.valkey_url, retry=None) as client:
            try:
                while True:
                    client.rpush(keys.events_of(worker_id), *[entry] * 100)
                    client.rpush(keys.EVENT_BELL, *[worker_id] * 100, *["made-up"] * 100)
            except (ConnectionError, AuthenticationError):
                refused.set()

    flooder = threading.Thread(target=flood)
    flooder.start()
    system.victim()
    assert refused.wait(30)
    flooder.join()
    until(lambda: read_owner(system, hostile)[0] != worker_id, "another worker for its user")


def test_a_worker_takes_nobody_out_of_the_pool(system: AttackedSystem) -> None:
    """Nor adds an entry of its own to the stream, with its own Valkey user."""
    _, stolen = system.hostile()
    system.stack.wait_pool(POOL)
    ready = keys.pool_ready(stolen.config.pool)
    with system.valkey() as client, Redis.from_url(stolen.config.valkey_url) as own:
        free: Any = client.zrange(ready, 0, -1)
        assert len(free) == POOL
        for command in (
            *(("ZREM", ready, worker) for worker in free),
            ("ZADD", ready, 0, stolen.config.worker_id),
            *(("DEL", keys.pool_worker(stolen.config.pool, worker.decode())) for worker in free),
            ("XADD", keys.EVENTS, "MAXLEN", "0", "*", "e", "x"),
        ):
            with pytest.raises(NoPermissionError):
                own.execute_command(*command)
        # It may announce itself again, and any other.
        own.rpush(keys.EVENT_BELL, *(f"{stolen.config.pool} {worker.decode()}" for worker in free))
        own.hdel(keys.pool_worker(stolen.config.pool, stolen.config.worker_id), "state")
        own.rpush(keys.EVENT_BELL, f"{stolen.config.pool} {stolen.config.worker_id}")
        until(lambda: not client.llen(keys.EVENT_BELL), "rings that were taken")
        system.victim()
        ready_workers: Any = client.zrange(ready, 0, -1)
        # Users of other tests may claim a worker meanwhile, too.
        claimed = {client.hget(owner, "worker") for owner in client.scan_iter(keys.owner("*"))}
        assert set(free) - claimed <= set(ready_workers)
        assert stolen.config.worker_id.encode() not in ready_workers


def test_its_own_login_to_valkey_reaches_no_key_of_others(system: AttackedSystem) -> None:
    """All keys that there are while a victim and a free worker are about."""
    victim, _ = system.victim()
    _, stolen = system.hostile()
    own = (
        f"{{{stolen.user_id}}}",
        f"{{user:{stolen.user_id}}}",
        stolen.config.worker_id,
        stolen.claim_id,
        keys.EVENT_BELL,
    )
    with system.valkey() as client:
        others = {
            key
            for key in client.scan_iter(count=1000)
            if not any(name.encode() in key for name in own)
        }
    assert any(victim.user_id.encode() in key for key in others)
    assert any(key.startswith(b"broker:budget:") for key in others)
    reached = set()
    with Redis.from_url(stolen.config.valkey_url, socket_timeout=10.0) as client:
        for key in others:
            for words in (
                ("EXISTS", key),
                ("DEL", key),
                ("GET", key),
                ("HGETALL", key),
                ("RPUSH", key, "x"),
            ):
                try:
                    client.execute_command(*words)
                except NoPermissionError:
                    continue
                except ResponseError:  # a key of another kind
                    pass
                reached.add((words[0], key.decode()))
    read_only = (keys.GENERATION, keys.SERVER_SINCE)
    assert reached == {(word, key) for word in ("EXISTS", "GET", "HGETALL") for key in read_only}
