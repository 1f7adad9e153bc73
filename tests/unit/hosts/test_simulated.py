"""The margin at work, on hosts that take their time."""

from __future__ import annotations

import pytest

from infra.hosts.scaling import HostsUnreachable, plan_hosts, warm_hosts
from tests.support.simulated_hosts import COLD, HostClock, SimulatedHosts


async def test_a_morning_finds_room_for_every_worker_with_the_margin_and_not_without_it() -> None:
    async def unplaced(warm: int) -> int:
        """Returns how many of 2,000 users in half an hour find no room; hosts are scaled every 10
        s."""
        clock = HostClock()
        hosts = SimulatedHosts(clock=clock, seed=1)
        await hosts.scale(plan_hosts(0, warm=warm))
        clock.now += COLD[1]  # the first ones are warm when it begins
        placed = late = 0
        for second in range(1800):
            clock.now += 1
            for _ in range(round(2000 * (second + 1) / 1800) - placed):
                late += hosts.place() is None
                placed += 1
            if second % 10 == 0:
                await hosts.scale(plan_hosts(placed, await hosts.hosts(), warm=warm))
        return late

    rate = 2000 / 1800
    # The ten seconds between two checks are part of the time until a cold host is there.
    assert await unplaced(warm_hosts(rate, least=1, cold_start=COLD[1] + 10)) == 0
    assert await unplaced(0) > 50


async def test_a_draining_host_is_not_refilled_and_goes_with_its_last_worker() -> None:
    clock = HostClock()
    hosts = SimulatedHosts(clock=clock, seed=1)
    await hosts.scale(plan_hosts(30, warm=0))
    assert hosts.place() is None  # cold
    clock.now += COLD[1]
    old = hosts.place()
    assert old == "host-1"
    hosts.drain(old)
    assert hosts.place() is None
    made = plan_hosts(1, await hosts.hosts(), warm=0)
    assert (made.wanted, made.ready, made.draining) == (1, 0, 1)
    assert await hosts.scale(made)
    clock.now += COLD[1]
    assert hosts.place() == "host-2"
    hosts.leave(old)
    assert [host.host_id for host in await hosts.hosts()] == ["host-2"]


async def test_no_host_with_a_worker_is_ended_by_a_smaller_plan() -> None:
    clock = HostClock()
    hosts = SimulatedHosts(clock=clock, seed=1)
    await hosts.scale(plan_hosts(90, warm=0))
    clock.now += COLD[1]
    assert hosts.place() == "host-1"
    await hosts.scale(plan_hosts(0, warm=0))
    assert [host.host_id for host in await hosts.hosts()] == ["host-1"]


async def test_an_unreachable_platform_raises() -> None:
    hosts = SimulatedHosts(seed=1)
    hosts.unreachable = True
    with pytest.raises(HostsUnreachable):
        await hosts.hosts()
