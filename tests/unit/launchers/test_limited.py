"""The rate of launches, and fairness between pools, by a clock of the test's own."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.launchers.limited import LaunchLimited, LaunchTurns, LimitedLauncher
from infra.worker_task import LaunchSpec
from tests.support.launchers.fake import FakeLauncher
from tests.support.launchers.worker_specs import spec


class LimiterClock:
    """Moves only to wake those who sleep."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await self.settle()
        self.now += seconds

    @staticmethod
    async def settle() -> None:
        """Lets those run who were served by now; no time passes meanwhile."""
        for _ in range(4):
            await asyncio.sleep(0)


class SimulatedRate:
    """Simulates the token bucket of `take_launch.lua`, by a clock of the test's own."""

    def __init__(self, rate: float, burst: int, clock: LimiterClock) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = float(burst), clock()

    async def take(self) -> float:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._at) * self._rate, self._burst)
        self._at = now
        if (missing := 1.0 - self._tokens) > 1e-9:  # less is rounding
            return missing / self._rate
        self._tokens -= 1.0
        return 0.0


def turns(clock: LimiterClock, rate: float = 20.0, burst: int = 100) -> LaunchTurns:
    return LaunchTurns(SimulatedRate(rate, burst, clock), sleep=clock.sleep)


async def taken(
    clock: LimiterClock, bucket: LaunchTurns, groups: list[str]
) -> list[tuple[str, float]]:
    """Returns when each got its turn, in seconds from now; all ask at once, in this order."""
    began, order = clock.now, []

    async def take(group: str) -> None:
        await bucket.wait_turn(group)
        order.append((group, clock.now - began))

    await asyncio.gather(*(take(group) for group in groups))
    return order


async def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    clock = LimiterClock()
    order = await taken(clock, turns(clock), ["pool"] * 500)
    times = [at for _, at in order]
    assert times[:100] == [0.0] * 100
    assert times[-1] == pytest.approx(400 / 20)
    assert all(
        later - earlier == pytest.approx(1 / 20)
        for earlier, later in itertools.pairwise(times[99:])
    )


async def test_a_pool_that_wants_few_is_not_starved_by_one_that_wants_many() -> None:
    clock = LimiterClock()
    bucket = turns(clock, rate=20.0, burst=1)
    order = await taken(clock, bucket, ["big"] * 500 + ["small"] * 2)
    times = [at for group, at in order if group == "small"]
    assert times == pytest.approx([1 / 20, 3 / 20])
    assert [group for group, _ in order].count("big") == 500


async def test_three_pools_share_the_rate_evenly_while_they_all_want() -> None:
    clock = LimiterClock()
    order = await taken(clock, turns(clock, burst=1), ["a"] * 30 + ["b"] * 30 + ["c"] * 30)
    first = [group for group, _ in order[1:46]]
    assert [first.count(pool) for pool in "abc"] == [15, 15, 15]


async def test_who_gives_up_leaves_the_turn_to_the_next() -> None:
    clock = LimiterClock()
    bucket = turns(clock, rate=1.0, burst=1)
    await bucket.wait_turn("a")
    givers = [asyncio.ensure_future(bucket.wait_turn("a")) for _ in range(10)]
    last = asyncio.ensure_future(bucket.wait_turn("b"))
    for giver in givers:
        giver.cancel()
    began = clock.now
    await last
    assert clock.now - began == pytest.approx(1.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3)), min_size=1, max_size=60),
    st.integers(1, 10),
    st.integers(1, 20),
)
def test_never_more_than_burst_and_rate_in_any_span(
    arrivals: list[tuple[str, float]], burst: int, rate: int
) -> None:
    async def run() -> list[float]:
        clock = LimiterClock()
        bucket = turns(clock, float(rate), burst)
        granted: list[float] = []
        waiting = []

        async def take(group: str) -> None:
            await bucket.wait_turn(group)
            granted.append(clock.now)

        for group, pause in arrivals:
            waiting.append(asyncio.ensure_future(take(group)))
            await clock.settle()
            clock.now += pause
        await asyncio.gather(*waiting)
        return granted

    granted = asyncio.run(run())
    assert len(granted) == len(arrivals)
    for first in range(len(granted)):
        for last in range(first, len(granted)):
            assert last - first + 1 <= burst + (granted[last] - granted[first]) * rate + 1e-6


async def test_a_launch_waits_for_its_turn_and_gives_up_without_launching() -> None:
    fake, rate = FakeLauncher(), LaunchTurns(SimulatedRate(0.001, 1, LimiterClock()))
    task = await LimitedLauncher(fake, rate).launch(spec("w-1"), "token-1")
    limited = LimitedLauncher(fake, rate, patience=0.05)
    with pytest.raises(LaunchLimited) as raised:
        await limited.launch(spec("w-2"), "token-2")
    assert raised.value.retryable
    assert await limited.list() == [task]
    await limited.stop(task.task_id, "test")
    assert (await anext(limited.exits())).worker_id == "w-1"
    await limited.close()


async def test_a_user_who_waits_takes_turns_with_the_refill_of_the_pool() -> None:
    clock = LimiterClock()
    fake = FakeLauncher()
    limited = LimitedLauncher(fake, turns(clock, burst=1))
    config = msgspec.structs.replace(spec("w-user").config, reserved_claim="claim-1")
    launching = [limited.launch(spec(f"w-{number}"), f"token-{number}") for number in range(50)]
    await asyncio.gather(*launching, limited.launch(LaunchSpec(config=config), "token-user"))
    assert [launched.config.worker_id for launched in fake.launched].index("w-user") == 1
    await limited.close()
