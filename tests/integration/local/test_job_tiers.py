"""A fleet for each tier: it serves its queue only, grows while jobs wait, and shrinks when none
do."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from infra.jobs.client import JobClient
from infra.jobs.fleet import WAITING_SLOTS
from infra.jobs.view import JobInspector
from infra.local.components import JobFleetComponent, environment, job_fleets
from infra.local.servers import ValkeyServer
from infra.settings import Settings
from infra.vault.key_file import write_key_file
from tests.support.message_signing import create_message_secret
from tests.support.receivers import providers
from tests.support.receivers.providers import TwilioServer, serving
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog


@pytest.fixture
def twilio() -> Iterator[TwilioServer]:
    server = TwilioServer()
    server.latency = 0.05
    with serving(server):
        yield server


def settings(
    folder: Path, valkey: ValkeyServer, twilio: TwilioServer, **fields: object
) -> Settings:
    token = folder / "twilio.token"
    write_key_file(token, providers.TOKEN.encode(), private=True)
    values: dict[str, object] = {
        "data_dir": folder,
        "valkey_url": valkey.url,
        "message_key_file": folder / "message.key",
        "messaging_url": twilio.url,
        "messaging_account": providers.ACCOUNT,
        "messaging_token_file": str(token),
        "messaging_sms_sender": "+15005550006",
        "jobs_wait": 0.2,
        **fields,
    }
    return Settings.model_validate(values)


async def put(jobs: JobClient, count: int, name: str = "s") -> list[str]:
    messages = [
        catalog.make_job(f"{name}-{n}", catalog.SendSms(to="+886912345678", text="x"))
        for n in range(count)
    ]
    for job in messages:
        assert await jobs.enqueue(job)
    return [job.job_id for job in messages]


def runners(jobs: JobInspector, count: int, *, without: int = 0) -> list[int]:
    """Waits until this many run, and returns their process ids. `without` is not counted."""

    def running() -> list[int] | None:
        pids = [runner.pid for runner in jobs.overview().runners if runner.pid != without]
        return pids if len(pids) == count else None

    return eventually(running, f"{count} runners", 30.0)


@pytest.mark.timeout(90)
async def test_a_fleet_scales_between_its_bounds(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis, twilio: TwilioServer
) -> None:
    jobs = JobClient(valkey_client, create_message_secret(tmp_path / "message.key"))
    own = settings(tmp_path, valkey_server, twilio, jobs_tiers={"sms": "1-3"}, jobs_runner="")
    [fleet] = job_fleets(tmp_path, own)
    assert fleet.name == "jobs-sms"
    # One runner would need 300 / 8 * 0.3 = 11 s: jobs still wait when the third one has started.
    twilio.latency = 0.3
    with JobInspector(valkey_server.url) as seen, fleet:
        [first] = runners(seen, 1)
        sent = await put(jobs, 300)
        pids = runners(seen, 3)
        [queue] = seen.overview().queues
        assert (queue.queue, queue.runners) == ("sms", 3)
        assert queue.waited > 0.2
        # One that is killed is replaced, and nothing is lost with it that may run again.
        victim = next(pid for pid in pids if pid != first)
        os.kill(victim, signal.SIGKILL)
        runners(seen, 3, without=victim)
        ends = [await jobs.wait(job, 30.0) for job in sent]
        states = [end.state for end in ends if end is not None]
        # An SMS that was under way may have been sent: it is not sent again.
        assert states.count("done") >= len(sent) - WAITING_SLOTS
        assert states.count("done") + states.count("failed") == len(sent)
        assert runners(seen, 1) == [first]


async def test_a_suspended_queue_gets_no_more_runners(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis, twilio: TwilioServer
) -> None:
    jobs = JobClient(valkey_client, create_message_secret(tmp_path / "message.key"))
    await put(jobs, 3)
    with JobInspector(valkey_server.url) as seen:
        assert set(seen.waits()) == {"sms"}
        for call in ({"queue": "sms"}, {}):
            seen.run(job_calls.suspend(**call))
            assert seen.waits() == {}
            seen.run(job_calls.resume(**call))
        assert set(seen.waits()) == {"sms"}


@pytest.mark.timeout(60)
async def test_a_stopped_fleet_lets_its_jobs_end(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis, twilio: TwilioServer
) -> None:
    jobs = JobClient(valkey_client, create_message_secret(tmp_path / "message.key"))
    twilio.latency = 1.0
    own = settings(tmp_path, valkey_server, twilio, jobs_runners="2-4", jobs_queues=("sms",))
    with JobInspector(valkey_server.url) as seen:
        with JobFleetComponent(tmp_path, own):
            runners(seen, 2)
            sent = await put(jobs, 2)
            eventually(lambda: len(seen.overview().running) == 2, "two running jobs")
        ends = [await jobs.get(job) for job in sent]
        assert [end.state for end in ends if end] == ["done", "done"]
        assert seen.overview().runners == []


async def test_a_fleet_whose_runners_cannot_be_configured_ends(
    tmp_path: Path, valkey_server: ValkeyServer, twilio: TwilioServer
) -> None:
    create_message_secret(tmp_path / "message.key")
    own = settings(tmp_path, valkey_server, twilio, jobs_runners="2", jobs_queues=())
    command = [sys.executable, "-m", "infra.jobs.fleet"]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment(own) | {"BERTH_VALKEY_URL": own.valkey_url},
        timeout=30,
    )
    assert done.returncode == 64


def test_each_tier_has_a_fleet_and_the_other_queues_have_one(
    tmp_path: Path, valkey_server: ValkeyServer, twilio: TwilioServer
) -> None:
    own = settings(tmp_path, valkey_server, twilio, jobs_tiers={"sms": "1-4", "email": "2"})
    fleets = {fleet.name: fleet.settings for fleet in job_fleets(tmp_path, own)}
    bounds = {
        name: (fleet_settings.jobs_queues, fleet_settings.runner_bounds)
        for name, fleet_settings in fleets.items()
    }
    assert bounds == {
        "jobs-sms": (("sms",), (1, 4)),
        "jobs-email": (("email",), (2, 2)),
        "jobs": (("default", "push", "webhook", "whatsapp"), (1, 1)),
    }
    assert environment(own)["BERTH_JOBS_TIERS"] == '{"sms": "1-4", "email": "2"}'
