"""What `berth doctor` finds, at real servers and at wrong settings."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto import mock_aws
from redis.asyncio import Redis
from structlog.testing import capture_logs

from api.app import create_app
from infra.doctor import checks as doctor
from infra.doctor import servers
from infra.doctor.servers import Check, CheckResult, log_problems, run_check
from infra.local.servers import PostgresServer, TemporalServer, ValkeyServer
from infra.settings import Settings
from infra.vault import keyring
from infra.vault.key_file import write_key_file
from tests.support.commands import CommandForker
from tests.support.receivers.mail import MailServer, port_of, serving


@pytest.fixture
def settings(
    tmp_path: Path,
    valkey_server: ValkeyServer,
    migrated_database: str,
    temporal_server: TemporalServer,
) -> Settings:
    keys = tmp_path / "keys"
    made = Settings(
        data_dir=tmp_path,
        node_socket=tmp_path / "node.sock",
        master_key_file=keys / "master.key",
        master_public_file=keys / "master.pub",
        orchestrator_key_dir=keys,
        message_key_file=keys / "message.key",
        api_secret_file=keys / "api.key",
        valkey_url=valkey_server.url,
        database_url=migrated_database,
        temporal_address=temporal_server.address,
    )
    keyring.create_missing_keys(made)
    return made


async def check_with(check: Check, settings: Settings, **changes: object) -> CheckResult:
    return await run_check(check, settings.model_copy(update=changes), timeout=20.0)


SERVERS = (
    servers.POSTGRESQL,
    servers.VALKEY,
    servers.TEMPORAL,
    servers.API_KEYS,
    doctor.ORCHESTRATOR_KEYS,
)


async def test_healthy_servers_have_no_problem(settings: Settings) -> None:
    told = [await check_with(check, settings) for check in (*SERVERS, doctor.DELIVERY)]
    assert [result.problem for result in told] == [""] * 6
    with capture_logs() as logged:
        await log_problems(settings, *SERVERS)
    assert logged == []


async def test_a_server_that_is_away_may_come_back(settings: Settings) -> None:
    away = {
        "database_url": "postgresql+asyncpg://berth@127.0.0.1:1/berth",
        "valkey_url": "redis://127.0.0.1:1/0",
        "temporal_address": "127.0.0.1:1",
        "exchange_address": "127.0.0.1:1",
    }
    for check in (
        servers.POSTGRESQL,
        servers.VALKEY,
        servers.TEMPORAL,
        servers.BROKER,
        doctor.LAUNCHER,
    ):
        result = await check_with(check, settings, **away)
        assert result.problem, check.name
        assert not result.wrong, result
    with capture_logs() as logged:
        await log_problems(settings.model_copy(update=away), servers.POSTGRESQL)
    assert [(line["event"], line["log_level"], line["check"]) for line in logged] == [
        ("check_failed", "warning", "postgresql")
    ]


async def test_what_a_server_refuses_is_wrong_and_an_error_in_the_log(
    settings: Settings, postgres_server: PostgresServer
) -> None:
    database = {"database_url": postgres_server.url("no_such_database")}
    result = await check_with(servers.POSTGRESQL, settings, **database)
    assert result.wrong
    assert "no_such_database" in result.problem
    result = await check_with(servers.TEMPORAL, settings, temporal_namespace="nowhere")
    assert (result.wrong, "has no namespace nowhere" in result.problem) == (True, True)
    result = await check_with(servers.BROKER, settings, exchange_address="nowhere")
    assert (result.wrong, result.problem) == (True, "'nowhere' is no host:port")
    # Real brokers only.
    assert not (await check_with(servers.BROKER, settings, exchange_address="")).problem
    with capture_logs() as logged:
        await log_problems(settings.model_copy(update=database), servers.POSTGRESQL)
    assert [(line["log_level"], line["settings"]) for line in logged] == [
        ("error", "BERTH_DATABASE_URL")
    ]


async def test_valkey_with_another_password_or_without_the_right_to_make_users(
    settings: Settings, valkey_client: Redis
) -> None:
    address = settings.valkey_url.removeprefix("redis://").rpartition("@")[2]
    await valkey_client.execute_command(
        "ACL", "SETUSER", "small", "on", ">pw", "~*", "+set", "+info"
    )  # type: ignore[no-untyped-call]
    try:
        result = await check_with(
            servers.VALKEY, settings, valkey_url=f"redis://small:canary@{address}"
        )
        assert result.wrong
        assert "refuses us" in result.problem
        assert "canary" not in result.problem
        small = f"redis://small:pw@{address}"
        assert not (await check_with(servers.VALKEY, settings, valkey_url=small)).problem
        result = await check_with(servers.VALKEY, settings, valkey_url=small, valkey_users=True)
        assert (result.wrong, "acl" in result.problem.lower()) == (True, True)
    finally:
        await valkey_client.execute_command("ACL", "DELUSER", "small")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("field", ["database_url", "valkey_url"])
async def test_a_url_that_nobody_understands_is_not_quoted(settings: Settings, field: str) -> None:
    check = servers.POSTGRESQL if field == "database_url" else servers.VALKEY
    for url in (
        "canary",
        "canary://u:canary@h",
        "postgresql+asyncpg://u:can/ary@h:canary/d",
        "redis://:can/ary@h",
    ):
        result = await check_with(check, settings, **{field: url})
        assert result.problem, url
        assert "canary" not in result.problem


async def test_keys_that_are_missing_exposed_or_of_another_pair(settings: Settings) -> None:
    settings.message_key_file.chmod(0o644)
    result = await check_with(servers.API_KEYS, settings)
    assert (result.wrong, "it must be 0600" in result.problem) == (True, True)
    settings.message_key_file.chmod(0o600)
    other = settings.model_copy(
        update={
            "master_key_file": settings.data_dir / "other.key",
            "master_public_file": settings.data_dir / "other.pub",
        }
    )
    keyring.create_missing_keys(other)
    result = await check_with(
        doctor.ORCHESTRATOR_KEYS, settings, master_public_file=other.master_public_file
    )
    assert (result.wrong, "is not the public half of" in result.problem) == (True, True)
    settings.api_secret_file.unlink()
    result = await check_with(servers.API_KEYS, settings)
    assert (result.wrong, "is missing" in result.problem) == (True, True)


@pytest.fixture
def mail() -> Iterator[MailServer]:
    with serving() as server:
        yield server


def with_mail(settings: Settings, mail: MailServer, **changes: object) -> Settings:
    password = settings.data_dir / "mail.password"
    write_key_file(password, b"canary", private=True)
    return settings.model_copy(
        update={
            "mail_host": "127.0.0.1",
            "mail_port": port_of(mail),
            "mail_security": "none",
            "mail_sender": "berth@example.com",
            "mail_username": "berth",
            "mail_password_file": str(password),
            **changes,
        }
    )


async def test_the_login_at_the_mail_server_is_tried_and_no_mail_is_sent(
    settings: Settings, mail: MailServer
) -> None:
    ours = with_mail(settings, mail)
    assert not (await check_with(doctor.DELIVERY, ours)).problem
    assert any(line.startswith("AUTH") for line in mail.commands)
    assert not any(line.startswith("MAIL") for line in mail.commands)
    mail.codes["AUTH"] = 535
    result = await check_with(doctor.DELIVERY, ours)
    assert (result.wrong, result.problem) == (True, "MAIL_REFUSED: SMTPAuthenticationError: 535")
    mail.codes["AUTH"] = 454
    result = await check_with(doctor.DELIVERY, ours)
    assert (result.wrong, "MAIL_DEFERRED" in result.problem) == (False, True)


async def test_a_mail_server_that_says_nothing_is_given_up(
    settings: Settings, mail: MailServer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ours = with_mail(settings, mail, mail_port=silent.getsockname()[1])
        result = await run_check(doctor.DELIVERY, ours, timeout=1.5)
    assert result.problem.startswith("no answer within")


async def test_alerts_without_a_way_to_send_them_are_wrong(settings: Settings) -> None:
    result = await check_with(doctor.DELIVERY, settings, alert_mails=("ops@example.com",))
    assert (result.wrong, "BERTH_MAIL_HOST" in result.problem) == (True, True)
    result = await check_with(
        doctor.DELIVERY, settings, alert_webhooks=("https://x.example/canary",)
    )
    assert (
        result.wrong,
        "BERTH_WEBHOOK_KEY_FILE" in result.problem,
        "canary" in result.problem,
    ) == (
        True,
        True,
        False,
    )


async def test_a_fleet_that_sends_neither_mails_nor_webhooks_needs_no_way_to(
    settings: Settings,
) -> None:
    alerts = {"alert_mails": ("ops@example.com",), "alert_webhooks": ("https://x.example/canary",)}
    for queues, problem in (
        (("sms",), ""),
        (("email",), "BERTH_MAIL_HOST"),
        (("webhook",), "WEBHOOK_KEY"),
    ):
        result = await check_with(doctor.DELIVERY, settings, jobs_queues=queues, **alerts)
        assert (bool(result.problem), problem in result.problem) == (bool(problem), True), queues


@pytest.fixture
def no_such_kms_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield "arn:aws:kms:ap-northeast-1:123456789012:key/00000000-0000-0000-0000-000000000000"


async def test_an_api_tries_kms_and_the_brokers_address_at_its_start(
    settings: Settings, no_such_kms_key: str
) -> None:
    result = await check_with(doctor.ORCHESTRATOR_KEYS, settings, master_kms_key=no_such_kms_key)
    assert (result.wrong, "NotFoundException" in result.problem) == (True, True)
    wrong = {"master_kms_key": no_such_kms_key, "exchange_address": "nowhere"}
    app = create_app(settings.model_copy(update=wrong))
    with capture_logs() as logged:
        async with app.router.lifespan_context(app), asyncio.timeout(20):
            while {"api-keys", "broker"} - {line.get("check") for line in logged}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    told = {line["check"]: line for line in logged if line["event"] == "check_failed"}
    assert set(told) == {"api-keys", "broker"}
    assert "NotFoundException" in told["api-keys"]["reason"]
    assert [line["log_level"] for line in told.values()] == ["error", "error"]


def test_the_command_prints_a_line_for_each_and_fails(
    settings: Settings, commands: CommandForker
) -> None:
    environment = {
        f"BERTH_{name.upper()}": str(getattr(settings, name))
        for name in (
            "valkey_url",
            "database_url",
            "temporal_address",
            "master_key_file",
            "message_key_file",
        )
    }
    done = commands.run("doctor", "valkey", "postgresql", **environment)
    assert (done.code, done.out.split()) == (0, ["postgresql", "ok", "valkey", "ok"])
    done = commands.run(
        "doctor", "valkey", "temporal", **{**environment, "BERTH_TEMPORAL_ADDRESS": "127.0.0.1:1"}
    )
    assert done.code == 1
    assert "look at BERTH_TEMPORAL_" in done.out
    done = commands.run("doctor", "postgresql", "vlkey", **environment)
    assert (done.code, done.out, "vlkey" in done.err) == (2, "", True)
