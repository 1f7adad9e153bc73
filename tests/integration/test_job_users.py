"""Valkey users of job runners: a fleet that was taken over reaches its own jobs, and nothing
else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from infra.compose import health
from infra.jobs import fleet
from infra.jobs.client import JobClient
from infra.jobs.scaling import ScaledFleet
from infra.jobs.view import JobInspector
from infra.local.components import JobFleetComponent
from infra.local.servers import ValkeyServer
from infra.settings import Settings
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.job_login import job_fleet_url, user_of_jobs
from infra.valkey.job_users import JobUsers
from infra.vault.message_secret import MessageSecretFile
from infra.vault.secret_versions import add_version, create_versions
from tests.support.receivers.webhooks import receiving
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.telemetry import MAX_ERRORS
from worker_runtime.protocol import keys

TAG = job_keys.FLEET_TAG
pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def secrets(tmp_path: Path) -> MessageSecretFile:
    create_versions(tmp_path / "message.key")
    return MessageSecretFile(tmp_path / "message.key", check_period=0.0)


@pytest.fixture
async def users(valkey_client: Redis, secrets: MessageSecretFile) -> AsyncIterator[JobUsers]:
    users = JobUsers(valkey_client, secrets)
    await users.ensure(await valkey.read_server_id(valkey_client))
    for script in job_scripts.ALL:  # as the orchestrators load them
        await valkey_client.script_load(script.source)
    yield users
    await users.delete(TAG)


@pytest.fixture
async def hostile(
    users: JobUsers, valkey_server: ValkeyServer, secrets: MessageSecretFile
) -> AsyncIterator[Redis]:
    """What a fleet has."""
    async with valkey.connect_valkey(
        job_fleet_url(valkey_server.url, TAG, secrets.job_keys(TAG))
    ) as client:
        yield client


def settings(folder: Path, url: str, **fields: object) -> Settings:
    create_versions(folder / "webhook.key")
    values = {
        "data_dir": folder,
        "valkey_url": url,
        "valkey_users": True,
        "message_key_file": folder / "message.key",
        "webhook_key_file": str(folder / "webhook.key"),
        "webhook_allow_private": True,
        "alert_webhooks": ["https://alerts.example"],
        **fields,
    }
    return Settings.model_validate(values)


async def test_a_fleet_works_scales_and_is_healthy_by_its_own_login(
    users: JobUsers,
    valkey_server: ValkeyServer,
    valkey_client: Redis,
    secrets: MessageSecretFile,
    tmp_path: Path,
) -> None:
    jobs = JobClient(valkey_client, secrets)
    own = settings(tmp_path, valkey_server.url, jobs_runner="fleet", jobs_runners="1-2")
    with receiving() as receiver, JobFleetComponent(tmp_path, own) as component:
        work = catalog.DeliverWebhook(
            url=receiver.url, recipient="alice", event="e", body=msgspec.Raw(b"{}")
        )
        assert await jobs.enqueue(catalog.make_job("w-1", work))
        done = await jobs.wait("w-1", 20.0)
        assert done is not None
        assert (done.state, len(receiver.got)) == ("done", 1)
        names = {str(client["user"]) for client in await valkey_client.client_list()}
        assert user_of_jobs(TAG) in names
        with_login = fleet.with_own_login(own)
        with JobInspector(with_login.valkey_url) as looking:
            assert looking.waits() == {}
            assert [runner.name for runner in looking.overview().runners] == ["fleet"]
        name, host = "fleet", component.settings.valkey_url
        assert "@" not in host, "it gets an address without a login"
        runner = JobInspector(with_login.valkey_url).overview().runners[0]
        assert health.is_registered(with_login.valkey_url, name, runner.node, 60.0)
        assert ScaledFleet(with_login, b"").least == 1


@pytest.mark.parametrize(
    "words",
    [
        ("LRANGE", keys.requests("alice"), "0", "-1"),
        ("LPUSH", keys.requests("alice"), "forged"),
        ("HSET", keys.owner("alice"), "epoch", "9"),
        ("HSET", keys.switch("alice"), "*", "open"),
        ("DEL", keys.mark("alice")),
        ("HGETALL", job_keys.meta(job_keys.user_tag("alice"))),
        ("XADD", keys.EVENTS, "*", "e", "forged"),
        ("RPUSH", keys.EVENT_BELL, "p-1"),
        ("DEL", keys.ERRORS),
        ("XRANGE", keys.ERRORS, "-", "+"),
        ("SET", keys.GENERATION, "another"),
        ("PUBLISH", job_keys.done(job_keys.user_tag("alice"), "j"), "done"),
        ("SUBSCRIBE", job_keys.done(TAG, "j")),
        ("EVAL", "return 1", "0"),
        ("SCRIPT", "LOAD", "while true do end"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("MONITOR",),
    ],
    ids=" ".join,
)
async def test_a_hostile_fleet_is_refused(hostile: Redis, words: tuple[str, ...]) -> None:
    with pytest.raises(NoPermissionError):
        await reply_of(hostile.execute_command(*words))  # type: ignore[no-untyped-call]


async def test_a_script_on_the_keys_of_others_is_refused(hostile: Redis) -> None:
    theirs = job_keys.meta(job_keys.user_tag("alice"))
    for script in (job_scripts.SCAN, job_scripts.JOIN, job_scripts.FINISH_AND_CLAIM):
        with pytest.raises(NoPermissionError):
            await reply_of(hostile.evalsha(script.sha, 1, theirs, "1", "2", "3"))


async def test_a_fleet_tells_operators_of_its_errors(hostile: Redis, valkey_client: Redis) -> None:
    fields: dict[str, str] = {"key": "k", "text": "t", "count": "1"}
    await hostile.xadd(keys.ERRORS, fields, maxlen=MAX_ERRORS)  # type: ignore[arg-type]
    assert await valkey_client.xlen(keys.ERRORS) == 1


async def test_fleets_of_two_tags_reach_nothing_of_each_other(
    users: JobUsers, valkey_client: Redis, valkey_server: ValkeyServer, secrets: MessageSecretFile
) -> None:
    server = await valkey.read_server_id(valkey_client)
    await users.ensure(server, ["user:shop", TAG])
    url = job_fleet_url(valkey_server.url, "user:shop", secrets.job_keys("user:shop"))
    async with valkey.connect_valkey(url) as shop:
        await reply_of(shop.hset(job_keys.meta("user:shop"), "weight", "1"))
        with pytest.raises(NoPermissionError):
            await reply_of(shop.hgetall(job_keys.meta(TAG)))
    await users.delete("user:shop")


async def test_after_a_rotation_old_and_new_keys_log_in_and_a_new_server_knows_those_that_are_held(
    users: JobUsers,
    valkey_client: Redis,
    valkey_server: ValkeyServer,
    secrets: MessageSecretFile,
    tmp_path: Path,
) -> None:
    before = secrets.job_keys(TAG)
    server = await valkey.read_server_id(valkey_client)
    add_version(tmp_path / "message.key", keep=2)
    await users.ensure(server)
    for message_keys in (before, secrets.job_keys(TAG)):
        async with valkey.connect_valkey(
            job_fleet_url(valkey_server.url, TAG, message_keys)
        ) as client:
            assert await client.ping()
    await reply_of(valkey_client.execute_command("ACL", "DELUSER", user_of_jobs(TAG)))  # type: ignore[no-untyped-call]
    await users.ensure(server)  # as far as it knows, the user is there
    async with valkey.connect_valkey(job_fleet_url(valkey_server.url, TAG, before)) as client:
        with pytest.raises(AuthenticationError):
            await client.ping()
    await users.ensure("another server")
    async with valkey.connect_valkey(job_fleet_url(valkey_server.url, TAG, before)) as client:
        assert await client.ping()
