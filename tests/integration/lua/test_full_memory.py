"""While memory is short the scripts accept nothing new, and what is under way continues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.lua_calls import (
    HOUR_MS,
    POOL,
    USER,
    announce_worker,
    enqueue_request,
    now_ms,
    pop_request,
    set_owner,
)
from tests.support.lua_scripts import Scripts
from tests.support.message_signing import switch_words
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import (
    ANSWER,
    CLAIM,
    ENQUEUE,
    JOIN_WAIT_QUEUE,
    RENEW_MARK,
    SEND_CONTROL,
    WRITE_SWITCH,
)

LIMIT = 850


@pytest.fixture
def short(scripts: Scripts) -> Iterator[Scripts]:
    """A server of which 90 % are in use."""
    announce_worker(scripts, "w1")
    set_owner(scripts)
    before = scripts.client.config_get("maxmemory")["maxmemory"] or 0
    scripts.client.config_set("maxmemory", int(scripts.client.info("memory")["used_memory"] / 0.9))
    yield scripts
    scripts.client.config_set("maxmemory", before)


def place(scripts: Scripts, request: str, limit: Any = LIMIT) -> Any:
    names = [*keys.enqueueing(USER, request), keys.client_order(USER, f"client-{request}")]
    deadline = now_ms(scripts) + 30_000
    return scripts.run(
        ENQUEUE, names, request, "payload", deadline, HOUR_MS, "mac", "tag", HOUR_MS, limit
    )


def claim(scripts: Scripts, claim_id: str) -> Any:
    names = [
        keys.pool_ready(POOL),
        keys.pool_claim(POOL, claim_id),
        keys.pool_wait_queue(POOL),
        keys.pool_last_asked(POOL),
    ]
    words = (claim_id, keys.pool_worker_prefix(POOL), 3600, "u", 30_000, "", LIMIT)
    return scripts.run(CLAIM, names, *words)


def test_no_new_order_and_no_new_claim_is_taken(short: Scripts) -> None:
    names = set(short.client.scan_iter())
    assert place(short, "o1") == [3, "", 0]
    assert claim(short, "c1") == ["full"]
    assert set(short.client.scan_iter()) == names


def test_cancels_answers_leases_controls_and_switches_pass(short: Scripts) -> None:
    assert enqueue_request(short, "cancel")[0] == 1
    _, item, *_ = pop_request(short, 1)
    named = keys.answering(USER, "cancel")
    assert short.run(ANSWER, named, item, "answer", 60, "")[0] == 1
    mark = [keys.owner(USER), keys.mark(USER), keys.metadata(USER)]
    assert short.run(RENEW_MARK, mark, 1, "w", 30_000, "state", "Active") == "ok"
    assert short.run(SEND_CONTROL, [keys.control(USER), keys.doorbell(USER)], "message") == 1
    switch = switch_words(USER)
    assert short.run(WRITE_SWITCH, [keys.switch(USER)], switch[0], "-", *switch[1:]) == "ok"
    assert (
        short.run(JOIN_WAIT_QUEUE, [keys.pool_wait_queue(POOL), keys.pool_last_asked(POOL)], "u", 9)
        == 0
    )


def test_what_was_taken_before_is_told_again(scripts: Scripts) -> None:
    announce_worker(scripts, "w1")
    first = place(scripts, "o1")
    assert first[0] == 1
    assert claim(scripts, "c1")[0] == "claimed"
    before = scripts.client.config_get("maxmemory")["maxmemory"] or 0
    scripts.client.config_set("maxmemory", int(scripts.client.info("memory")["used_memory"] / 0.9))
    try:
        assert place(scripts, "o1") == [0, first[1], 0]
        assert claim(scripts, "c1")[0] == "again"
        # Of two orders with one client order id the first counts, whatever the memory is.
        names = [*keys.enqueueing(USER, "o2"), keys.client_order(USER, "client-o1")]
        assert scripts.run(ENQUEUE, names, "o2", "p", 1, HOUR_MS, "mac", "tag", HOUR_MS, LIMIT)[
            :2
        ] == [
            2,
            "o1|tag",
        ]
    finally:
        scripts.client.config_set("maxmemory", before)


def test_a_server_without_a_limit_takes_all(scripts: Scripts) -> None:
    before = scripts.client.config_get("maxmemory")["maxmemory"] or 0
    scripts.client.config_set("maxmemory", 0)
    try:
        assert place(scripts, "o1", 1)[0] == 1
    finally:
        scripts.client.config_set("maxmemory", before)
