"""A runner of the fleet, as the local stack starts it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from infra.jobs import fleet
from infra.jobs.client import JobClient
from infra.local.components import JobFleetComponent
from infra.local.servers import ValkeyServer
from infra.settings import Settings
from infra.vault.key_file import KeyFileExposed, write_key_file
from tests.unit.jobs.types.receiver import receiving
from worker_runtime.jobs.config import parse_config
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys


def settings(folder: Path, **fields: object) -> Settings:
    key = folder / "webhook.key"
    write_key_file(key, b"k" * 32 + b"\n", private=True)
    password = folder / "mail.password"
    write_key_file(password, b"a secret\n", private=True)
    values = {
        "data_dir": folder,
        "webhook_key_files": (key,),
        "webhook_allow_private": True,
        "mail_host": "mail.example.com",
        "mail_sender": "berth@example.com",
        "mail_username": "berth",
        "mail_password_file": str(password),
        **fields,
    }
    return Settings.model_validate(values)


def test_a_runner_gets_what_the_settings_say(tmp_path: Path) -> None:
    own = settings(tmp_path, jobs_runner="night", jobs_queues=("webhook", "email"), jobs_slots=3)
    found = parse_config(fleet.runner_config(own))
    assert (found.name, found.queues, found.slots, found.tag) == (
        "night",
        ("webhook", "email"),
        3,
        job_keys.FLEET_TAG,
    )
    assert found.webhook is not None
    assert (found.webhook.keys, found.webhook.allow_private) == ((b"k" * 32,), True)
    assert found.mail is not None
    assert (found.mail.host, found.mail.password) == ("mail.example.com", "a secret")
    bare = parse_config(fleet.runner_config(Settings(data_dir=tmp_path)))
    assert (bare.webhook, bare.mail, bare.queues) == (None, None, ("*",))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    own = settings(tmp_path)
    own.webhook_key_files[0].chmod(0o644)
    with pytest.raises(KeyFileExposed):
        fleet.runner_config(own)


async def test_the_fleet_of_the_local_stack_does_what_is_enqueued(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    jobs = JobClient(valkey_client)
    with (
        receiving() as receiver,
        JobFleetComponent(tmp_path, settings(tmp_path, valkey_url=valkey_server.url)),
    ):
        work = catalog.DeliverWebhook(url=receiver.url, recipient="alice", event="e", body=msgspec.Raw(b"{}"))
        assert await jobs.enqueue(catalog.make_job("w-1", work))
        assert not await jobs.enqueue(catalog.make_job("w-1", work))
        done = await jobs.wait("w-1", 20.0)
        assert done is not None
        assert (done.state, done.attempt) == ("done", 1)
        assert len(receiver.got) == 1
    assert await valkey_client.hlen(job_keys.beats(job_keys.FLEET_TAG)) == 0  # it signed off
