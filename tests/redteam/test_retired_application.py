"""An application's key is retired while its runners still run with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError

from activities.maintenance.kept_jobs import KeptJobSweeper
from infra.database.engine import Database
from infra.jobs.applications import add_application, rotate_application
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.job_login import job_fleet_url
from infra.valkey.job_users import JobUsers
from infra.vault.message_secret import MessageSecretFile
from infra.vault.secret_versions import create_versions
from tests.support.jobs.keeper import NotingStarter
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobResult, JobStatus, sign_result
from worker_runtime.protocol.authentication import MessageKey

TAG = job_keys.application_tag("shop")


class ApplicationOwner:
    """Changes the application's key; two orchestrators see to what follows."""

    def __init__(self, database: Database, client: Redis, key_file: Path) -> None:
        self.database, self.client = database, client
        self.key_file = key_file
        #: What the orchestrators read jobs with.
        self.clients: list[JobClient] = []
        self.orchestrators = [self.orchestrator() for _ in range(2)]

    def orchestrator(self) -> KeptJobSweeper:
        """Makes one with message secrets of its own, which know the application's keys."""
        secrets = MessageSecretFile(self.key_file, check_period=0.0)
        self.clients.append(JobClient(self.client, secrets))
        kept = KeptJobs(self.database, self.clients[-1])
        users = JobUsers(self.client, secrets)
        return KeptJobSweeper(self.client, kept, NotingStarter(), job_users=users)

    async def rotate(self, *, retire: bool = False) -> None:
        async with self.database.session() as session:
            await rotate_application(session, "shop", retire=retire)

    async def notice(self) -> None:
        """Each orchestrator reads again which keys count, once it may (2 s)."""
        await asyncio.sleep(2.1)
        for orchestrator in self.orchestrators:
            await orchestrator.load_applications()


@pytest.fixture
async def owner(
    services_database: str, valkey_client: Redis, tmp_path: Path
) -> AsyncIterator[ApplicationOwner]:
    create_versions(tmp_path / "message.key")
    database = Database(services_database)
    async with database.session() as session:
        await add_application(session, "shop", "a test")
    owner = ApplicationOwner(database, valkey_client, tmp_path / "message.key")
    for orchestrator in owner.orchestrators:
        await orchestrator.load_applications()
    yield owner
    await valkey_client.execute_command("ACL", "DELUSER", f"fleet-{TAG}")  # type: ignore[no-untyped-call]
    await database.close()


async def test_a_retired_key_ends_its_runners_at_both_orchestrators_and_on_a_new_server(
    owner: ApplicationOwner, valkey_server: ValkeyServer, tmp_path: Path
) -> None:
    secrets = MessageSecretFile(tmp_path / "message.key", check_period=0.0)
    former: tuple[MessageKey, ...] = secrets.application_keys("shop", (1,))
    url = job_fleet_url(valkey_server.url, TAG, former)
    async with valkey.connect_valkey(url) as runner, valkey.connect_valkey(url) as waiting:
        mailbox = job_keys.mailbox(TAG, "runner-1")
        hearing = asyncio.create_task(reply_of(waiting.blpop([mailbox], 0)))  # as a runner listens
        await owner.rotate()
        await owner.notice()
        assert await runner.ping(), "both keys count until the former one is retired"
        await owner.rotate(retire=True)
        await owner.notice()
        with pytest.raises((AuthenticationError, ConnectionError)):
            await hearing
        with pytest.raises((AuthenticationError, ConnectionError)):
            await runner.ping()
        # A server that has lost its users gets them again from an orchestrator that has just begun.
        await owner.client.execute_command("ACL", "DELUSER", f"fleet-{TAG}")  # type: ignore[no-untyped-call]
        await owner.orchestrator().load_applications()
        with pytest.raises(AuthenticationError):
            await runner.ping()
        present = secrets.application_keys("shop", (2,))
        async with valkey.connect_valkey(job_fleet_url(valkey_server.url, TAG, present)) as fresh:
            assert await fresh.ping()


async def test_an_end_that_a_retired_key_signed_counts_as_unknown(
    owner: ApplicationOwner, tmp_path: Path
) -> None:
    secrets = MessageSecretFile(tmp_path / "message.key", check_period=0.0)
    former = secrets.application_keys("shop", (1,))
    done = JobResult(job_id="1", status=JobStatus.DONE, value=msgspec.Raw(b'"forged"'))
    await owner.client.set(job_keys.result(TAG, "1"), sign_result(done, former))
    await owner.rotate()
    await owner.notice()
    for client in owner.clients:
        state = await client.get("1", tag=TAG)
        assert state is not None
        assert state.state == "done", "both keys count"
    await owner.rotate(retire=True)
    await owner.notice()
    for client in owner.clients:
        state = await client.get("1", tag=TAG)
        assert state is not None
        assert state.result is not None
        assert state.result.failure is not None
        assert (state.state, state.result.failure.code) == ("failed", "JOB_OUTCOME_UNKNOWN")
