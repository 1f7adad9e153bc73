"""The limits of a broker, as Valkey counts them: never more in any window than the number says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from redis.exceptions import ResponseError

from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import SPEND_BUDGET, Script

OWNER = "person"
SINCE = keys.budget(OWNER, "since")
DAY = 86_400_000
#: Of the broker, after midnight UTC: midnight in Taipei.
DAY_BEGINS = 16 * 3_600_000
#: The script under a clock that the test owns: its only line about time is replaced.
_TIME = "local time = redis.call('TIME')"
assert SPEND_BUDGET.source.count(_TIME) == 1
CLOCKED = Script(
    "clocked", SPEND_BUDGET.source.replace(_TIME, "local time = {ARGV[#ARGV - 1], ARGV[#ARGV]}"), ""
)


@dataclass
class BudgetWindow:
    what: str
    span: int
    limit: int
    reserve: int = 0
    #: Of a call in this window.
    weight: int = 1


def spend(
    scripts: Scripts,
    call: str,
    *windows: BudgetWindow,
    cost: int = 1,
    known: str = "",
    fresh: bool = False,
    at: int | None = None,
    day_begins: int = DAY_BEGINS,
) -> tuple[bool, int, str]:
    numbers = [
        n for each in windows for n in (cost * each.weight, each.span, each.limit, each.reserve)
    ]
    clock = [] if at is None else [at // 1000, at % 1000 * 1000]
    granted, wait, count, _ = scripts.run(
        SPEND_BUDGET if at is None else CLOCKED,
        [SINCE, *(keys.budget(OWNER, each.what) for each in windows)],
        call,
        known,
        int(fresh),
        day_begins,
        *numbers,
        *clock,
    )
    return granted == 1, wait, count


ORDERS = BudgetWindow("orders", 10_000, 3)
QUERIES = BudgetWindow("queries", 5_000, 2)
LOGINS = BudgetWindow("logins", 0, 5, reserve=1)
NOON = 1_763_697_600_000  # 12:00 in Taipei


def test_a_window_is_full_until_its_first_call_leaves_it(scripts: Scripts) -> None:
    for number in range(3):
        assert spend(scripts, f"c{number}", ORDERS, fresh=True, at=NOON + number)[0]
    granted, wait, count = spend(scripts, "more", ORDERS, fresh=True, at=NOON + 1_000)
    assert (granted, wait) == (False, 9_000)
    assert spend(scripts, "more", ORDERS, known=count, at=NOON + 9_999)[:2] == (False, 1)
    assert spend(scripts, "more", ORDERS, known=count, at=NOON + 10_000)[:2] == (True, 0)


def test_a_call_that_is_repeated_is_counted_once(scripts: Scripts) -> None:
    for _ in range(5):
        assert spend(scripts, "same", ORDERS, cost=2, fresh=True, at=NOON)[0]
    assert scripts.client.zcard(keys.budget(OWNER, "orders")) == 2


def test_a_call_without_room_in_one_window_takes_none_in_the_other(scripts: Scripts) -> None:
    assert spend(scripts, "a", QUERIES, ORDERS, cost=2, fresh=True, at=NOON)[0]
    assert not spend(scripts, "b", QUERIES, ORDERS, fresh=True, at=NOON)[0]
    assert scripts.client.zcard(keys.budget(OWNER, "orders")) == 2


def test_a_call_counts_in_each_window_what_it_weighs_there(scripts: Scripts) -> None:
    twice = replace(ORDERS, weight=2)
    assert spend(scripts, "a", QUERIES, twice, fresh=True, at=NOON)[0]
    # 2 of 3 orders are spent.
    assert not spend(scripts, "b", QUERIES, twice, fresh=True, at=NOON)[0]
    assert spend(scripts, "c", QUERIES, ORDERS, fresh=True, at=NOON)[0]
    assert [scripts.client.zcard(keys.budget(OWNER, each.what)) for each in (QUERIES, ORDERS)] == [
        2,
        3,
    ]


def test_a_call_that_costs_more_than_the_limit_is_never_granted(scripts: Scripts) -> None:
    granted, wait, _ = spend(scripts, "huge", ORDERS, cost=4, fresh=True, at=NOON)
    assert (granted, wait) == (False, 10_000)


def test_no_caller_keeps_the_server_busy_by_a_cost_of_millions(scripts: Scripts) -> None:
    names = [SINCE, keys.budget(OWNER, "orders")]
    for cost in (1_001, 10**15, "1e300", "nan", "x"):
        with pytest.raises(ResponseError, match="more calls at once"):
            scripts.run(
                SPEND_BUDGET, names, "call", "", "1", DAY_BEGINS, cost, 1000, 10**16, 10**16
            )
    assert not scripts.client.exists(names[1])


def test_a_lost_count_is_a_spent_one_for_one_window(scripts: Scripts) -> None:
    _, _, count = spend(scripts, "a", ORDERS, fresh=True, at=NOON)
    scripts.client.flushall()
    granted, wait, new = spend(scripts, "b", ORDERS, known=count, at=NOON + 1)
    assert (granted, wait) == (False, 10_000)
    assert new != count
    assert spend(scripts, "b", ORDERS, known=count, at=NOON + 10_000)[:2] == (False, 1)
    assert spend(scripts, "b", ORDERS, known=count, at=NOON + 10_001)[0]


def test_a_new_person_does_not_wait_and_a_later_session_does_not_either(scripts: Scripts) -> None:
    assert spend(scripts, "first", ORDERS, fresh=True, at=NOON)[0]
    assert spend(scripts, "of the next session", ORDERS, at=NOON + 1)[0]


def test_a_new_count_is_whole_until_somebody_comes_who_knows_another(scripts: Scripts) -> None:
    spend(scripts, "a", ORDERS, fresh=True, at=NOON)
    assert spend(scripts, "b", ORDERS, known="the one that was lost", at=NOON + 1)[:2] == (
        False,
        9_999,
    )
    assert not spend(scripts, "c", ORDERS, at=NOON + 2)[0]


@pytest.mark.parametrize(
    ("day_begins", "after_ms"),
    [(DAY_BEGINS, DAY // 2), (0, 20 * 3_600_000), (5 * 3_600_000, 3_600_000)],
)
def test_a_day_begins_when_the_brokers_does(
    scripts: Scripts, day_begins: int, after_ms: int
) -> None:
    def login(name: str, at: int) -> tuple[bool, int, str]:
        return spend(scripts, name, LOGINS, fresh=True, at=at, day_begins=day_begins)

    for number in range(5):
        assert login(f"c{number}", NOON)[0]
    assert login("more", NOON)[:2] == (False, after_ms)
    assert not login("more", NOON + after_ms - 1)[0]
    assert login("more", NOON + after_ms)[0]


def test_the_rest_of_a_day_whose_count_was_lost_has_the_reserve(scripts: Scripts) -> None:
    assert spend(scripts, "a", LOGINS, at=NOON)[0]
    assert not spend(scripts, "b", LOGINS, at=NOON + 1)[0]
    tomorrow = NOON + DAY
    assert all(spend(scripts, f"c{number}", LOGINS, at=tomorrow)[0] for number in range(5))
    assert not spend(scripts, "more", LOGINS, at=tomorrow)[0]


@dataclass
class BudgetCaller:
    """A session: what it was granted under which count."""

    known: dict[str, str] = field(default_factory=dict)


class Spending(RuleBasedStateMachine):
    """Sessions that call, repeat, come and go, on a server that is flushed: what they were granted,
    as the broker sees it, is within the limits in every window."""

    scripts: Scripts
    callers = st.integers(0, 2)

    @initialize()
    def start(self) -> None:
        self.scripts.client.flushall()
        self.now = NOON
        self.made = 0
        #: When each call was granted, by window; the broker never forgets.
        self.granted_at: dict[str, list[int]] = {"orders": [], "queries": []}
        self.sessions = [BudgetCaller() for _ in range(3)]
        #: Only the very first call of a person is one without a history.
        self.virgin = True
        self.last: tuple[int, str, tuple[BudgetWindow, ...], int] | None = None

    @rule(caller=callers, cost=st.integers(1, 2), both=st.booleans())
    def call(self, caller: int, cost: int, both: bool) -> None:
        self.made += 1
        windows = (QUERIES, ORDERS) if both else (ORDERS,)
        self._spend(caller, f"c{self.made}", windows, cost)

    @rule()
    def repeat(self) -> None:
        """After a lost reply."""
        if self.last is not None:
            caller, call, windows, cost = self.last
            name = keys.budget(OWNER, windows[0].what)
            if self.scripts.client.zscore(name, f"{call}:1") is not None:
                known = self.sessions[caller].known.get(windows[0].what, "")
                assert spend(self.scripts, call, *windows, cost=cost, known=known, at=self.now)[0]

    @rule(ms=st.sampled_from([0, 1, 400, 3_000, 4_999, 5_000, 9_999, 10_000]))
    def wait(self, ms: int) -> None:
        self.now += ms
        self.last = None if ms else self.last  # a repeat follows at once

    @rule()
    def flush(self) -> None:
        self.scripts.client.flushall()
        self.now += 1  # a count is named by the moment of its beginning
        self.last = None

    @rule(caller=callers)
    def replace(self, caller: int) -> None:
        self.sessions[caller] = BudgetCaller()

    @invariant()
    def no_window_has_more_than_its_limit(self) -> None:
        for window in (ORDERS, QUERIES):
            times = getattr(self, "granted_at", {}).get(window.what, [])
            for end in times:
                assert sum(end - window.span < at <= end for at in times) <= window.limit

    def _spend(self, caller: int, call: str, windows: tuple[BudgetWindow, ...], cost: int) -> None:
        session = self.sessions[caller]
        counts = {session.known.get(each.what, "") for each in windows}
        known = counts.pop() if len(counts) == 1 else ""
        before: dict[str, Any] = {each.what: self._room(each, cost) for each in windows}
        granted, wait, count = spend(
            self.scripts, call, *windows, cost=cost, known=known, fresh=self.virgin, at=self.now
        )
        assert granted == (wait == 0)
        if granted:
            assert all(before.values())
            self.virgin = False
            self.last = (caller, call, windows, cost)
            for each in windows:
                session.known[each.what] = count
                self.granted_at[each.what] += [self.now] * cost
        elif known == count:  # nothing was lost: it is refused only for want of room
            assert not all(before.values())

    def _room(self, window: BudgetWindow, cost: int) -> bool:
        begin = self.now - window.span
        return sum(at > begin for at in self.granted_at[window.what]) + cost <= window.limit


def test_no_sequence_of_calls_and_flushes_exceeds_a_limit(scripts: Scripts) -> None:
    Spending.scripts = scripts
    run_state_machine_as_test(
        Spending,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
