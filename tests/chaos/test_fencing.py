"""Invariant *one-owner* with real processes: whatever happens to a worker, its successor is alone.

The judge is the exchange's ledger. More rounds than the few of the suite (a dozen minutes on 2
cores; the option lets a test run for longer than 5 minutes):

    BERTH_FENCING_ROUNDS=300 make test ARGS="tests/chaos/test_fencing.py -o faulthandler_timeout=0"
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.chaos.faults import by_turns
from tests.support.chaos.rounds import FencingRound, run_round
from tests.support.chaos.system import ChaosSystem
from tests.support.systems.local import RunningSystem, Trader, until

ROUNDS = int(os.environ.get("BERTH_FENCING_ROUNDS", "11"))
SEED = int(os.environ.get("BERTH_FENCING_SEED", "1"))
#: Users at the same time.
USERS = int(os.environ.get("BERTH_FENCING_USERS", "11"))


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_an_old_worker_submits_nothing_once_its_successor_has_logged_in(
    chaos_system: ChaosSystem,
) -> None:
    faults = by_turns(SEED, ROUNDS)
    with ThreadPoolExecutor(max_workers=USERS) as threads:
        under_way = [
            threads.submit(run_round, chaos_system, fault, SEED + i)
            for i, fault in enumerate(faults)
        ]
    failures = [
        f"{fault.name}: {error!r}"
        for fault, future in zip(faults, under_way, strict=True)
        if (error := future.exception())
    ]
    rounds = [future.result() for future in under_way if not future.exception()]
    failures += [
        f"{fencing_round.fault}: {fencing_round.user_id}: {violation}"
        for fencing_round in rounds
        for violation in fencing_round.violations
    ]
    # Seen with --log-cli-level=INFO.
    logging.getLogger(__name__).info("fencing\n%s", report(rounds))
    assert not failures, "\n".join([*failures, report(rounds)])
    assert len(rounds) == ROUNDS
    assert all(fencing_round.orders >= 2 for fencing_round in rounds), report(rounds)
    # no-healthy-kill: every bystander has the worker it had before. (Where the machine stands still
    # for as long as so short a lease lasts, a worker closes its session by itself, and opens it
    # again.)
    system = chaos_system.system
    for bystander in chaos_system.bystanders:
        until(partial(one_session, system, bystander), "single session")
        sessions = system.sessions(bystander)
        assert len({session.client for session in sessions}) == 1, sessions


def one_session(system: RunningSystem, trader: Trader) -> bool:
    return len(system.open_sessions(trader)) == 1


def report(rounds: list[FencingRound]) -> str:
    """A line a fault: how often, orders, and the recovery times in seconds."""
    by_fault: dict[str, list[FencingRound]] = defaultdict(list)
    for fencing_round in rounds:
        by_fault[fencing_round.fault].append(fencing_round)
    lines = []
    for name, rounds_of_fault in sorted(by_fault.items()):
        times = sorted(fencing_round.recovery for fencing_round in rounds_of_fault)
        orders = sum(fencing_round.orders for fencing_round in rounds_of_fault)
        lines.append(
            f"{name}: n={len(rounds_of_fault)} orders={orders} p50={times[len(times) // 2]:.1f} s "
            f"max={times[-1]:.1f} s"
        )
    return "\n".join(lines)
