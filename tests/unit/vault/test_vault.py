"""Credentials at rest: nothing but the right key, user and account opens them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from moto import mock_aws

from infra.database.models import EncryptedCredentials
from infra.vault import key_file, key_pairs, vault
from infra.vault.key_file import KeyFileCorrupt, KeyFileExposed, KeyFileMissing
from infra.vault.key_pairs import (
    MasterKeyRing,
    OrchestratorKeys,
    UnknownMasterKey,
    UnwrapFailed,
    create_master_key,
    load_public,
    load_ring,
)
from infra.vault.kms import KmsMasterKey
from infra.vault.secret_versions import CHECK_INTERVAL_S, add_version, drop_before
from infra.vault.vault import DecryptFailed
from worker_runtime.protocol.messages import Credentials

CREDENTIALS = Credentials(
    api_key="key-canary", secret_key="secret-canary", ca_certificate=b"\x00\xff"
)
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)


def new_ring() -> MasterKeyRing:
    return MasterKeyRing(X25519PrivateKey.generate())


def encrypt(ring: MasterKeyRing, user_id: str = "u", account_id: str = "a") -> EncryptedCredentials:
    return asyncio.run(
        vault.encrypt_credentials(CREDENTIALS, ring.public, user_id=user_id, account_id=account_id)
    )


def decrypt(
    encrypted: EncryptedCredentials, ring: MasterKeyRing, user_id: str = "u", account_id: str = "a"
) -> Credentials:
    return asyncio.run(
        vault.decrypt_credentials(encrypted, ring, user_id=user_id, account_id=account_id)
    )


def test_credentials_are_decrypted_and_stored_nowhere_in_clear() -> None:
    ring = new_ring()
    encrypted = encrypt(ring)
    assert decrypt(encrypted, ring) == CREDENTIALS
    assert b"canary" not in encrypted.ciphertext + encrypted.wrapped_key


@given(
    field=st.sampled_from(["ciphertext", "nonce", "wrapped_key"]),
    position=st.integers(0, 10_000),
    bit=st.integers(0, 7),
)
def test_any_flipped_bit_is_refused(field: str, position: int, bit: int) -> None:
    ring = new_ring()
    encrypted = encrypt(ring)
    data = bytearray(getattr(encrypted, field))
    data[position % len(data)] ^= 1 << bit
    changed: dict[str, Any] = {field: bytes(data)}
    with pytest.raises((DecryptFailed, UnwrapFailed)):
        decrypt(replace(encrypted, **changed), ring)


@given(mine=st.tuples(names, names), other=st.tuples(names, names))
def test_another_users_or_accounts_credentials_are_refused(
    mine: tuple[str, str], other: tuple[str, str]
) -> None:
    ring = new_ring()
    encrypted = encrypt(ring, *mine)
    if mine == other:
        assert decrypt(encrypted, ring, *other) == CREDENTIALS
    else:
        with pytest.raises((DecryptFailed, UnwrapFailed)):
            decrypt(encrypted, ring, *other)


def test_user_and_account_cannot_be_shifted_against_each_other() -> None:
    ring = new_ring()
    with pytest.raises(UnwrapFailed):
        decrypt(encrypt(ring, "ab", "c"), ring, "a", "bc")


def test_another_master_key_says_that_it_is_the_wrong_one() -> None:
    with pytest.raises(UnknownMasterKey):
        decrypt(encrypt(new_ring()), new_ring())


def test_a_rotated_key_leaves_the_ciphertext_alone_and_retires_the_old_one() -> None:
    old_key, new_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    old, both, new = MasterKeyRing(old_key), MasterKeyRing(new_key, old_key), MasterKeyRing(new_key)
    encrypted = encrypt(old)
    rewrapped = asyncio.run(
        vault.rewrap_data_key(encrypted, both, both.public, user_id="u", account_id="a")
    )
    assert rewrapped.ciphertext == encrypted.ciphertext
    assert decrypt(rewrapped, new) == CREDENTIALS
    with pytest.raises(UnknownMasterKey):
        decrypt(rewrapped, old)


def test_the_same_credentials_never_give_the_same_bytes_twice() -> None:
    ring = new_ring()
    assert encrypt(ring).ciphertext != encrypt(ring).ciphertext


def test_key_files_are_private_and_read_back(tmp_path: Path) -> None:
    private, public = tmp_path / "master.key", tmp_path / "master.pub"
    created = create_master_key(private, public)
    assert private.stat().st_mode & 0o777 == 0o600
    assert load_public(public) == created
    assert load_ring(private).public == created
    made = key_pairs.create_orchestrator_keys(tmp_path)
    assert {path.name: path.stat().st_mode & 0o777 for path in made} == {
        "signing.key": 0o600,
        "launch.key": 0o600,
        "budget.key": 0o600,
    }
    keys, again = OrchestratorKeys(tmp_path), OrchestratorKeys(tmp_path)
    assert (again.public_keys, again.budget_names("p")) == (
        keys.public_keys,
        keys.budget_names("p"),
    )
    assert again.launch_token("w") == keys.launch_token("w")


def test_what_a_killed_process_left_keeps_no_key_file_from_being_written(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    (tmp_path / f".{path.name}.{os.getpid()}").write_bytes(b"half of")
    key_file.write_key_file(path, b"whole", private=True)
    assert path.read_bytes() == b"whole"


def test_running_orchestrators_follow_the_rotation_of_their_keys(tmp_path: Path) -> None:
    made = key_pairs.create_orchestrator_keys(tmp_path)
    keys = OrchestratorKeys(tmp_path)
    public, budget, token = keys.public_keys, keys.budget_names("p"), keys.launch_token("w")
    for path in made:
        assert add_version(path, keep=2) == 2
    # A worker that another orchestrator launched with the new secret is known at once.
    assert keys.launch_tokens("w") == [OrchestratorKeys(tmp_path).launch_token("w"), token]
    time.sleep(CHECK_INTERVAL_S)
    assert keys.public_keys[1:] == public
    assert keys.budget_names("p")[:1] == budget
    assert len(set(keys.budget_names("p"))) == 2
    assert [key.public_key().public_bytes_raw() for key in keys.signing_keys] == list(
        keys.public_keys
    )
    for path in made:
        drop_before(path, 2)
    assert keys.launch_tokens("w") == [OrchestratorKeys(tmp_path).launch_token("w")]


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    private = tmp_path / "master.key"
    create_master_key(private, tmp_path / "master.pub")
    private.chmod(0o640)
    with pytest.raises(KeyFileExposed, match="0640"):
        load_ring(private)


@pytest.mark.parametrize("content", [b"", b"berth-master-private-1\nzz", b"\xff\xfe", b"{}"])
def test_a_corrupt_key_file_is_refused_and_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileCorrupt, match=r"broken\.key"):
        load_ring(path)
    key_pairs.create_orchestrator_keys(tmp_path)
    path.replace(tmp_path / "launch.key")
    with pytest.raises(KeyFileCorrupt, match=r"launch\.key"):
        OrchestratorKeys(tmp_path)


def test_a_missing_key_file_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(KeyFileMissing, match="berth keys init"):
        load_public(tmp_path / "master.pub")


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[KmsMasterKey]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("kms", region_name="ap-northeast-1")
        yield KmsMasterKey(client, client.create_key()["KeyMetadata"]["Arn"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # botocore's own use of datetime
def test_kms_wraps_for_one_user_and_account_only(kms: KmsMasterKey) -> None:
    encrypted = asyncio.run(
        vault.encrypt_credentials(CREDENTIALS, kms, user_id="u", account_id="a")
    )
    assert encrypted.master_key_id.startswith("kms:arn:")
    assert (
        asyncio.run(vault.decrypt_credentials(encrypted, kms, user_id="u", account_id="a"))
        == CREDENTIALS
    )
    with pytest.raises(UnwrapFailed):
        asyncio.run(vault.decrypt_credentials(encrypted, kms, user_id="other", account_id="a"))
