"""Users are warned of certificates 30, 7 and 1 days ahead, and when they have expired: once
each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from redis.asyncio import Redis
from sqlalchemy import select

from activities.maintenance.certificates import EVENT, send_due
from infra.database import accounts, certificates, users
from infra.database.engine import Database
from infra.database.models import AuditEntry, BrokerAccount, StatementAddress
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.vault import vault
from infra.vault.key_pairs import KeyWrapper
from tests.support.activities.harness import SECRET, ActivityHarness
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job, read_signed_job
from worker_runtime.protocol.messages import AccountLogin

HOOK = "https://ann.example.com/hook"


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    made = Database(migrated_database)
    yield made
    await made.close()


@pytest.fixture
def jobs(database: Database, valkey_client: Redis) -> KeptJobs:
    return KeptJobs(database, JobClient(valkey_client, SECRETS))


async def put(
    database: Database,
    wrapper: KeyWrapper,
    user: str,
    days: float | None,
    *,
    simulation: bool = False,
) -> int:
    """Stores an account whose certificate expires in this many days; returns the version."""
    encrypted = await vault.encrypt_credentials(SECRET, wrapper, user_id=user, account_id="main")
    async with database.session() as session:
        version = await accounts.put_account(
            session,
            user_id=user,
            account_id="main",
            broker="shioaji",
            broker_type="stock",
            simulation=simulation,
            encrypted=encrypted,
        )
        if days is not None:
            ends = datetime.now(UTC) + timedelta(days=days)
            await certificates.set_expiry(session, user, "main", ends)
    return version


async def make_user(database: Database, user: str, **addresses: str) -> None:
    async with database.session() as session:
        await users.create_user(session, user)
        await users.put_addresses(session, user, StatementAddress(**addresses), actor="key:1")


async def approach(database: Database, user: str, days: float) -> None:
    """As time would: the warnings that were given stay given."""
    async with database.session() as session:
        account = await session.get(BrokerAccount, (user, "main"))
        assert account is not None
        account.certificate_expires_at = datetime.now(UTC) + timedelta(days=days)


async def job(client: Redis, job_id: str) -> Job:
    body = await client.hget(job_keys.job(job_keys.FLEET_TAG, job_id), "body")
    assert isinstance(body, bytes), f"there is no job {job_id}"
    return read_signed_job(body, job_id, SECRETS.job_keys(job_keys.FLEET_TAG))[0]


async def warned(database: Database, user: str) -> list[int]:
    """The warnings in the user's audit trail, in days ahead."""
    async with database.session() as session:
        statement = select(AuditEntry).filter_by(
            action="certificate.expires", subject=f"account:{user}/main"
        )
        return [
            row.data["days"] for row in await session.scalars(statement.order_by(AuditEntry.id))
        ]


async def test_each_warning_is_given_once_by_mail_and_webhook(
    harness: ActivityHarness, database: Database, jobs: KeptJobs, valkey_client: Redis
) -> None:
    await make_user(database, "ann", email="ann@example.com", webhook_url=HOOK)
    version = await put(database, harness.ring.public, "ann", 31)
    assert await send_due(database, jobs) == 0
    for days, days_before in (
        (29, 30),
        (28, None),
        (6.5, 7),
        (6, None),
        (0.9, 1),
        (-0.1, 0),
        (-30, None),
    ):
        await approach(database, "ann", days)
        assert await send_due(database, jobs) == (days_before is not None)
        assert await send_due(database, jobs) == 0
        if days_before is not None:
            name = f"certificate-ann.main.{version}.{days_before}"
            mail = msgspec.json.decode(
                (await job(valkey_client, f"{name}-mail")).args, type=catalog.SendEmail
            )
            word = "expires on" if days_before else "expired on"
            assert (mail.to, word in mail.subject) == ("ann@example.com", True)
            post_job = await job(valkey_client, f"{name}-post")
            post = msgspec.json.decode(post_job.args, type=catalog.DeliverWebhook)
            assert (post.url, post.recipient, post.event) == (HOOK, "ann", EVENT)
            assert msgspec.json.decode(post.body)["days"] == days_before
    assert await warned(database, "ann") == [30, 7, 1, 0]


async def test_a_new_certificate_is_warned_of_anew_and_one_that_is_close_once(
    harness: ActivityHarness, database: Database, jobs: KeptJobs
) -> None:
    await make_user(database, "bob")
    await put(database, harness.ring.public, "bob", 0.5)
    assert await send_due(database, jobs) == 1  # without an address the audit trail has it
    await put(database, harness.ring.public, "bob", 365)
    assert await send_due(database, jobs) == 0
    await approach(database, "bob", 20)
    assert await send_due(database, jobs) == 1
    assert await warned(database, "bob") == [1, 30]


async def test_nobody_is_warned_of_simulations_of_what_is_not_known_and_when_disabled(
    harness: ActivityHarness, database: Database, jobs: KeptJobs
) -> None:
    for user, days, simulation in (
        ("sim", 5.0, True),
        ("unread", None, False),
        ("off", 5.0, False),
    ):
        await make_user(database, user)
        await put(database, harness.ring.public, user, days, simulation=simulation)
    async with database.session() as session:
        row = await users.get_user(session, "off")
        row.disabled_at = datetime.now(UTC)
    assert await send_due(database, jobs) == 0


async def test_two_orchestrators_at_once_give_a_warning_once(
    harness: ActivityHarness, database: Database, jobs: KeptJobs
) -> None:
    for number in range(8):
        await make_user(database, f"many{number}")
        await put(database, harness.ring.public, f"many{number}", 5)
    counts = await asyncio.gather(*(send_due(database, jobs) for _ in range(4)))
    counts.append(await send_due(database, jobs))
    assert sum(counts) == 8


async def test_a_worker_reports_the_certificate_of_the_version_that_it_uses(
    harness: ActivityHarness, database: Database, jobs: KeptJobs
) -> None:
    await make_user(database, "eve")
    await put(database, harness.ring.public, "eve", None)
    version = await put(database, harness.ring.public, "eve", None)
    ends = datetime.now(UTC) + timedelta(days=6)

    async def report(at_ms: int, of_version: int) -> BrokerAccount:
        login = AccountLogin(
            account_id="main", version=of_version, certificate_ends_ms=int(ends.timestamp() * 1000)
        )
        async with database.session() as session:
            await accounts.record_logins(session, "eve", 1, at_ms, [login])
        async with database.session() as session:
            return await session.get_one(BrokerAccount, ("eve", "main"))

    assert (await report(1, version - 1)).certificate_expires_at is None
    expires_at = (await report(2, version)).certificate_expires_at
    assert expires_at is not None
    assert abs(expires_at - ends) < timedelta(seconds=1)
    assert await send_due(database, jobs) == 1
    await report(3, version)
    assert await send_due(database, jobs) == 0
