"""Attacks with what is counted at the brokers: nobody is held up by what somebody else claims to
be."""

from __future__ import annotations

import time

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from tests.support.systems.attacked import VALKEY_USERS, AttackedSystem, StolenSecrets
from tests.support.systems.local import Trader
from worker_runtime.protocol import keys
from worker_runtime.protocol.bounds import MAX_ACCOUNTS

#: Seconds for a start and an order, which take 0.2 s; the shortest window of a limit is longer.
UNDELAYED_S = 5.0
#: More than any limit.
MANY = 2000

pytestmark = pytest.mark.skipif(not VALKEY_USERS, reason="workers have the server's password here")


def claim_to_be(system: AttackedSystem, attacker: Trader, person_ids: list[str]) -> None:
    """Stores one account of the attacker for each person, with keys that the broker refuses."""
    for number, person_id in enumerate(person_ids):
        stored = system.call(
            "PUT",
            f"/v1/users/{attacker.user_id}/accounts/invented-{number}/credentials",
            attacker.api_key,
            json={
                "broker": "paper",
                "api_key": "wrong",
                "secret_key": "wrong",
                "person_id": person_id,
            },
        )
        assert stored.is_success, stored.text


def spend_everything(stolen: StolenSecrets) -> None:
    """Fills every count that the attacker's worker can reach, and takes every connection."""
    assert stolen.budgets
    now = time.time_ns() // 1_000_000
    with Redis.from_url(stolen.config.valkey_url) as client:
        for name in stolen.budgets:
            for kind in ("orders", "queries", "logins", "changes"):
                client.zadd(
                    keys.budget(name, kind), {f"forged-{number}": now for number in range(MANY)}
                )
            leases = {f"forged-{number}": now + 10**9 for number in range(100)}
            client.zadd(keys.budget(name, "connections"), leases)


def start_and_order(system: AttackedSystem, victim: Trader) -> float:
    """Returns the seconds that the victim's login and first order took."""
    began = time.monotonic()
    system.start_until_active(victim)
    placed = system.order(victim)
    assert placed.json()["state"] == "filled", placed.text
    return time.monotonic() - began


@pytest.mark.parametrize("knows_the_victim", [False, True])
def test_32_accounts_of_invented_persons_delay_no_login_and_no_order_of_others(
    system: AttackedSystem, knows_the_victim: bool
) -> None:
    # Given a user whose id at the broker may be known, and one who claims to be 31 persons
    victim, attacker = system.trader(), system.trader()
    persons = [f"invented-{number}" for number in range(MAX_ACCOUNTS - 1)]
    claim_to_be(system, attacker, [victim.user_id] * len(persons) if knows_the_victim else persons)
    # When that one spends all that any of them may do
    _, stolen = system.take_over(attacker)
    spend_everything(stolen)
    # Then the victim notices nothing
    assert start_and_order(system, victim) < UNDELAYED_S
    system.call("DELETE", f"/v1/users/{attacker.user_id}", system.stack.admin_key)


def test_a_worker_reaches_no_count_of_another_user_of_the_same_person_and_address(
    system: AttackedSystem,
) -> None:
    victim, attacker = system.trader(), system.trader()
    claim_to_be(system, attacker, [victim.user_id])
    system.start_until_active(victim)
    _, stolen = system.take_over(attacker)
    with system.valkey() as client, Redis.from_url(stolen.config.valkey_url) as own:
        counts = {name.decode() for name in client.scan_iter("broker:budget:*", count=1000)}
        others = {
            name for name in counts if not any(f"{{{mine}}}" in name for mine in stolen.budgets)
        }
        assert others
        for name in others:
            with pytest.raises(NoPermissionError):
                own.zadd(name, {"forged": 1})
