"""A runner of the fleet, as the local stack starts it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from redis.asyncio import Redis

from infra.jobs import fleet
from infra.jobs.client import JobClient
from infra.local.components import JobFleetComponent
from infra.local.servers import ValkeyServer
from infra.settings import Settings
from infra.vault.key_file import KeyFileCorrupt, KeyFileExposed, write_key_file
from infra.vault.message_secret import load_fleet_keys, write_fleet_keys
from infra.vault.secret_versions import create_versions, load_versions
from tests.support.commands import CommandForker
from tests.support.message_signing import create_message_secret
from tests.support.receivers import providers
from tests.support.receivers.providers import FcmServer, TwilioServer, serving
from tests.support.receivers.webhooks import receiving
from worker_runtime.jobs.config import parse_config
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.webhook_signing import SIGNATURE_HEADER


def settings(folder: Path, **fields: object) -> Settings:
    key = folder / "webhook.key"
    if not key.exists():
        create_versions(key)
    password = folder / "mail.password"
    write_key_file(password, b"a secret\n", private=True)
    values = {
        "data_dir": folder,
        "message_key_file": folder / "message.key",
        "webhook_key_file": str(key),
        "webhook_allow_private": True,
        "mail_host": "mail.example.com",
        "mail_sender": "berth@example.com",
        "mail_username": "berth",
        "mail_password_file": str(password),
        **fields,
    }
    return Settings.model_validate(values)


def test_a_runner_gets_what_the_settings_say(tmp_path: Path) -> None:
    secrets = create_message_secret(tmp_path / "message.key")
    own = settings(tmp_path, jobs_runner="night", jobs_queues=("webhook", "email"), jobs_slots=3)
    config = parse_config(fleet.runner_config(own))
    assert (config.name, config.queues, config.slots, config.tag) == (
        "night",
        ("webhook", "email"),
        3,
        job_keys.FLEET_TAG,
    )
    assert config.message_keys == secrets.job_keys(job_keys.FLEET_TAG)
    assert config.webhook is not None
    assert (config.webhook.keys, config.webhook.allow_private) == (
        (load_versions(Path(own.webhook_key_file))[0].secret,),
        True,
    )
    assert config.mail is not None
    assert (config.mail.host, config.mail.password) == ("mail.example.com", "a secret")
    bare = parse_config(
        fleet.runner_config(Settings(data_dir=tmp_path, message_key_file=own.message_key_file))
    )
    assert (bare.webhook, bare.mail, bare.queues) == (None, None, ("*",))


def test_a_runner_needs_only_the_keys_of_the_fleets_jobs(
    tmp_path: Path, commands: CommandForker, migrated_database: str
) -> None:
    """Whoever took over a runner gives no orders with them: users' keys do not follow from them."""
    # Given a host with the derived keys, and without the message secret
    secrets, keys = (
        create_message_secret(tmp_path / "message.key"),
        tmp_path / "fleet" / "fleet.key",
    )
    assert write_fleet_keys(keys, tmp_path / "message.key")
    assert not write_fleet_keys(keys, tmp_path / "message.key")
    elsewhere = settings(tmp_path, jobs_key_file=str(keys), message_key_file=tmp_path / "none.key")
    config = parse_config(fleet.runner_config(elsewhere))
    assert config.message_keys == secrets.job_keys(job_keys.FLEET_TAG) == load_fleet_keys(keys)
    for version in load_versions(tmp_path / "message.key"):
        assert version.secret not in (key.key for key in config.message_keys)
    # When the message secret is rotated, they follow
    places = {
        "BERTH_DATABASE_URL": migrated_database,
        "BERTH_MESSAGE_KEY_FILE": str(tmp_path / "message.key"),
        "BERTH_JOBS_KEY_FILE": str(keys),
    }
    # And the keys of applications, whose numbers have the generation, too
    assert commands.run("jobs", "application", "add", "shop", **places).code == 0
    shop = tmp_path / "applications" / "shop.key"
    for step, versions in ((("rotate",), [2, 1]), (("retire", "--force"), [2])):
        done = commands.run("keys", step[0], "message", *step[1:], **places)
        assert done.code == 0, done.err
        assert [key.version for key in load_fleet_keys(keys)] == versions
        assert [key.version // 1000 for key in load_fleet_keys(shop)] == versions
    for text in (b"[]", b"no keys"):
        write_key_file(keys, text, private=True)
        with pytest.raises(KeyFileCorrupt):
            fleet.runner_config(elsewhere)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    own = settings(tmp_path)
    create_message_secret(own.message_key_file)
    Path(own.webhook_key_file).chmod(0o644)
    with pytest.raises(KeyFileExposed):
        fleet.runner_config(own)


async def test_the_fleet_of_the_local_stack_does_what_is_enqueued(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    jobs = JobClient(valkey_client, create_message_secret(tmp_path / "message.key"))
    with (
        receiving() as receiver,
        JobFleetComponent(tmp_path, settings(tmp_path, valkey_url=valkey_server.url)),
    ):
        work = catalog.DeliverWebhook(
            url=receiver.url, recipient="alice", event="e", body=msgspec.Raw(b"{}")
        )
        assert await jobs.enqueue(catalog.make_job("w-1", work))
        assert not await jobs.enqueue(catalog.make_job("w-1", work))
        done = await jobs.wait("w-1", 20.0)
        assert done is not None
        assert (done.state, done.attempt) == ("done", 1)
        assert len(receiver.got) == 1
    assert await valkey_client.hlen(job_keys.beats(job_keys.FLEET_TAG)) == 0  # it signed off


async def test_a_fleet_of_messages_sends_them_by_their_providers(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    twilio, fcm = TwilioServer(), FcmServer(key.public_key())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {
        "type": "service_account",
        "project_id": providers.PROJECT,
        "client_email": providers.ROBOT,
    }
    account |= {"private_key": pem, "token_uri": f"{fcm.url}/token"}
    (token, push_key) = (tmp_path / "twilio.token", tmp_path / "push.json")
    write_key_file(token, providers.TOKEN.encode() + b"\n", private=True)
    write_key_file(push_key, msgspec.json.encode(account), private=True)
    own = settings(
        tmp_path,
        valkey_url=valkey_server.url,
        jobs_queues=("sms", "push"),
        jobs_slots=1,  # one child, and so one login
        jobs_recycle=100,
        dead_letter_days=3,
        messaging_url=twilio.url,
        messaging_account=providers.ACCOUNT,
        messaging_token_file=str(token),
        messaging_sms_sender="+15005550006",
        push_url=fcm.url,
        push_key_file=str(push_key),
    )
    jobs = JobClient(valkey_client, create_message_secret(own.message_key_file))
    twilio.faults = [(429, {"Retry-After": "1"}, {"code": 20429})]
    with serving(twilio), serving(fcm), JobFleetComponent(tmp_path, own):
        sms = catalog.make_job("s-1", catalog.SendSms(to="+886912345678", text="filled"))
        pushes = [
            catalog.make_job(f"p-{n}", catalog.SendPush(token=token, title="filled", text="2330"))
            for n, token in enumerate(("phone", "gone", "phone"))
        ]
        for job in (sms, *pushes):
            assert await jobs.enqueue(job)
        sent = await jobs.wait("s-1", 20.0)
        assert sent is not None
        assert (sent.state, sent.attempt, len(twilio.got)) == ("done", 2, 2)
        ends = [await jobs.wait(job.job_id, 20.0) for job in pushes]
    assert [end.state for end in ends if end] == ["done", "failed", "done"]
    results = [end.result for end in ends if end]
    assert results[1] is not None
    failure = results[1].failure
    assert failure is not None
    assert (failure.code, failure.detail) == ("MESSAGE_REFUSED", "status 404 UNREGISTERED")
    assert fcm.logins == 1
    kept = await valkey_client.ttl(job_keys.job(job_keys.FLEET_TAG, "p-1"))
    assert 2 * 86_400 < kept <= 3 * 86_400
    write_key_file(tmp_path / "no.json", b"[]", private=True)
    with pytest.raises(fleet.ProviderKeyUnreadable):
        fleet.runner_config(own.model_copy(update={"push_key_file": str(tmp_path / "no.json")}))


async def test_webhooks_carry_both_signatures_while_their_key_is_rotated(
    tmp_path: Path,
    valkey_server: ValkeyServer,
    valkey_client: Redis,
    migrated_database: str,
    commands: CommandForker,
) -> None:
    """So it continues with former runners, also when the message secret is rotated."""
    jobs = JobClient(valkey_client, create_message_secret(tmp_path / "message.key"))
    own = settings(tmp_path, valkey_url=valkey_server.url)
    places = {
        "BERTH_DATABASE_URL": migrated_database,
        "BERTH_WEBHOOK_KEY_FILE": own.webhook_key_file,
        "BERTH_MESSAGE_KEY_FILE": str(own.message_key_file),
    }

    def berth_keys(step: str, key: str) -> None:
        done = commands.run("keys", step, key, **places)
        assert done.code == 0, done.err

    async def signatures(job_id: str) -> int:
        """How many the delivery of this job has."""
        work = catalog.DeliverWebhook(
            url=receiver.url, recipient="alice", event="e", body=msgspec.Raw(b"{}")
        )
        assert await jobs.enqueue(catalog.make_job(job_id, work))
        state = await jobs.wait(job_id, 20.0)
        assert state is not None
        assert state.state == "done"
        return receiver.got[-1][1][SIGNATURE_HEADER].count("v1=")

    with receiving() as receiver:
        with JobFleetComponent(tmp_path, own):
            berth_keys("rotate", "webhooks")
            assert "comes first" in commands.run("keys", "rotate", "webhooks", **places).err
            assert await signatures("w-1") == 1
        with JobFleetComponent(tmp_path, own):
            assert await signatures("w-2") == 2
            berth_keys("rotate", "message")
            await asyncio.sleep(1.1)  # processes look at the file each second
            assert await signatures("w-3") == 2
        berth_keys("retire", "webhooks")
        with JobFleetComponent(tmp_path, own):
            assert await signatures("w-4") == 1
