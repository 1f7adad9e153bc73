"""A worker works with the rights that all workers share on ElastiCache, and has no others."""

from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from infra.aws.valkey import JOBS_ACCESS, SERVICE_ACCESS, WORKER_ACCESS
from infra.jobs.view import JobInspector
from infra.local.components import JobFleetComponent
from infra.local.servers import ValkeyServer
from infra.settings import Settings
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from tests.support.message_signing import create_message_secret
from tests.support.workers.harness import WorkerHarness
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.messages import OrderState

pytestmark = pytest.mark.timeout(60)


async def make_user(client: Redis, name: str, access: str) -> None:
    words = ["ACL", "SETUSER", name, "reset", *access.split(), ">secret"]
    await reply_of(client.execute_command(*words))  # type: ignore[no-untyped-call]


def url_of(server: ValkeyServer, user: str) -> str:
    return f"redis://{user}:secret@127.0.0.1:{server.port}/0"


async def test_a_worker_is_claimed_and_trades(
    valkey_server: ValkeyServer, valkey_client: Redis, tmp_path: Path
) -> None:
    await make_user(valkey_client, "worker", WORKER_ACCESS)
    for script in (*scripts.ALL, *job_scripts.ALL):  # as the orchestrators do
        await valkey_client.script_load(script.source)
    stage = WorkerHarness(valkey_server.url, tmp_path)
    try:
        worker = stage.active(valkey_url=url_of(valkey_server, "worker"))
        outcome = stage.send().outcome
        assert outcome is not None
        assert outcome.state is OrderState.FILLED
        assert len(worker.placed()) == 1
    finally:
        stage.close()


async def test_a_worker_may_not_look_around(
    valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    await make_user(valkey_client, "worker", WORKER_ACCESS)
    async with valkey.connect_valkey(url_of(valkey_server, "worker")) as client:
        for words in (
            "KEYS *",
            "SCAN 0",
            "FLUSHALL",
            "CONFIG GET *",
            "ACL LIST",
            "CLIENT LIST",
            "MONITOR",
        ):
            with pytest.raises(NoPermissionError):
                await reply_of(client.execute_command(*words.split()))  # type: ignore[no-untyped-call]


async def test_a_worker_brings_no_script_that_could_block_everybody(
    valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    await make_user(valkey_client, "worker", WORKER_ACCESS)
    endless = "while true do end"
    async with valkey.connect_valkey(url_of(valkey_server, "worker")) as client:
        for words in (("EVAL", endless, "0"), ("SCRIPT", "LOAD", endless), ("FCALL", "f", "0")):
            with pytest.raises(NoPermissionError):
                await reply_of(client.execute_command(*words))  # type: ignore[no-untyped-call]


async def test_our_servers_have_what_they_call(
    valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    await make_user(valkey_client, "service", SERVICE_ACCESS)
    async with valkey.connect_valkey(url_of(valkey_server, "service")) as client:
        await valkey.read_server_id(client)
        await valkey.ensure_generation(client, "g")
        await valkey.server_known_since(client)
        await client.script_load("return 1")
        with pytest.raises(NoPermissionError):
            await client.flushall()


async def test_a_fleet_of_jobs_works_by_its_login_and_reaches_no_worker(
    valkey_server: ValkeyServer, valkey_client: Redis, tmp_path: Path
) -> None:
    await make_user(valkey_client, "jobs", JOBS_ACCESS)
    for script in job_scripts.ALL:  # as the orchestrators do
        await valkey_client.script_load(script.source)
    create_message_secret(tmp_path / "message.key")
    url = url_of(valkey_server, "jobs")
    own = Settings(data_dir=tmp_path, message_key_file=tmp_path / "message.key", valkey_url=url)
    # It is ready when it is registered.
    with JobFleetComponent(tmp_path, own), JobInspector(url) as jobs:
        assert len(jobs.overview().runners) == 1
    async with valkey.connect_valkey(url) as client:
        for words in (
            f"LRANGE {keys.requests('alice')} 0 -1",
            "KEYS *",
            "EVAL x 0",
            f"GET {keys.EVENTS}",
        ):
            with pytest.raises(NoPermissionError):
                await reply_of(client.execute_command(*words.split()))  # type: ignore[no-untyped-call]
