"""The pool's scripts: exactly one winner a worker, the same worker for the same claim."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from infra.valkey import client as valkey
from tests.support.lua_calls import POOL, admit_worker, announce_worker, claim_worker, settle_claim
from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import (
    CLAIM,
    JOIN_WAIT_QUEUE,
)


def test_a_lost_claim_reply_returns_the_same_worker(scripts: Scripts) -> None:
    announce_worker(scripts, "w1")
    announce_worker(scripts, "w2")
    first, again = claim_worker(scripts, "c"), claim_worker(scripts, "c")
    assert first[:2] == ["claimed", "w1"]
    assert again[:2] == ["again", "w1"]
    assert first[2:] == ["key of w1", "p"]


def test_the_longest_ready_worker_is_taken_first(scripts: Scripts) -> None:
    scripts.client.zadd(keys.pool_ready(POOL), {"old": 1})
    announce_worker(scripts, "new")
    announce_worker(scripts, "old")
    assert claim_worker(scripts, "c")[1] == "old"


def test_a_worker_that_has_ended_is_not_admitted(scripts: Scripts) -> None:
    admit_worker(scripts, "ended")
    assert not scripts.client.keys("*")


def test_a_worker_is_admitted_once(scripts: Scripts) -> None:
    announce_worker(scripts, "w")
    claim_worker(scripts, "c")
    admit_worker(scripts, "w")
    assert claim_worker(scripts, "d") == ["empty"]


def test_a_dead_worker_is_skipped(scripts: Scripts) -> None:
    announce_worker(scripts, "dead")
    scripts.client.delete(keys.pool_worker(POOL, "dead"))
    announce_worker(scripts, "alive")
    assert claim_worker(scripts, "c")[1] == "alive"
    assert claim_worker(scripts, "d") == ["empty"]


def test_made_up_entries_hold_nobody_up_for_long(scripts: Scripts) -> None:
    """One call is short however many there are, and the next ones come to the genuine one behind
    them."""
    scripts.client.zadd(
        keys.pool_ready(POOL), {f"made-up-{number}": number for number in range(2500)}
    )
    announce_worker(scripts, "w1")
    assert [claim_worker(scripts, "c")[0] for _ in range(3)] == ["empty", "empty", "claimed"]


def test_a_claim_whose_worker_died_says_so(scripts: Scripts) -> None:
    announce_worker(scripts, "w")
    claim_worker(scripts, "c")
    scripts.client.delete(keys.pool_worker(POOL, "w"))
    assert claim_worker(scripts, "c") == ["gone", "w"]


def test_a_claimed_worker_that_renews_does_not_come_back_to_the_pool(scripts: Scripts) -> None:
    announce_worker(scripts, "w")
    claim_worker(scripts, "c")
    assert announce_worker(scripts, "w") == "claimed"
    assert claim_worker(scripts, "d") == ["empty"]


def test_a_worker_launched_for_a_claim_is_nobody_elses(scripts: Scripts) -> None:
    assert announce_worker(scripts, "w", reserved="c") == "claimed"
    assert claim_worker(scripts, "other") == ["empty"]
    assert scripts.client.lpop(keys.pool_born(POOL, "c")) == b"w"
    assert claim_worker(scripts, "c")[:2] == ["again", "w"]
    assert announce_worker(scripts, "w", reserved="c") == "claimed"
    assert scripts.client.llen(keys.pool_born(POOL, "c")) == 0


def test_confirm_and_release_race_and_the_first_one_holds(scripts: Scripts) -> None:
    announce_worker(scripts, "w1")
    announce_worker(scripts, "w2")
    claim_worker(scripts, "c1")
    claim_worker(scripts, "c2")
    assert settle_claim(scripts, "w1", "c1", "confirmed") == "confirmed"
    assert settle_claim(scripts, "w1", "c1", "released") == "confirmed"
    assert settle_claim(scripts, "w2", "c2", "released") == "released"
    assert settle_claim(scripts, "w2", "c2", "confirmed") == "released"
    assert settle_claim(scripts, "w2", "wrong", "confirmed") == "unknown"
    assert settle_claim(scripts, "w9", "c9", "confirmed") == "unknown"


def test_a_version_to_avoid_is_left_in_the_pool_in_its_order(scripts: Scripts) -> None:
    for score, worker in enumerate(["new-1", "new-2", "old", "new-3"], 1):
        announce_worker(scripts, worker)
        scripts.client.zadd(keys.pool_ready(POOL), {worker: score})
        scripts.client.hset(keys.pool_worker(POOL, worker), "version", worker.partition("-")[0])
    named = [
        keys.pool_ready(POOL),
        keys.pool_claim(POOL, "c"),
        keys.pool_wait_queue(POOL),
        keys.pool_last_asked(POOL),
    ]
    given = ["c", keys.pool_worker_prefix(POOL), 3600, "u", 30_000, "new"]
    assert scripts.run(CLAIM, named, *given)[:2] == ["claimed", "old"]
    named[1] = keys.pool_claim(POOL, "d")
    assert scripts.run(CLAIM, named, "d", *given[1:]) == ["empty"]
    remaining = scripts.client.zrange(keys.pool_ready(POOL), 0, -1, withscores=True)
    assert remaining == [(b"new-1", 1.0), (b"new-2", 2.0), (b"new-3", 4.0)]
    assert [claim_worker(scripts, f"e{n}")[1] for n in range(3)] == ["new-1", "new-2", "new-3"]


async def test_fifty_claimers_get_twenty_workers_once_each(
    scripts: Scripts, valkey_client: Redis
) -> None:
    for number in range(20):
        announce_worker(scripts, f"w{number}")

    async def claim_one(number: int) -> list[bytes]:
        return await valkey.run_script(  # type: ignore[no-any-return]
            valkey_client,
            CLAIM,
            [keys.pool_ready(POOL), keys.pool_claim(POOL, f"c{number}")],
            [f"c{number}", keys.pool_worker_prefix(POOL), 3600],
        )

    replies = await asyncio.gather(*(claim_one(number) for number in range(50)))
    winners = [reply[1] for reply in replies if reply[0] == b"claimed"]
    assert len(winners) == len(set(winners)) == 20
    assert sum(reply[0] == b"empty" for reply in replies) == 30


class PoolMachine(RuleBasedStateMachine):
    """Workers that come, renew and die; claims that are repeated: never two claims on one
    worker."""

    scripts: Scripts
    workers = st.sampled_from([f"w{n}" for n in range(4)])
    claims = st.sampled_from([f"c{n}" for n in range(5)])

    @initialize()
    def start(self) -> None:
        self.scripts.client.flushall()
        self.alive: set[str] = set()
        self.given: dict[str, str] = {}

    @rule(worker=workers)
    def renew(self, worker: str) -> None:
        # A worker id is never used again after its worker died.
        if worker in self.given.values() and worker not in self.alive:
            return
        self.alive.add(worker)
        state = announce_worker(self.scripts, worker)
        assert state == ("claimed" if worker in self.given.values() else "ready")

    @rule(worker=workers)
    def die(self, worker: str) -> None:
        self.alive.discard(worker)
        self.scripts.client.delete(keys.pool_worker(POOL, worker))

    @rule(claim_id=claims)
    def claim(self, claim_id: str) -> None:
        reply = claim_worker(self.scripts, claim_id)
        if claim_id in self.given:
            expected = "again" if self.given[claim_id] in self.alive else "gone"
            assert reply[:2] == [expected, self.given[claim_id]]
            return
        free = self.alive - set(self.given.values())
        if not free:
            assert reply == ["empty"]
            return
        assert reply[0] == "claimed"
        assert reply[1] in free
        self.given[claim_id] = reply[1]

    @invariant()
    def a_worker_has_one_claim(self) -> None:
        given = list(getattr(self, "given", {}).values())
        assert len(given) == len(set(given))


def test_no_sequence_of_calls_gives_one_worker_to_two_claims(scripts: Scripts) -> None:
    PoolMachine.scripts = scripts
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def line(scripts: Scripts, user: str, patience_ms: int = 30_000) -> int:
    return int(
        scripts.run(
            JOIN_WAIT_QUEUE,
            [keys.pool_wait_queue(POOL), keys.pool_last_asked(POOL)],
            user,
            patience_ms,
        )
    )


def claim_for(scripts: Scripts, user: str, claim_id: str) -> Any:
    return scripts.run(
        CLAIM,
        [
            keys.pool_ready(POOL),
            keys.pool_claim(POOL, claim_id),
            keys.pool_wait_queue(POOL),
            keys.pool_last_asked(POOL),
        ],
        claim_id,
        keys.pool_worker_prefix(POOL),
        3600,
        user,
        30_000,
    )


def test_who_waits_is_served_in_order_however_often_another_asks(scripts: Scripts) -> None:
    assert [line(scripts, "first"), line(scripts, "second")] == [0, 1]
    assert [line(scripts, "second") for _ in range(20)] == [1] * 20
    announce_worker(scripts, "w1")
    assert claim_for(scripts, "second", "s1") == ["empty"]
    assert claim_for(scripts, "stranger", "x1") == ["empty"]
    assert claim_for(scripts, "first", "f1")[:2] == ["claimed", "w1"]
    announce_worker(scripts, "w2")
    assert claim_for(scripts, "stranger", "x2") == ["empty"]
    announce_worker(scripts, "w3")  # one for the user who waits, one for the next
    assert claim_for(scripts, "stranger", "x3")[0] == "claimed"
    assert claim_for(scripts, "second", "s2")[0] == "claimed"
    assert not scripts.client.exists(keys.pool_wait_queue(POOL), keys.pool_last_asked(POOL))


def test_who_does_not_ask_again_has_left_the_line(scripts: Scripts) -> None:
    line(scripts, "gone")
    scripts.client.zadd(keys.pool_last_asked(POOL), {"gone": 1})
    assert line(scripts, "next") == 0
    line(scripts, "gone")
    scripts.client.zadd(keys.pool_last_asked(POOL), {"next": 1})
    announce_worker(scripts, "w")
    assert claim_for(scripts, "gone", "c")[:2] == ["claimed", "w"]


def test_a_repeated_claim_does_not_wait_in_line(scripts: Scripts) -> None:
    announce_worker(scripts, "w")
    claim_for(scripts, "one", "c")
    line(scripts, "other")
    assert claim_for(scripts, "one", "c")[:2] == ["again", "w"]
