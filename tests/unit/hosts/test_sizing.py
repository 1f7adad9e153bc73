"""Workers have enough hosts, and at most the margin more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.hosts.scaling import WORKERS_PER_HOST, Host, plan_hosts, warm_hosts
from infra.worker_task import CPU_UNITS, MEMORY_SOFT_BYTES


def test_a_host_takes_32_workers_by_cpu_and_42_by_memory_and_gets_30() -> None:
    assert (2048 // CPU_UNITS, 16 * 1024**3 // MEMORY_SOFT_BYTES, WORKERS_PER_HOST) == (32, 42, 30)


@given(
    workers=st.integers(0, 20_000),
    warm=st.integers(0, 20),
    hosts=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 30)), max_size=20),
)
def test_wanted_hosts_have_room_for_all_workers_and_the_margin_and_no_more(
    workers: int, warm: int, hosts: list[tuple[bool, bool, int]]
) -> None:
    seen = [
        Host(host_id=str(number), ready=ready, draining=draining, workers=count)
        for number, (ready, draining, count) in enumerate(hosts)
    ]
    made = plan_hosts(workers, seen, warm=warm)
    assert made.needed * WORKERS_PER_HOST >= workers
    assert (made.needed - 1) * WORKERS_PER_HOST < workers or not made.needed
    assert made.wanted == made.needed + warm
    # Draining hosts are no answer to what is wanted: others are started for their workers.
    assert made.ready == sum(host.ready and not host.draining for host in seen)
    assert made.draining == sum(host.draining for host in seen)


@given(workers=st.integers(1, 20_000), warm=st.integers(0, 50))
def test_the_percentage_given_to_a_platform_keeps_at_least_the_margin(
    workers: int, warm: int
) -> None:
    made = plan_hosts(workers, warm=warm)
    assert 1 <= made.target_capacity <= 100
    kept = made.needed * 100 / made.target_capacity
    assert kept >= min(made.needed + warm, 100 * made.needed) - 1e-9


def test_the_reason_says_how_many_hosts_are_for_what() -> None:
    assert plan_hosts(300, warm=2).reason == "10 for 300 workers, 30 a host, and 2 warm"


@pytest.mark.parametrize(("rate", "hosts"), [(0.0, 1), (0.4, 1), (1.2, 3), (20.0, 42)])
def test_the_margin_lasts_until_a_cold_host_is_there(rate: float, hosts: int) -> None:
    assert warm_hosts(rate, least=1) == hosts
    assert hosts * WORKERS_PER_HOST >= rate * 63
