"""The message secret of the tests, and what the parts sign with it.

Every test has the same secret, so that a scripted part needs nobody to give it keys.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from infra.vault import key_file, secret_versions
from infra.vault.message_secret import MessageSecretFile, MessageSecrets
from infra.vault.secret_versions import SecretVersion
from worker_runtime.protocol.answers import SERVICE, read_answer, sign_answer, worker_author
from worker_runtime.protocol.keys import MARK_TTL_S
from worker_runtime.protocol.messages import Answer, RequestMessage, encode
from worker_runtime.protocol.requests import OPEN_SWITCH, UserSwitch, sign_request
from worker_runtime.protocol.worker_reports import VALID_UNTIL, sign_metadata

VERSION = SecretVersion(1, b"m" * 32, 0)
SECRETS = MessageSecrets([VERSION])
#: Milliseconds that the id of a request is remembered after its deadline.
HOUR = 3_600_000


def write_secret(path: Path) -> Path:
    """The key file that the servers of a test read."""
    key_file.write_key_file(path, msgspec.json.encode([VERSION]), private=True)
    return path


def create_message_secret(path: Path) -> MessageSecretFile:
    """A secret of its own."""
    secret_versions.create_versions(path)
    return MessageSecretFile(path)


def age_versions(path: Path, seconds: int) -> None:
    """As if the versions in the file had been made so much earlier."""
    aged = [
        msgspec.structs.replace(version, made_at=version.made_at - seconds)
        for version in secret_versions.load_versions(path)
    ]
    key_file.write_key_file(path, msgspec.json.encode(aged), private=True)


def enqueue_args(
    request: RequestMessage, deadline_ms: int, secrets: MessageSecrets = SECRETS
) -> list[Any]:
    """The ARGV of `enqueue.lua`."""
    payload = encode(request)
    return raw_enqueue_args(request.user_id, request.request_id, payload, deadline_ms, secrets)


def raw_enqueue_args(
    user_id: str,
    request_id: str,
    payload: bytes,
    deadline_ms: int,
    secrets: MessageSecrets = SECRETS,
) -> list[Any]:
    mac = sign_request(secrets.request_keys(user_id), user_id, request_id, deadline_ms, payload)
    return [request_id, payload, deadline_ms, HOUR, mac]


def switch_words(user_id: str, switch: UserSwitch = OPEN_SWITCH) -> list[str | int]:
    """The last ARGV of `set_owner.lua`."""
    return switch.words(SECRETS.request_keys(user_id), user_id)


def switch_args(user_id: str, switch: UserSwitch, overwritten: str = "-") -> list[str | int]:
    """The ARGV of `write_switch.lua`."""
    version, *words = switch_words(user_id, switch)
    return [version, overwritten, *words]


def worker_answer(
    user_id: str,
    answer: Answer,
    *,
    epoch: int = 1,
    worker_id: str = "w",
    secrets: MessageSecrets = SECRETS,
) -> bytes:
    """An answer as the user's worker of this epoch writes it."""
    keys = secrets.assignment_keys(user_id, epoch)
    return sign_answer(keys, user_id, worker_author(epoch, worker_id), answer)


def service_answer(user_id: str, answer: Answer, secrets: MessageSecrets = SECRETS) -> bytes:
    """An answer as the API or an orchestrator writes it."""
    return sign_answer(secrets.service_keys(user_id), user_id, SERVICE, answer)


def read_workers_answer(data: bytes, user_id: str, secrets: MessageSecrets = SECRETS) -> Answer:
    """A worker's answer, which must be its own."""
    signed = read_answer(data)
    assert signed.epoch is not None
    assert signed.is_authentic(secrets.assignment_keys(user_id, signed.epoch), user_id)
    return signed.answer


def worker_metadata(
    user_id: str, secrets: MessageSecrets = SECRETS, **fields: str | int
) -> list[Any]:
    """Metadata with `epoch` and `worker` as the worker writes them: words, valid as long as a
    mark."""
    until = int((time.time() + MARK_TTL_S) * 1000)
    signed = sign_metadata(
        {**fields, VALID_UNTIL: until},
        user_id,
        secrets.assignment_keys(user_id, int(fields["epoch"])),
    )
    return [word for field in signed.items() for word in field]
