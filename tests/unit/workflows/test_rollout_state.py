"""A rollout takes no claim its worker, ends by itself, and puts a bad version back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from workflows.entity import carried_state
from workflows.rollout.messages import Release, ReleaseSnapshot, RolloutInput, RolloutPhase
from workflows.rollout.state import RolloutState, RolloutStep

OLD, NEW = Release(version="1"), Release(version="2")
GIVEN = RolloutInput(pool="default", release=NEW, batch=3)


@dataclass
class ScriptedPool:
    """Keeps `wanted` and the surge ready, as the pool's workflow does, and has users."""

    wanted: int
    free: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    release: Release = OLD
    surge: int = 0
    #: Versions whose workers never become ready.
    bad: frozenset[str] = frozenset()
    never_ready: int = 0
    #: Free workers at the worst moment, less what was wanted or there before.
    lowest: int = 1_000_000

    def refill(self, max_launches: int = 1_000_000) -> None:
        gap = min(self.wanted + self.surge - len(self.free), max_launches)
        for _ in range(max(gap, 0)):
            if self.release.version in self.bad:
                self.never_ready += 1
                return
            self.free.append(self.release.version)
            self.never_ready = 0

    def snapshot(self, state: RolloutState) -> ReleaseSnapshot:
        before = self.release
        if state.known:
            self.surge = state.surge
        if state.known and self.release != state.target:
            self.release, self.never_ready = state.target, 0
        new = self.free.count(state.target.version)
        return ReleaseSnapshot(
            before=before,
            new=new,
            old=len(self.free) - new,
            users=sum(user != state.target.version for user in self.users),
            wanted=self.wanted,
            never_ready=self.never_ready,
            last_failure="NEVER_READY: it ended",
        )

    def do(self, step: RolloutStep, state: RolloutState) -> None:
        for _ in range(step.retire):
            old = [version for version in self.free if version != state.target.version]
            self.free.remove(old[0])
        self.lowest = min(self.lowest, len(self.free))

    def claim(self) -> None:
        if self.free:
            self.users.append(self.free.pop(0))


def play(pool: ScriptedPool, rounds: int = 400, claims: list[int] | None = None) -> RolloutState:
    """Repeats check, retirement, refill, claims and moves until the rollout ends."""
    state = RolloutState.begun(GIVEN, 0.0)
    due = list(claims or [])
    for _ in range(rounds):
        state, step = state.after_check(pool.snapshot(state), GIVEN)
        pool.do(step, state)
        state = replace(state, retired=state.retired + step.retire)
        for _ in range(due.pop(0) if due else 0):
            pool.claim()
        pool.refill()
        if step.move:  # every user moves: their old worker ends, they get one from the pool
            pool.users = [state.target.version for _ in pool.users]
        if state.ended:
            break
    return state


@given(
    size=st.integers(0, 20),
    users=st.integers(0, 20),
    claims=st.lists(st.integers(0, 3), max_size=60),
)
@settings(max_examples=200)
def test_a_good_version_replaces_all_and_takes_no_claim_its_worker(
    size: int, users: int, claims: list[int]
) -> None:
    pool = ScriptedPool(size, free=["1"] * size, users=["1"] * users)
    state = play(pool, claims=claims)
    assert state.phase == RolloutPhase.DONE
    assert set(pool.free) | set(pool.users) <= {"2"}
    assert state.surge == 0


@given(size=st.integers(1, 20), batch=st.integers(1, 30))
def test_without_claims_the_ready_never_fall_below_what_is_wanted(size: int, batch: int) -> None:
    pool = ScriptedPool(size, free=["1"] * size)
    state, given_ = RolloutState.begun(GIVEN, 0.0), replace(GIVEN, batch=batch)
    for _ in range(200):
        state, step = state.after_check(pool.snapshot(state), given_)
        pool.do(step, state)
        assert len(pool.free) >= size
        pool.refill(max_launches=1)  # launches come one by one
        assert len(pool.free) <= size + batch
    assert state.phase == RolloutPhase.DONE


@given(size=st.integers(1, 20), users=st.integers(0, 20), ready_first=st.integers(0, 5))
def test_a_version_that_never_becomes_ready_is_put_back(
    size: int, users: int, ready_first: int
) -> None:
    pool = ScriptedPool(size, free=["1"] * size, users=["1"] * users)
    state = RolloutState.begun(GIVEN, 0.0)
    for turn in range(200):
        pool.bad = frozenset({"2"} if turn >= ready_first else set())
        state, step = state.after_check(pool.snapshot(state), GIVEN)
        pool.do(step, state)
        assert len(pool.free) >= size
        if step.move:
            pool.users = [state.target.version for _ in pool.users]
        pool.refill()
        if state.ended:
            break
    if state.phase == RolloutPhase.DONE:  # it was done before it went bad
        assert ready_first
        return
    assert state.phase == RolloutPhase.ROLLED_BACK
    assert pool.release == OLD
    assert set(pool.free) | set(pool.users) <= {"1"}
    assert "no worker became ready" in state.reason


def moving(**changes: object) -> RolloutState:
    """Returns a rollout whose free workers are all new, while no user is left to move."""
    state, _ = RolloutState.begun(GIVEN, 0.0).after_check(QUIET, GIVEN)
    return replace(state, phase=RolloutPhase.MOVING, **changes)  # type: ignore[arg-type]


QUIET = ReleaseSnapshot(before=OLD, new=4, old=0, users=0, wanted=4, at=100.0)


def test_a_version_that_fails_three_users_in_a_row_is_put_back_and_nobody_gets_it_any_more() -> (
    None
):
    state = moving()
    state, step = state.after_check(replace(QUIET, users=5, failed=2), GIVEN)
    assert (state.phase, step.move) == (RolloutPhase.MOVING, True)
    assert state.held == "2 users in a row got a worker that did not serve them"
    state, step = state.after_check(replace(QUIET, users=5, failed=3), GIVEN)
    assert (state.phase, state.condemned, step) == (RolloutPhase.ROLLING_BACK, True, RolloutStep())
    assert state.reason == "3 users in a row got a worker that did not serve them"
    # On the way back they say nothing about what was before.
    state, _ = state.after_check(replace(QUIET, new=0, old=4, failed=9), GIVEN)
    assert state.phase == RolloutPhase.ROLLING_BACK


def test_what_an_operator_takes_back_is_not_condemned() -> None:
    assert not moving().rolled_back("not today").condemned


def test_a_rollout_waits_for_a_first_user_whom_it_serves_but_not_for_ever() -> None:
    given_ = replace(GIVEN, proof=60.0)
    waiting, _ = moving().after_check(QUIET, given_)
    assert (waiting.phase, waiting.unproven_since) == (RolloutPhase.MOVING, 100.0)
    assert waiting.held == "no user was served by the new version yet"
    still, _ = waiting.after_check(replace(QUIET, at=159.0), given_)
    assert still.phase == RolloutPhase.MOVING
    assert still.after_check(replace(QUIET, at=160.0), given_)[0].phase == RolloutPhase.DONE
    assert (
        still.after_check(replace(QUIET, at=159.0, served=1), given_)[0].phase == RolloutPhase.DONE
    )
    assert (
        still.after_check(replace(QUIET, at=159.0, failed=3), given_)[0].phase
        == RolloutPhase.ROLLING_BACK
    )


@given(at=st.sampled_from([0.0, 100.0]), size=st.integers(0, 1), proof=st.sampled_from([0.0, 60.0]))
def test_nobody_is_waited_for_where_nobody_is_wanted_or_an_earlier_release_checks(
    at: float, size: int, proof: float
) -> None:
    seen = replace(QUIET, new=size, wanted=size, at=at)
    state, _ = moving().after_check(seen, replace(GIVEN, proof=proof))
    assert (state.phase == RolloutPhase.MOVING) == bool(at and size and proof)


def test_an_abort_goes_back_once_and_changes_nothing_after_the_end() -> None:
    state = RolloutState.begun(GIVEN, 0.0)
    state, _ = state.after_check(ScriptedPool(2, free=["1", "1"]).snapshot(state), GIVEN)
    back = state.rolled_back("an operator said so")
    assert back.target == OLD
    assert back.rolled_back("again") is back
    ended = replace(state, phase=RolloutPhase.DONE)
    assert ended.rolled_back("too late") is ended


def test_a_pool_whose_old_workers_were_all_claimed_waits_for_a_new_one_that_is_ready() -> None:
    state = RolloutState.begun(GIVEN, 0.0)
    seen = ReleaseSnapshot(before=OLD, new=0, old=0, users=2, wanted=2)
    state, _ = state.after_check(seen, GIVEN)
    state, step = state.after_check(seen, GIVEN)
    assert state.phase == RolloutPhase.REPLACING
    assert step == RolloutStep()
    state, step = state.after_check(replace(seen, new=1), GIVEN)
    assert (state.phase, step.move) == (RolloutPhase.MOVING, True)


def test_what_is_carried_into_the_next_run_is_the_same_and_unknown_fields_are_dropped() -> None:
    state, _ = RolloutState.begun(GIVEN, 5.0).after_check(
        ReleaseSnapshot(before=OLD, new=1, old=2, users=2, wanted=2, mode="paused"), GIVEN
    )
    assert carried_state(RolloutState, {**asdict(state), "of_a_later_release": 1}) == state
    assert state.view().held == "the pool is paused: nothing is launched"
