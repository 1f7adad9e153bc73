"""The rate of launches that all orchestrators share, as Valkey counts it."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from infra.launchers.limited import VALKEY_RETRY_INTERVAL_S, LaunchTurns, SharedRate
from infra.valkey import client as valkey
from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import TAKE_LAUNCH, Script

#: The script under a clock that the test owns: its only line about time is replaced.
_TIME = "local time = redis.call('TIME')"
assert TAKE_LAUNCH.source.count(_TIME) == 1
CLOCKED = Script(
    "clocked", TAKE_LAUNCH.source.replace(_TIME, "local time = {ARGV[3], ARGV[4]}"), ""
)
US = 1_000_000
BEGAN = 1_800_000_000 * US


def take(scripts: Scripts, at: int, every: int = US // 20, burst: int = 100) -> int:
    """Microseconds to wait; 0: a launch may begin. `at` is Valkey's clock in microseconds."""
    wait = int(scripts.run(CLOCKED, [keys.LAUNCHES], every, burst, at // US, at % US))
    scripts.client.persist(keys.LAUNCHES)  # it would expire by the real clock
    return wait


def test_a_burst_goes_at_once_and_then_one_at_a_time(scripts: Scripts) -> None:
    assert [take(scripts, BEGAN) for _ in range(100)] == [0] * 100
    assert take(scripts, BEGAN) == US // 20
    assert take(scripts, BEGAN + US // 20 - 1) == 1
    assert take(scripts, BEGAN + US // 20) == 0
    assert take(scripts, BEGAN + US // 20) == US // 20


def test_a_rest_allows_a_burst_and_no_more(scripts: Scripts) -> None:
    assert take(scripts, BEGAN, burst=3) == 0
    later = BEGAN + 3600 * US
    assert [take(scripts, later, burst=3) for _ in range(4)] == [0, 0, 0, US // 20]


def test_a_clock_that_is_set_back_holds_no_launch_up(scripts: Scripts) -> None:
    for _ in range(100):
        take(scripts, BEGAN)
    assert take(scripts, BEGAN - 3600 * US) == 0


def test_it_leaves_nothing_behind_once_the_bucket_is_full_again(scripts: Scripts) -> None:
    assert scripts.run(TAKE_LAUNCH, [keys.LAUNCHES], 60 * US, 1) == 0
    assert 0 < scripts.client.pttl(keys.LAUNCHES) <= 60_001


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(0, 3 * US), min_size=1, max_size=50),
    st.integers(1, 8),
    st.integers(US // 10, US),
)
def test_never_more_than_burst_and_rate_in_any_span(
    scripts: Scripts, pauses: list[int], burst: int, every: int
) -> None:
    scripts.client.delete(keys.LAUNCHES)
    now, granted = BEGAN, []
    for pause in pauses:
        now += pause
        if wait := take(scripts, now, every, burst):
            now += wait
            assert take(scripts, now, every, burst) == 0
        granted.append(now)
    assert all(earlier <= later for earlier, later in pairwise(granted))
    for first, began in enumerate(granted):
        for last in range(first, len(granted)):
            assert last - first + 1 <= burst + (granted[last] - began) / every + 1e-6


async def test_orchestrators_at_one_valkey_share_the_rate(
    scripts: Scripts, valkey_client: Redis
) -> None:
    rate, burst, each = 50.0, 5, 15
    fleet = [LaunchTurns(SharedRate(valkey_client, rate, burst)) for _ in range(3)]
    began = time.monotonic()
    await asyncio.gather(*(turns.wait_turn("pool") for turns in fleet for _ in range(each)))
    seconds = time.monotonic() - began
    assert 3 * each <= burst + seconds * rate + 1
    for turns in fleet:
        await turns.close()


async def test_nothing_is_launched_while_valkey_is_away() -> None:
    nobody = valkey.connect_valkey("redis://127.0.0.1:1")
    rate = SharedRate(nobody, 1000.0, 100)
    assert [await rate.take() for _ in range(3)] == [VALKEY_RETRY_INTERVAL_S] * 3
    await nobody.aclose()
