"""The message secret gives keys; its file is read and rotated."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from infra.valkey.client import reply_of
from infra.vault import key_file
from infra.vault.key_file import KeyFileCorrupt, KeyFileExposed, KeyFileMissing
from infra.vault.message_secret import MessageSecretFile, MessageSecrets
from infra.vault.secret_versions import add_version, create_versions, load_versions, new_version
from worker_runtime.protocol import keys
from worker_runtime.protocol.authentication import sign, verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "message.key"


def test_every_purpose_user_and_epoch_has_a_key_of_its_own() -> None:
    secrets = MessageSecrets([new_version(1)])
    derived = [
        *secrets.request_keys("a"),
        *secrets.service_keys("a"),
        *secrets.assignment_keys("a", 1),
        *secrets.assignment_keys("a", 2),
        *secrets.request_keys("b"),
        *secrets.assignment_keys("b", 1),
    ]
    assert len({key.key for key in derived}) == len(derived)
    assert secrets.request_keys("a") == MessageSecrets(secrets.versions).request_keys("a")
    assert secrets.for_worker("a", 2).assignment == secrets.assignment_keys("a", 2)


def test_a_running_process_follows_a_rotation(path: Path) -> None:
    create_versions(path)
    late = MessageSecretFile(path)
    process = MessageSecretFile(path, check_period=0.0)
    before = sign(process.request_keys("a"), b"use")
    assert add_version(path, keep=2) == 2
    assert [key.version for key in process.request_keys("a")] == [2, 1]
    assert verify(process.request_keys("a"), before, b"use")
    assert verify(late.request_keys("a"), sign(process.request_keys("a"), b"use"), b"use")
    assert add_version(path, keep=2) == 3
    assert [key.version for key in process.request_keys("a")] == [3, 2]
    assert not verify(process.request_keys("a"), before, b"use")


async def test_hosts_with_different_secrets_under_one_version_are_reported(
    path: Path, tmp_path: Path, valkey_client: Redis
) -> None:
    create_versions(path)
    first = MessageSecretFile(path)
    copy = tmp_path / "copy.key"
    key_file.write_key_file(copy, key_file.read_key_file(path, private=True), private=True)
    add_version(path, keep=2)
    add_version(copy, keep=2)  # on another host, instead of a copy of the new file
    hosts = [
        first,
        MessageSecretFile(path, check_period=0.0),
        MessageSecretFile(copy, check_period=0.0),
    ]
    reports = []
    for host in hosts:
        with capture_logs() as logs, suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await host.compare_with_others(valkey_client)
        reports.append([(line["event"], line["version"]) for line in logs])
    assert reports == [[], [], [("message_secret_differs", 2)]]
    stored = [await reply_of(valkey_client.get(keys.secret(version))) for version in (1, 2)]
    assert not [
        version
        for host in hosts
        for version in host.versions
        if version.secret.hex().encode() in stored
    ]


def test_a_file_that_went_bad_leaves_a_running_process_as_it_is(path: Path) -> None:
    create_versions(path)
    process = MessageSecretFile(path, check_period=0.0)
    before = process.request_keys("a")
    path.write_bytes(b"[]")
    assert process.request_keys("a") == before
    path.unlink()
    assert process.request_keys("a") == before


def test_a_file_that_was_exposed_for_a_moment_is_read_once_it_is_private(path: Path) -> None:
    create_versions(path)
    process = MessageSecretFile(path, check_period=0.0)
    add_version(path, keep=2)
    path.chmod(0o644)
    assert [key.version for key in process.request_keys("a")] == [1]
    path.chmod(0o600)
    assert [key.version for key in process.request_keys("a")] == [2, 1]


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'[[1,"AAAA",0]]', b'[{"version":1,"secret":"","made_at":0}]']
)
def test_a_file_of_another_kind_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(KeyFileCorrupt):
        load_versions(path)


def test_a_missing_or_readable_file_is_refused(path: Path) -> None:
    with pytest.raises(KeyFileMissing):
        MessageSecretFile(path)
    create_versions(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(KeyFileExposed):
        MessageSecretFile(path)


def test_secrets_are_not_shown() -> None:
    assert "\\x" not in repr(new_version(1))
