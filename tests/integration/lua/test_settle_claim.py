"""Ready, claim and settle together, with workers that sleep past the end of their entry and come
back."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support.lua_calls import POOL, announce_worker, claim_worker, settle_claim
from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys


def lapse(scripts: Scripts, worker: str) -> None:
    """What 30 s without a renewal do, without waiting for them."""
    scripts.client.delete(keys.pool_worker(POOL, worker))


def test_a_worker_that_slept_and_was_claimed_by_another_is_gone_for_its_first_claim(
    scripts: Scripts,
) -> None:
    announce_worker(scripts, "w")
    assert claim_worker(scripts, "first")[:2] == ["claimed", "w"]
    lapse(scripts, "w")
    assert announce_worker(scripts, "w") == "ready"
    assert claim_worker(scripts, "first") == ["gone", "w"]
    assert claim_worker(scripts, "second")[:2] == ["claimed", "w"]
    assert claim_worker(scripts, "first") == ["gone", "w"]
    assert settle_claim(scripts, "w", "first", "confirmed") == "unknown"
    assert settle_claim(scripts, "w", "second", "confirmed") == "confirmed"


def test_a_reserved_worker_that_slept_comes_back_to_its_own_claim(scripts: Scripts) -> None:
    announce_worker(scripts, "w", reserved="c")
    lapse(scripts, "w")
    assert claim_worker(scripts, "c") == ["gone", "w"]
    assert announce_worker(scripts, "w", reserved="c") == "claimed"
    assert claim_worker(scripts, "c")[:2] == ["again", "w"]
    assert claim_worker(scripts, "other") == ["empty"]


class Settling(RuleBasedStateMachine):
    """A model of the entries: each claim gets a true answer, and the first settlement holds."""

    scripts: Scripts
    workers = st.sampled_from([f"w{n}" for n in range(3)])
    claims = st.sampled_from([f"c{n}" for n in range(5)])

    @initialize()
    def start(self) -> None:
        self.scripts.client.flushall()
        self.entries: dict[str, tuple[str, str]] = {}
        self.given: dict[str, str] = {}

    @rule(worker=workers)
    def renew(self, worker: str) -> None:
        state, _ = self.entries.setdefault(worker, ("ready", ""))
        assert announce_worker(self.scripts, worker) == state

    @rule(worker=workers)
    def lapse(self, worker: str) -> None:
        self.entries.pop(worker, None)
        lapse(self.scripts, worker)

    @rule(claim_id=claims)
    def claim(self, claim_id: str) -> None:
        reply = claim_worker(self.scripts, claim_id)
        if claim_id in self.given:
            worker = self.given[claim_id]
            mine = self.entries.get(worker, ("", ""))[1] == claim_id
            assert reply[:2] == ["again" if mine else "gone", worker]
            return
        free = [worker for worker, (state, _) in self.entries.items() if state == "ready"]
        if not free:
            assert reply == ["empty"]
            return
        assert reply[0] == "claimed"
        assert reply[1] in free
        self.given[claim_id] = reply[1]
        self.entries[reply[1]] = ("claimed", claim_id)

    @rule(worker=workers, claim_id=claims, outcome=st.sampled_from(["confirmed", "released"]))
    def settle(self, worker: str, claim_id: str, outcome: str) -> None:
        state, owner = self.entries.get(worker, ("", ""))
        expected = "unknown"
        if owner == claim_id:
            expected = outcome if state == "claimed" else state
            self.entries[worker] = (expected, claim_id)
        assert settle_claim(self.scripts, worker, claim_id, outcome) == expected

    @invariant()
    def no_worker_holds_two_claims(self) -> None:
        for claim_id, worker in getattr(self, "given", {}).items():
            holder = self.scripts.client.hget(keys.pool_worker(POOL, worker), "claim")
            mine = self.entries.get(worker, ("", ""))[1] == claim_id
            assert (holder == claim_id.encode()) == mine


def test_no_sequence_of_sleeps_and_settlements_shares_a_worker(scripts: Scripts) -> None:
    Settling.scripts = scripts
    run_state_machine_as_test(
        Settling,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
