"""A pool's size stays within its bounds, and is never smaller for more demand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.worker_pool.messages import PoolCount, WindowNow
from workflows.worker_pool.policy import (
    PoolPolicy,
    PoolPolicyInvalid,
    PoolWindow,
    check_policy,
    days_of,
)
from workflows.worker_pool.state import size_pool

MORNING = PoolWindow(name="morning", target=40, begins="08:00", ends="09:30")


@st.composite
def policies(draw: st.DrawFn) -> PoolPolicy:
    """Draws a valid policy."""
    minimum = draw(st.integers(0, 50))
    maximum = draw(st.none() | st.integers(minimum, 200))
    targets = st.integers(minimum, 200 if maximum is None else maximum)
    windows = [
        replace(MORNING, name=name, target=draw(targets))
        for name in draw(st.lists(st.sampled_from("abc"), unique=True))
    ]
    policy = PoolPolicy(
        target=draw(targets),
        minimum=minimum,
        maximum=maximum,
        buffer=draw(
            st.integers(0, 300).map(str) | st.integers(0, 300).map(lambda part: f"{part}%")
        ),
        demand_minutes=draw(st.sampled_from([0.0, 5.0, 60.0])),
        limit=draw(st.none() | st.integers(minimum, 500)),
        windows=tuple(windows),
    )
    check_policy(policy)
    return policy


situations = st.builds(
    PoolCount,
    ready=st.just(0),
    starting=st.just(0),
    in_use=st.integers(0, 500),
    claims=st.integers(0, 500),
    window=st.builds(WindowNow, name=st.sampled_from(["", "a", "b", "c"]), until=st.just(5.0)),
)


@given(policy=policies(), now=situations)
def test_the_wanted_number_stays_within_its_bounds(policy: PoolPolicy, now: PoolCount) -> None:
    size, _ = size_pool(policy, now)
    room = None if policy.limit is None else max(0, policy.limit - now.in_use)
    assert size >= (policy.minimum if room is None else min(policy.minimum, room))
    if policy.maximum is not None:
        assert size <= policy.maximum
    if room is not None:
        assert size <= room


@given(policy=policies(), now=situations, added=st.integers(1, 100))
def test_more_claims_never_want_fewer_workers(
    policy: PoolPolicy, now: PoolCount, added: int
) -> None:
    more_claims = replace(now, claims=(now.claims or 0) + added)
    assert size_pool(policy, more_claims)[0] >= size_pool(policy, now)[0]


@given(policy=policies(), now=situations, added=st.integers(1, 100))
def test_more_users_never_want_fewer_free_workers_but_for_the_limit(
    policy: PoolPolicy, now: PoolCount, added: int
) -> None:
    unlimited = replace(policy, limit=None)
    busier = replace(now, in_use=now.in_use + added)
    assert size_pool(unlimited, busier)[0] >= size_pool(unlimited, now)[0]


@given(policy=policies(), now=situations, added=st.integers(1, 100))
def test_a_higher_target_never_wants_fewer(policy: PoolPolicy, now: PoolCount, added: int) -> None:
    assert (
        size_pool(replace(policy, target=policy.target + added), now)[0]
        >= size_pool(policy, now)[0]
    )


@given(policy=policies(), now=situations)
def test_the_reasons_end_with_the_number(policy: PoolPolicy, now: PoolCount) -> None:
    size, reasons = size_pool(policy, now)
    assert any(str(size) in reason for reason in reasons)


def test_every_step_is_explained_in_plain_words() -> None:
    policy = PoolPolicy(
        target=4,
        minimum=2,
        maximum=60,
        buffer="20%",
        demand_minutes=5,
        limit=100,
        windows=(MORNING,),
    )
    now = PoolCount(ready=0, starting=0, in_use=45, claims=50, window=WindowNow(name="morning"))
    assert size_pool(policy, now)[1] == (
        "window morning: 40 instead of 4",
        "50 claims within the last 5 min",
        "as many again are kept: 50",
        "buffer (20% of 45 in use): 9 more, 59",
        "limit of 100 in all, 45 in use: 55",
    )
    assert size_pool(policy, now)[0] == 55


def test_a_window_of_an_earlier_policy_counts_no_more() -> None:
    assert (
        size_pool(
            PoolPolicy(target=3), PoolCount(ready=0, starting=0, window=WindowNow(name="morning"))
        )[0]
        == 3
    )


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (PoolPolicy(target=1, minimum=2), "target 1 is below minimum 2"),
        (PoolPolicy(target=9, maximum=8), "target 9 is above maximum 8"),
        (PoolPolicy(target=4, minimum=5, maximum=3), "minimum 5 is above maximum 3"),
        (PoolPolicy(target=2, minimum=2, limit=1), "limit 1 is below minimum 2"),
        (PoolPolicy(minimum=-1), "minimum -1 is not between 0"),
        (PoolPolicy(target=100_001), "target 100001 is above maximum 100000"),
        (PoolPolicy(buffer="a lot"), "neither a number like 3 nor a percentage like 20%"),
        (PoolPolicy(demand_minutes=float("nan")), "demand_minutes nan is not between"),
        (PoolPolicy(shrink_after=-1), "shrink_after -1 is not between"),
        (PoolPolicy(windows=(MORNING, MORNING)), "two windows have the same name"),
        (
            PoolPolicy(maximum=30, windows=(MORNING,)),
            "window 'morning': target 40 is above maximum 30",
        ),
        (
            PoolPolicy(windows=(replace(MORNING, begins="8:00"),)),
            "begins '8:00' is not a time like 08:30",
        ),
        (
            PoolPolicy(windows=(replace(MORNING, days="weekdays"),)),
            "days 'weekdays' are not like mon-fri",
        ),
        (
            PoolPolicy(windows=(replace(MORNING, calendar="half"),)),
            "calendar 'half' is none of any",
        ),
        (PoolPolicy(windows=(replace(MORNING, name=""),)), "its name is not 1 to 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_policy_that_makes_no_sense_is_refused_in_words(policy: PoolPolicy, reason: str) -> None:
    with pytest.raises(PoolPolicyInvalid) as refused:
        check_policy(policy)
    assert reason in refused.value.detail


@pytest.mark.parametrize(
    ("text", "days"),
    [("mon-fri", {0, 1, 2, 3, 4}), ("mon,wed", {0, 2}), ("sat-mon", {5, 6, 0}), ("sun", {6})],
)
def test_days_are_read_as_people_write_them(text: str, days: set[int]) -> None:
    assert days_of(text) == days
