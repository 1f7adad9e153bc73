"""Whose calls at a broker are counted together: one user's as one person, and nobody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from activities.claims.budgets import MIN_ADDRESS_SHARE, BudgetPlanner
from activities.claims.claim import ClaimActivities
from activities.claims.handshake import AssignmentSealer
from activities.claims.reload import ReloadActivity
from infra.database import accounts, budgets, users
from infra.database.models import PersonMatch
from infra.database.workers import sessions as worker_sessions
from infra.valkey.worker_users import WorkerUsers
from infra.vault import vault
from infra.vault.key_pairs import OrchestratorKeys
from infra.vault.secret_versions import add_version, drop_before
from tests.support.activities.harness import SECRET, ActivityHarness
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys
from worker_runtime.protocol.broker_record import AddressLimits, Plugin
from worker_runtime.protocol.errors import LoginLimited
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import AccountLogin, Claim, Credentials
from workflows.user_worker.messages import ReloadRequest, WorkerRef

ALICE_ID = "A123456789"


def as_person(person_id: str) -> Credentials:
    return msgspec.structs.replace(SECRET, person_id=person_id)


async def sealed_claim(
    harness: ActivityHarness, user: str, claim_id: str
) -> tuple[Claim, ScriptedPoolWorker]:
    """The message that the user's next worker gets, which does not answer."""
    worker = await harness.worker()
    await harness.run(harness.claiming.claim_worker, harness.claim(user, claim_id, reply_wait=0.05))
    message = await worker.next()
    assert isinstance(message, Claim)
    return message, worker


async def end_worker(harness: ActivityHarness, claim_id: str) -> None:
    async with harness.database.session() as session:
        await worker_sessions.set_connected(session, claim_id=claim_id, at=time.time())
        await worker_sessions.end_session(session, claim_id=claim_id, reason="a test")


async def log_in(harness: ActivityHarness, user: str, epoch: int, *logins: AccountLogin) -> None:
    async with harness.database.session() as session:
        await accounts.record_logins(
            session, user, epoch, 1, logins or [AccountLogin(account_id="main")]
        )


async def matches(harness: ActivityHarness) -> list[PersonMatch]:
    """All pairs, after a look for new ones."""
    assert not await harness.database.write(budgets.find_matches)
    async with harness.database.session() as session:
        return list(await budgets.list_matches(session, resolved=True))


def behind_address(
    harness: ActivityHarness,
    address: str = "192.0.2.1",
    persons: int = 10,
    brokers: Mapping[str, Plugin] | None = None,
) -> ActivityHarness:
    planner = BudgetPlanner(
        harness.database, harness.keys, address, persons, brokers or installed_brokers()
    )
    sealer = AssignmentSealer(harness.ring, harness.keys, harness.secrets, planner)
    other = replace(harness)
    other.claiming = ClaimActivities(harness.client, harness.database, sealer)
    return other


async def test_two_users_who_name_one_person_are_counted_apart(
    harness: ActivityHarness, tmp_path: Path
) -> None:
    """A worker has no key of the names, so it cannot count for another user, whose person it may
    know."""
    alice, mallory = [await harness.user(credentials=as_person(ALICE_ID)) for _ in range(2)]
    claimed = {
        user: (await sealed_claim(harness, user, f"c-{user}"))[0].accounts[0]
        for user in (alice, mallory)
    }
    assert set(claimed[alice].budgets).isdisjoint(claimed[mallory].budgets)
    assert "123456789" not in str(claimed)


async def test_a_users_next_worker_continues_with_the_same_count(harness: ActivityHarness) -> None:
    user = await harness.user(credentials=as_person(ALICE_ID))
    first, _ = await sealed_claim(harness, user, "c1")
    await end_worker(harness, "c1")
    second, _ = await sealed_claim(harness, user, "c2")
    assert first.accounts[0].budgets == second.accounts[0].budgets


async def test_a_name_begins_with_the_version_of_its_key_and_the_older_one_is_asked_first(
    harness: ActivityHarness, tmp_path: Path
) -> None:
    user = await harness.user(credentials=as_person(ALICE_ID))
    before, _ = await sealed_claim(harness, user, "c1")
    await end_worker(harness, "c1")
    add_version(tmp_path / "budget.key", keep=2)
    later, _ = await sealed_claim(replace(harness, keys=OrchestratorKeys(tmp_path)), user, "c2")
    [old, new] = later.accounts[0].budgets
    assert [old] == before.accounts[0].budgets
    assert (old.split("-")[0], new.split("-")[0]) == ("1", "2")


async def test_the_first_worker_after_an_upgrade_also_counts_where_the_worker_of_0_1_0_did(
    harness: ActivityHarness,
) -> None:
    user = await harness.user(credentials=as_person(ALICE_ID))
    former = list(harness.keys.former_budget_names("paper", "person", ALICE_ID))
    await sealed_claim(harness, user, "c1")
    await end_worker(harness, "c1")
    await harness.sql("update worker_sessions set budgets = null")  # as 0.1.0 leaves it
    first, _ = await sealed_claim(harness, user, "c2")
    assert first.accounts[0].budgets[:-1] == former
    await end_worker(harness, "c2")
    second, _ = await sealed_claim(harness, user, "c3")
    assert second.accounts[0].budgets == first.accounts[0].budgets[1:]


async def test_a_worker_reaches_the_budgets_of_its_claim_and_after_a_reload_those_of_the_reload(
    harness: ActivityHarness,
) -> None:
    worker_users = WorkerUsers(harness.client, harness.database, harness.keys)
    harness.claiming.users = worker_users
    user = await harness.user(credentials=as_person(ALICE_ID))
    claim, worker = await sealed_claim(harness, user, "c1")
    worker_id = worker.worker_id
    try:
        [name] = claim.accounts[0].budgets
        assert await may_count(harness, worker_id, name)
        assert not await may_count(harness, worker_id, "1-anothers")

        # When the user names another person
        changed = await vault.encrypt_credentials(
            as_person("B123456789"), harness.ring.public, user_id=user, account_id="main"
        )
        async with harness.database.session() as session:
            await accounts.put_account(
                session,
                **{
                    "user_id": user,
                    "account_id": "main",
                    "broker": "paper",
                    "broker_type": "stock",
                },
                simulation=True,
                encrypted=changed,
            )
        reloading = ReloadActivity(
            harness.client, harness.database, harness.reloading.sealer, worker_users
        )
        request = ReloadRequest(
            user_id=user,
            worker=WorkerRef(
                worker_id=worker_id,
                task_id="",
                epoch=1,
                claim_id="c1",
                pool=POOL,
                public_key=worker.public_key.hex(),
            ),
            reload_id="r1",
            timeout=0.1,
            cause="credentials",
        )
        await harness.run(reloading.reload_credentials, request)

        # Then it reaches the new name, too
        [row] = await harness.sql("select budgets from worker_sessions")
        assert set(row[0]) > {name}
        assert [await may_count(harness, worker_id, budget) for budget in row[0]] == [True] * len(
            row[0]
        )
    finally:
        await worker_users.delete(worker_id)


async def may_count(harness: ActivityHarness, worker_id: str, name: str) -> bool:
    command = ("ACL", "DRYRUN", worker_id, "ZADD", keys.budget(name, "orders"), "1", "call")
    answer: bytes = await harness.client.execute_command(*command)  # type: ignore[no-untyped-call]
    return answer == b"OK"


async def test_an_operator_hears_of_one_person_for_two_users_once_and_nobody_is_charged(
    harness: ActivityHarness,
) -> None:
    alice, mallory = [await harness.user(credentials=as_person(ALICE_ID)) for _ in range(2)]
    for user in (alice, mallory):
        await sealed_claim(harness, user, f"c-{user}")
    await log_in(harness, alice, 1)
    assert await matches(harness) == []  # naming somebody is no confirmation
    await log_in(harness, mallory, 1)
    await log_in(harness, mallory, 1)
    [match] = await matches(harness)
    assert (match.first_user, match.second_user) == (alice, mallory)
    assert (match.shared_budget, match.resolved_at) == (None, None)
    await end_worker(harness, f"c-{alice}")
    claim, _ = await sealed_claim(harness, alice, "later")
    assert len(claim.accounts[0].budgets) == 1


async def test_logins_at_the_same_moment_find_each_other(harness: ActivityHarness) -> None:
    pair = [await harness.user(credentials=as_person(ALICE_ID)) for _ in range(2)]
    for user in pair:
        await sealed_claim(harness, user, f"c-{user}")
    await asyncio.gather(*(log_in(harness, user, 1) for user in pair))
    assert len(await matches(harness)) == 1


async def test_what_was_stored_and_never_sealed_is_not_confirmed_by_an_older_login(
    harness: ActivityHarness,
) -> None:
    alice, mallory = await harness.user(credentials=as_person(ALICE_ID)), await harness.user()
    for user in (alice, mallory):
        await sealed_claim(harness, user, f"c-{user}")
    await log_in(harness, alice, 1)
    await log_in(harness, mallory, 1)
    other = await vault.encrypt_credentials(
        as_person(ALICE_ID), harness.ring.public, user_id=mallory, account_id="main"
    )
    async with harness.database.session() as session:
        await accounts.put_account(
            session,
            **{"user_id": mallory, "account_id": "main", "broker": "paper", "broker_type": "stock"},
            simulation=True,
            encrypted=other,
        )
    await log_in(harness, mallory, 1)
    assert await matches(harness) == []


async def test_linked_users_share_a_budget_until_they_are_kept_apart(
    harness: ActivityHarness, tmp_path: Path
) -> None:
    trio = [await harness.user(credentials=as_person(ALICE_ID)) for _ in range(3)]
    for user in trio:
        await sealed_claim(harness, user, f"c-{user}")
        await log_in(harness, user, 1)
    open_matches = await matches(harness)
    pairs = {(match.first_user, match.second_user): match.id for match in open_matches}
    assert len(pairs) == 3

    async def resolve(number: int, share_budget: bool) -> None:
        async with harness.database.session() as session:
            await budgets.resolve_match(
                session, number, share_budget=share_budget, actor="key:7", reason="a test"
            )

    rounds = iter(range(10))

    async def shared_names() -> list[set[str]]:
        number, names = next(rounds), []
        for user in trio:
            await harness.sql("update worker_sessions set ended_at = now(), connected_at = now()")
            claim, _ = await sealed_claim(harness, user, f"{user}-{number}")
            names.append(set(claim.accounts[0].budgets[1:]))
        return names

    first, second, third = trio
    await resolve(pairs[first, second], True)
    first_names, second_names, third_names = await shared_names()
    assert first_names == second_names != set() == third_names
    await resolve(pairs[second, third], True)
    first_names, second_names, third_names = await shared_names()
    assert first_names == second_names == third_names != set()
    # A link outlives the key under which it was found.
    add_version(tmp_path / "budget.key", keep=2)
    harness = replace(harness, keys=OrchestratorKeys(tmp_path))
    await shared_names()
    drop_before(tmp_path / "budget.key", 2)
    harness = replace(harness, keys=OrchestratorKeys(tmp_path))
    first_names, second_names, third_names = await shared_names()
    assert first_names == second_names == third_names != set()
    await resolve(pairs[first, second], False)
    first_names, second_names, third_names = await shared_names()
    assert second_names == third_names != set() == first_names
    with pytest.raises(budgets.PersonMatchNotFound):
        await resolve(10**6, True)


async def test_removing_a_user_forgets_their_pairs(harness: ActivityHarness) -> None:
    pair = [await harness.user(credentials=as_person(ALICE_ID)) for _ in range(2)]
    for user in pair:
        await sealed_claim(harness, user, f"c-{user}")
        await log_in(harness, user, 1)
        await end_worker(harness, f"c-{user}")
    async with harness.database.session() as session:
        await users.put_disabled(session, pair[0], True, actor="key:7", reason="leaves")
        await users.remove_user(session, pair[0], actor="key:7", reason="leaves")
    assert await matches(harness) == []


async def test_each_user_has_a_share_of_the_address_of_their_own(harness: ActivityHarness) -> None:
    harness = behind_address(harness, persons=2)
    claims = []
    for number in range(3):
        user = await harness.user(credentials=as_person(f"invented-{number}"))
        harness = behind_address(
            harness, persons=2
        )  # another process, which has counted nothing yet
        claims.append((await sealed_claim(harness, user, f"c{number}"))[0].accounts[0])
    names = [name for account in claims for name in account.address_budgets]
    assert len(set(names)) == len(names) == 3
    assert [account.address_share for account in claims] == [1000, 1000, 666]


async def test_inventing_persons_buys_no_more_of_the_address_than_an_equal_share(
    harness: ActivityHarness,
) -> None:
    others = [await harness.user() for _ in range(3)]
    for user in others:
        await sealed_claim(harness, user, f"c-{user}")
    mallory = await harness.user(credentials=as_person("invented-0"))
    for number in range(1, 32):
        account = f"a{number}"
        encrypted = await vault.encrypt_credentials(
            as_person(f"invented-{number}"),
            harness.ring.public,
            user_id=mallory,
            account_id=account,
        )
        async with harness.database.session() as session:
            await accounts.put_account(
                session,
                **{
                    "user_id": mallory,
                    "account_id": account,
                    "broker": "paper",
                    "broker_type": "stock",
                },
                simulation=True,
                encrypted=encrypted,
            )
    claim, _ = await sealed_claim(behind_address(harness, persons=10), mallory, "c-mallory")
    assert len(claim.accounts) == 32
    assert {
        (tuple(account.address_budgets), account.address_share) for account in claim.accounts
    } == {(tuple(claim.accounts[0].address_budgets), 2500)}


async def test_a_share_of_an_address_has_room_for_a_login_and_its_listing(
    harness: ActivityHarness,
) -> None:
    for number in range(8):
        user = await harness.user()
        claim, _ = await sealed_claim(behind_address(harness, persons=1), user, f"c{number}")
    assert claim.accounts[0].address_share == int(1000 * MIN_ADDRESS_SHARE)


def with_limits_of_an_address(**limits: int) -> dict[str, Plugin]:
    """The brokers, if the paper exchange's record had these limits of an address."""
    brokers = dict(installed_brokers())
    record = brokers["paper"].record
    of_all = msgspec.structs.replace(record.limits, address=AddressLimits(**limits))
    changed = msgspec.structs.replace(record, limits=of_all)
    return brokers | {"paper": brokers["paper"]._replace(record=changed)}


@pytest.mark.parametrize(
    ("address", "persons", "share", "shares"),
    [
        # Two users: each may make half of the calls, and no more than a person does.
        ("", 10, 1000, {"orders": 300, "logins": 1000, "connections": 200}),
        ("192.0.2.1", 10, 1000, {"orders": 300, "logins": 1000, "connections": 200}),
        # The record says nothing of queries: for these the setting counts.
        ("192.0.2.1", 1, 500, {"orders": 300, "logins": 1000, "connections": 200}),
    ],
)
async def test_the_record_says_how_much_an_address_may_do_and_the_setting_for_what_it_leaves_out(
    harness: ActivityHarness, address: str, persons: int, share: int, shares: dict[str, int]
) -> None:
    brokers = with_limits_of_an_address(orders_per_10s=150, logins_per_day=9000, connections=1)
    for number in range(2):
        user = await harness.user()
        limited = behind_address(harness, address, persons, brokers)
        claim, _ = await sealed_claim(limited, user, f"c{number}")
    account = claim.accounts[0]
    assert len(account.address_budgets) == 1
    assert (account.address_share, account.address_shares) == (share, shares)
    assert account.address_budgets[0] not in account.budgets


async def test_calls_are_counted_by_person_only_where_nobody_limits_an_address(
    harness: ActivityHarness,
) -> None:
    claim, _ = await sealed_claim(behind_address(harness, ""), await harness.user(), "c0")
    assert (claim.accounts[0].address_budgets, claim.accounts[0].address_shares) == ([], {})


async def test_a_user_whose_logins_are_rejected_stores_no_more_credentials_for_a_while(
    harness: ActivityHarness,
) -> None:
    mallory, alice = await harness.user(), await harness.user()
    for version in range(1, accounts.MAX_FAILED_LOGINS + 1):
        async with harness.database.session() as session:
            await accounts.require_login_tries(session, mallory)
        rejected = AccountLogin(account_id="main", code="LOGIN_REJECTED", rejected=version)
        await log_in(harness, mallory, version, rejected)
        await log_in(harness, mallory, version, rejected)  # the same again is no further login
        await harness.sql(
            f"update credentials set version = version + 1 where user_id = '{mallory}'"  # noqa: S608
        )
    async with harness.database.session() as session:
        with pytest.raises(LoginLimited) as refused:
            await accounts.require_login_tries(session, mallory)
        await accounts.require_login_tries(session, alice)
    assert 0 < (refused.value.retry_after or 0) <= accounts.FAILED_LOGIN_WINDOW_S
    await harness.sql("update failed_logins set at = at - interval '1 hour'")
    async with harness.database.session() as session:
        await accounts.require_login_tries(session, mallory)
