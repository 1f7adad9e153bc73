"""A person's broker connections: never more than there are, and never lost to a worker that
died."""

from __future__ import annotations

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

from tests.support.lua_calls import (
    CONNECTION_KEYS,
    CONNECTION_LEASE_MS,
    MAX_CONNECTIONS,
    take_connection,
)
from tests.support.lua_scripts import Scripts
from worker_runtime.protocol.scripts import RENEW_CONNECTIONS, Script

_LIVE = Script("live", "return redis.call('ZRANGEBYSCORE', KEYS[1], 2, '+inf')", "")


def keep(scripts: Scripts, holder: str, *connections: str) -> Any:
    return scripts.run(
        RENEW_CONNECTIONS, CONNECTION_KEYS[1:], holder, CONNECTION_LEASE_MS, *connections
    )


def end(scripts: Scripts, holder: str, *connections: str) -> Any:
    return scripts.run(RENEW_CONNECTIONS, CONNECTION_KEYS[1:], holder, 0, *connections)


def lapse(scripts: Scripts, connection: str) -> None:
    """What a minute without a renewal does, without waiting for it."""
    scripts.client.zadd(CONNECTION_KEYS[1], {connection: 1})


def test_the_next_worker_of_a_user_takes_over_what_its_predecessor_left(scripts: Scripts) -> None:
    assert take_connection(scripts, "u1/a", "w1")[0] == 1
    assert take_connection(scripts, "u1/b", "w1")[0] == 1
    granted, wait, _ = take_connection(scripts, "u2/a", "w2")
    assert granted == 0
    assert 0 < wait <= CONNECTION_LEASE_MS
    assert take_connection(scripts, "u1/a", "w3")[0] == 1
    # Its late goodbye ends only what is still its own.
    assert end(scripts, "w1", "u1/a", "u1/b") == 1
    assert take_connection(scripts, "u2/a", "w2")[0] == 1


def test_after_a_loss_of_data_new_ones_wait_until_the_old_ones_are_back(scripts: Scripts) -> None:
    known = take_connection(scripts, "u1/a", "w1")[2]
    scripts.client.flushall()
    granted, wait, _ = take_connection(scripts, "u2/a", "w2", known=known, fresh=False)
    assert granted == 0
    assert 9_000 < wait <= 10_000
    assert keep(scripts, "w1", "u1/a", "u1/b") == 2
    assert take_connection(scripts, "u1/a", "w1", fresh=False)[0] == 1


class Connecting(RuleBasedStateMachine):
    """Workers that connect, renew, end, die and follow each other, against a model of who has
    what."""

    scripts: Scripts
    connections = st.sampled_from(["u1/a", "u1/b", "u2/a", "u3/a"])
    holders = st.sampled_from(["w1", "w2"])

    @initialize()
    def start(self) -> None:
        self.scripts.client.flushall()
        self.held: dict[str, str] = {}

    @rule(connection=connections, holder=holders)
    def take(self, connection: str, holder: str) -> None:
        room = connection in self.held or len(self.held) < MAX_CONNECTIONS
        assert take_connection(self.scripts, connection, holder)[0] == int(room)
        if room:
            self.held[connection] = holder

    @rule(connection=connections, holder=holders)
    def keep(self, connection: str, holder: str) -> None:
        if self.held.get(connection) == holder:
            assert keep(self.scripts, holder, connection) == len(self.held)
        elif connection in self.held:
            keep(self.scripts, holder, connection)

    @rule(connection=connections, holder=holders)
    def end(self, connection: str, holder: str) -> None:
        if self.held.get(connection) == holder:
            del self.held[connection]
        assert end(self.scripts, holder, connection) == len(self.held)

    @rule(connection=connections)
    def lapse(self, connection: str) -> None:
        if connection in self.held:
            lapse(self.scripts, connection)
            del self.held[connection]
            take_connection(self.scripts, "swept", "w")  # the next one that asks removes it
            if end(self.scripts, "w", "swept") != len(self.held):
                raise AssertionError("a lease that ended still counts")

    @invariant()
    def there_are_never_more_than_the_limit(self) -> None:
        live: list[str] = self.scripts.run(_LIVE, [CONNECTION_KEYS[1]])
        assert set(live) == set(getattr(self, "held", {}))
        assert len(live) <= MAX_CONNECTIONS


def test_no_sequence_of_workers_has_more_connections_than_there_are(scripts: Scripts) -> None:
    Connecting.scripts = scripts
    run_state_machine_as_test(
        Connecting,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
