"""Red team: what somebody with everything of one application can do to others. Nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from infra.jobs.client import JobClient
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.job_login import job_fleet_url
from infra.valkey.job_users import JobUsers
from infra.vault.message_secret import MessageSecretFile
from infra.vault.secret_versions import create_versions
from tests.support.jobs.hand_runner import make_manifest
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import manifest as wire
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.messages import (
    Job,
    JobResult,
    JobStatus,
    read_signed_job,
    sign_result,
)
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import InvalidSignature

SHOP, BANK = job_keys.application_tag("shop"), job_keys.application_tag("bank")
OTHERS = (BANK, job_keys.FLEET_TAG, job_keys.user_tag("alice"))


@pytest.fixture
def secrets(tmp_path: Path) -> MessageSecretFile:
    create_versions(tmp_path / "message.key")
    return MessageSecretFile(tmp_path / "message.key", check_period=0.0)


@pytest.fixture
async def users(valkey_client: Redis, secrets: MessageSecretFile) -> AsyncIterator[JobUsers]:
    users = JobUsers(valkey_client, secrets)
    await users.ensure(await valkey.read_server_id(valkey_client), [SHOP, BANK])
    for script in job_scripts.ALL:  # as the orchestrators load them
        await valkey_client.script_load(script.source)
    yield users
    for tag in (SHOP, BANK):
        await users.delete(tag)


@pytest.fixture
async def hostile(
    users: JobUsers, valkey_server: ValkeyServer, secrets: MessageSecretFile
) -> AsyncIterator[Redis]:
    """The login of `shop`, which follows from its key file."""
    url = job_fleet_url(valkey_server.url, SHOP, secrets.job_keys(SHOP))
    async with valkey.connect_valkey(url) as client:
        yield client


async def test_an_application_works_with_its_own_login(
    hostile: Redis, secrets: MessageSecretFile
) -> None:
    join = [job_keys.meta(SHOP)], ["r-1", "r", "n", "*", 1, "", 420]
    await valkey.run_script(hostile, job_scripts.JOIN, *join)
    announced = wire.publish("r-1", [make_manifest("resize")], secrets.job_keys(SHOP), "shop")
    assert wire.check_reply(await valkey.run_script(hostile, *announced))
    job = Job(job_id="1", name="shop/resize", type_version=1)
    reply = await valkey.run_script(hostile, *job_calls.enqueue(job, secrets.job_keys(SHOP), SHOP))
    assert reply[0] == b"queued"


@pytest.mark.parametrize("tag", OTHERS)
async def test_it_neither_reads_nor_writes_what_others_have(hostile: Redis, tag: str) -> None:
    words: list[tuple[str, ...]] = [
        ("HGETALL", job_keys.meta(tag)),
        ("HGETALL", job_keys.job(tag, "1")),
        ("GET", job_keys.result(tag, "1")),
        ("SET", job_keys.result(tag, "1"), "forged"),
        ("HSET", job_keys.manifests(tag), "d", "forged"),
        ("HSET", job_keys.meta(tag), "halt", "1"),
        ("LPUSH", job_keys.mailbox(tag, "r-1"), "cancel 1 1"),
        ("PUBLISH", job_keys.done(tag, "1"), "forged"),
        ("SUBSCRIBE", job_keys.done(tag, "1")),
        ("ZADD", job_keys.delayed(tag), "1", "j"),
    ]
    for command in words:
        with pytest.raises(NoPermissionError):
            await reply_of(hostile.execute_command(*command))  # type: ignore[no-untyped-call]
    for script in job_scripts.ALL:
        with pytest.raises(NoPermissionError):
            await reply_of(hostile.evalsha(script.sha, 1, job_keys.meta(tag), *["1"] * 12))


@pytest.mark.parametrize(
    "words",
    [
        ("SCRIPT", "LOAD", "return 1"),
        ("EVAL", "return 1", "0"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("MONITOR",),
        ("SET", keys.GENERATION, "another"),
        ("LRANGE", keys.requests("alice"), "0", "-1"),
        ("HSET", keys.switch("alice"), "*", "open"),
    ],
    ids=" ".join,
)
async def test_it_has_no_command_that_reaches_further(
    hostile: Redis, words: tuple[str, ...]
) -> None:
    with pytest.raises(NoPermissionError):
        await reply_of(hostile.execute_command(*words))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("tag", OTHERS)
async def test_what_it_signs_counts_for_nobody_else(
    valkey_client: Redis, secrets: MessageSecretFile, tag: str
) -> None:
    own = secrets.job_keys(SHOP)
    # Even a copy that somebody had put into the others' keys.
    job = (
        Job(job_id="1", name="bank/pay", type_version=1)
        if tag == BANK
        else Job(job_id="1", name="ping")
    )
    await valkey.run_script(valkey_client, *job_calls.enqueue(job, own, tag))
    body = await reply_of(valkey_client.hget(job_keys.job(tag, "1"), "body"))
    with pytest.raises(InvalidSignature):
        read_signed_job(body, "1", secrets.job_keys(tag))
    done = JobResult(job_id="2", status=JobStatus.DONE, value=msgspec.Raw(b'"forged"'))
    await valkey_client.set(job_keys.result(tag, "2"), sign_result(done, own))
    state = await JobClient(valkey_client, secrets).get("2", tag=tag)
    assert state is not None
    assert state.result is not None
    assert state.result.failure is not None
    assert (state.state, state.result.failure.code) == ("failed", "JOB_OUTCOME_UNKNOWN")
    with pytest.raises(InvalidSignature):
        wire.read_signed(sign_result(done, own), "bank", secrets.job_keys(BANK))


async def test_its_key_leads_to_no_other_key(secrets: MessageSecretFile) -> None:
    own = {key.key for key in secrets.application_keys("shop", (2, 1))}
    others = [*secrets.application_keys("bank", (2, 1)), *secrets.job_keys(job_keys.FLEET_TAG)]
    others += [
        *secrets.request_keys("shop"),
        *secrets.kept_keys(SHOP),
        *secrets.service_keys("shop"),
    ]
    assert len(own) == 2
    assert not own & {key.key for key in others}


async def test_a_retired_key_logs_nobody_in_and_ends_the_connections(
    users: JobUsers, valkey_client: Redis, valkey_server: ValkeyServer, secrets: MessageSecretFile
) -> None:
    server = await valkey.read_server_id(valkey_client)
    former = secrets.application_keys("shop", (1,))
    secrets.set_generations({"shop": (2, 1), "bank": (1,)})
    await users.ensure(server, [SHOP])
    async with valkey.connect_valkey(job_fleet_url(valkey_server.url, SHOP, former)) as client:
        assert await client.ping()  # both count
    secrets.set_generations({"shop": (2,), "bank": (1,)})
    await users.ensure(server, [SHOP])
    await users.revoke(SHOP, former)
    await users.revoke(SHOP, former)
    async with valkey.connect_valkey(job_fleet_url(valkey_server.url, SHOP, former)) as client:
        with pytest.raises(AuthenticationError):
            await client.ping()
    fresh = job_fleet_url(valkey_server.url, SHOP, secrets.job_keys(SHOP))
    async with valkey.connect_valkey(fresh) as client:
        assert await client.ping()
    bank = job_fleet_url(valkey_server.url, BANK, secrets.job_keys(BANK))
    async with valkey.connect_valkey(bank) as client:
        assert await client.ping()
