"""The settings choose the master key, and a system moves from key files to KMS."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from infra.settings import Settings
from infra.vault import keyring, vault
from infra.vault.key_file import KeyFileMissing
from infra.vault.key_pairs import UnknownMasterKey
from infra.vault.kms import KmsKeyUnknown, KmsMasterKey
from infra.vault.master_key import (
    MasterKeyRefused,
    check_unwrapper,
    check_wrapper,
    master_unwrapper,
    master_wrapper,
)
from worker_runtime.protocol.messages import Credentials

CREDENTIALS = Credentials(api_key="key-canary", secret_key="secret-canary")
# botocore's own use of datetime.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        master_key_file=tmp_path / "master.key",
        master_public_file=tmp_path / "master.pub",
        orchestrator_key_dir=tmp_path,
        message_key_file=tmp_path / "message.key",
        api_secret_file=tmp_path / "api.key",
    )


@pytest.fixture
def arn(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("kms", region_name="ap-northeast-1")
        yield client.create_key()["KeyMetadata"]["Arn"]


def test_files_are_the_master_key_unless_kms_is_named(settings: Settings) -> None:
    keyring.create_missing_keys(settings)
    assert master_wrapper(settings).key_id.startswith("local:")
    asyncio.run(check_wrapper(settings))
    asyncio.run(check_unwrapper(settings))


def test_with_kms_no_master_key_files_are_made_or_read(settings: Settings, arn: str) -> None:
    chosen = settings.model_copy(update={"master_kms_key": arn})
    made = {path.name for path in keyring.create_missing_keys(chosen)}
    assert made == {"signing.key", "launch.key", "budget.key", "message.key", "api.key"}
    assert isinstance(master_wrapper(chosen), KmsMasterKey)
    stored = asyncio.run(
        vault.encrypt_credentials(CREDENTIALS, master_wrapper(chosen), user_id="u", account_id="a")
    )
    assert stored.master_key_id == f"kms:{arn}"
    opened = vault.decrypt_credentials(
        stored, master_unwrapper(chosen), user_id="u", account_id="a"
    )
    assert asyncio.run(opened) == CREDENTIALS
    asyncio.run(check_wrapper(chosen))
    asyncio.run(check_unwrapper(chosen))


def test_what_files_wrapped_is_read_after_the_move_to_kms_and_rewrapped(
    settings: Settings, arn: str
) -> None:
    keyring.create_missing_keys(settings)
    chosen = settings.model_copy(update={"master_kms_key": arn})
    owner = {"user_id": "u", "account_id": "a"}
    before = asyncio.run(vault.encrypt_credentials(CREDENTIALS, master_wrapper(settings), **owner))
    both = master_unwrapper(chosen)
    assert asyncio.run(vault.decrypt_credentials(before, both, **owner)) == CREDENTIALS
    after = asyncio.run(vault.rewrap_data_key(before, both, master_wrapper(chosen), **owner))
    assert after.master_key_id == f"kms:{arn}"
    settings.master_key_file.unlink()
    assert (
        asyncio.run(vault.decrypt_credentials(after, master_unwrapper(chosen), **owner))
        == CREDENTIALS
    )
    with pytest.raises(UnknownMasterKey):
        asyncio.run(vault.decrypt_credentials(before, master_unwrapper(chosen), **owner))


def test_an_alias_and_nonsense_are_no_key(settings: Settings) -> None:
    for arn in ("alias/berth", "arn:aws:kms:eu-west-1:1:alias/berth", "arn:aws:s3:::bucket"):
        with pytest.raises(KmsKeyUnknown):
            master_wrapper(settings.model_copy(update={"master_kms_key": arn}))


def test_a_key_that_is_not_there_is_refused_and_waiting_does_not_help(
    settings: Settings, arn: str
) -> None:
    chosen = settings.model_copy(update={"master_kms_key": arn[:-4] + "0000"})
    for check in (check_wrapper, check_unwrapper):
        with pytest.raises(MasterKeyRefused) as caught:
            asyncio.run(check(chosen))
        assert not caught.value.retryable


def test_without_kms_missing_files_are_said(settings: Settings) -> None:
    with pytest.raises(KeyFileMissing):
        master_wrapper(settings)
