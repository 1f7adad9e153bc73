"""A trading day of 300 users, from eight o'clock to the evening session, by a clock that jumps.

Real are Temporal's test server, Valkey, PostgreSQL, the API, the workflows and all activities; the
workers are simulated, with the protocol of real ones and without a broker.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import date, datetime, time, timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis
from temporalio.testing import WorkflowEnvironment

from infra.local.servers import ValkeyServer
from infra.market import calendar
from infra.market.calendar import HOME_ZONE
from tests.support.systems.moved_clock import MovedSystem, moved_system, settings_of
from workflows.morning.messages import MorningInput
from workflows.user_worker.messages import WorkerState

#: Users who trade shares, index futures by day, both, and futures in the evening.
STOCK, FUTURES, BOTH, EVENING = 100, 80, 60, 60
#: Logins a second that the morning may start, and a person's logins a day at the broker.
RATE, LOGINS = 5.0, 1000
IDLE = 1800.0
DAYS = calendar.load_calendar()


def next_trading_day() -> date:
    """One that begins after the present moment, with the trading day before it a weekday of the
    table."""
    day = datetime.now(HOME_ZONE).date() + timedelta(days=1)
    while not (DAYS.bells(day) and DAYS.bells(day, evening=True)):
        day += timedelta(days=1)
    return day


@pytest.fixture
async def system(
    skipping: WorkflowEnvironment,
    valkey_server: ValkeyServer,
    valkey_client: Redis,
    migrated_database: str,
    tmp_path: Path,
    short_directory: Path,
) -> AsyncIterator[MovedSystem]:
    address = skipping.client.service_client.config.target_host
    settings = settings_of(
        tmp_path, short_directory / "node.sock", valkey_server.url, migrated_database, address
    )
    async with moved_system(skipping, settings) as made:
        yield made


def most_within(times: list[float], seconds: float) -> int:
    """The largest number of these moments within any span of this many seconds."""
    times = sorted(times)
    return max(sum(start <= at < start + seconds for at in times) for start in times)


@pytest.mark.drill
@pytest.mark.timeout(400)
async def test_on_a_day_of_300_users_nobody_waits_at_their_bell(system: MovedSystem) -> None:
    day = next_trading_day()
    before = DAYS.trading_day_before(day)
    groups = {
        "stock": [f"stock{n:03}" for n in range(STOCK)],
        "futures": [f"futures{n:03}" for n in range(FUTURES)],
        "both": [f"both{n:03}" for n in range(BOTH)],
        "evening": [f"evening{n:03}" for n in range(EVENING)],
    }
    markets = {
        "stock": ["stock"],
        "futures": ["futures"],
        "both": ["stock", "futures"],
        "evening": ["futures"],
    }
    for name, members in groups.items():
        clock = time(21) if name == "evening" else time(10)
        await asyncio.gather(
            *(
                system.trader(member, *markets[name], before=before, clock=clock)
                for member in members
            )
        )
    await system.trader("long-ago", "stock", before=before - timedelta(days=60))

    def at(clock: str) -> datetime:
        return datetime.combine(day, time.fromisoformat(clock), HOME_ZONE)

    await system.until(at("08:00"))
    await system.morning(MorningInput(day=day.isoformat(), rate=RATE), "morning-by-the-clock")
    await system.until(at("08:45"))
    futures = await system.first_orders(groups["futures"] + groups["both"])
    await system.until(at("09:00"))
    stock = await system.first_orders(groups["stock"] + groups["both"])
    assert futures == stock == {"201 rejected"}, "each was answered by a worker"
    await system.until(at("14:30"))
    active, idle = (
        await system.transitions(WorkerState.ACTIVE),
        await system.transitions(WorkerState.IDLE_TIMEOUT),
    )
    by_day = {trader for name in ("stock", "futures", "both") for trader in groups[name]}
    assert set(active) == set(idle) == by_day
    for name, bell in (("futures", "08:45"), ("both", "08:45"), ("stock", "09:00")):
        for trader in groups[name]:
            assert at(bell).timestamp() - 1201 < active[trader][0] < at(bell).timestamp(), trader
            assert at("09:00").timestamp() + IDLE <= idle[trader][0], trader

    await system.morning(
        MorningInput(day=day.isoformat(), evening=True, rate=RATE), "evening-by-the-clock"
    )
    await system.until(at("15:00"))
    assert await system.first_orders(groups["evening"]) == {"201 rejected"}
    await system.until(at("16:30"))
    active, idle = (
        await system.transitions(WorkerState.ACTIVE),
        await system.transitions(WorkerState.IDLE_TIMEOUT),
    )
    assert set(active) == set(idle) == by_day | set(groups["evening"])
    for trader in groups["evening"]:
        assert at("14:40").timestamp() - 1 < active[trader][0] < at("15:00").timestamp(), trader
        assert at("15:00").timestamp() + IDLE <= idle[trader][0], trader
    logins = [at for times in active.values() for at in times]
    assert max(map(len, active.values())) == 1, "one login a person, of a thousand a day"
    assert most_within(logins, 1.0) <= RATE + 1
