"""The payload codec: what it refuses, how it follows its file, and workflows that run under a
rotation."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client, WorkflowFailureError, WorkflowHistory
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal import connection
from infra.temporal.codec import (
    ENCODING,
    PayloadEncryption,
    PayloadNotDecrypted,
    PayloadScope,
    data_converter,
    is_refused,
)
from infra.vault import key_file, keyring
from infra.vault.secret_versions import (
    BOUND_PAYLOADS,
    SecretVersionFile,
    add_version,
    create_versions,
    load_versions,
)
from tests.replay.test_replay import FILES, WORKFLOWS, read
from tests.support.message_signing import age_versions
from workflows.sandbox import workflow_runner

PLAIN = Payload(metadata={"encoding": b"json/plain"}, data=b'"words of a user"')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_versions(tmp_path / "temporal.key", payload_format=BOUND_PAYLOADS)
    return tmp_path / "temporal.key"


def _codec(path: Path, check_period: float = 0.0) -> PayloadEncryption:
    return PayloadEncryption(SecretVersionFile(path, check_period=check_period))


async def _refuses(codec: PayloadEncryption, payload: Payload) -> bool:
    """Whether it neither decrypts nor raises, as an exception would fail the whole workflow
    task."""
    with pytest.raises(PayloadNotDecrypted):
        codec.decrypt(payload)
    [decoded] = await codec.decode([payload])
    return is_refused(decoded)


async def test_what_is_altered_or_under_another_key_is_refused(path: Path, tmp_path: Path) -> None:
    codec = _codec(path)
    [first], [again] = await codec.encode([PLAIN]), await codec.encode([PLAIN])
    assert first.data != again.data
    assert b"words" not in first.SerializeToString()
    assert await codec.decode([first]) == [PLAIN]
    altered = Payload(metadata=first.metadata, data=first.data[:-1] + bytes([first.data[-1] ^ 1]))
    cut = Payload(metadata=first.metadata, data=first.data[:5])
    renamed = Payload(metadata={"encoding": ENCODING, "encryption-key-id": b"9"}, data=first.data)
    long = Payload(metadata={**first.metadata, "namespace": b"x" * 70_000}, data=first.data)
    for bad in (altered, cut, renamed, long, Payload(metadata={"encoding": ENCODING})):
        assert await _refuses(codec, bad)
    assert codec.refused.count == 5
    create_versions(tmp_path / "other.key")
    assert await _refuses(_codec(tmp_path / "other.key"), first)


async def test_a_payload_is_read_in_its_workflow_and_namespace_only(path: Path) -> None:
    def of(workflow_id: str, namespace: str = "default") -> PayloadEncryption:
        return _codec(path).with_scope(PayloadScope.of_workflow(namespace, workflow_id))

    [alices] = await of("user-worker-alice").encode([PLAIN])
    assert alices.metadata["workflow-id"] == b"user-worker-alice"
    assert await of("user-worker-alice").decode([alices]) == [PLAIN]
    assert await _refuses(of("user-worker-bob"), alices)
    assert await _refuses(of("user-worker-alice", "other"), alices)
    bobs = Payload(
        metadata={**alices.metadata, "workflow-id": b"user-worker-bob"}, data=alices.data
    )
    assert await _refuses(of("user-worker-bob"), bobs)
    # The codec server is not told a workflow's id; it notices the new name all the same.
    assert await _codec(path).decode([alices]) == [PLAIN]
    assert await _refuses(_codec(path), bobs)
    [scheduled] = await of("maintenance").encode([PLAIN])
    assert await of("maintenance-2026-11-27T00:00:00Z").decode([scheduled]) == [PLAIN]
    assert await _refuses(of("maintenance-batch"), scheduled)


async def test_what_is_in_clear_is_refused_unless_it_is_empty(path: Path) -> None:
    codec = _codec(path)
    empty = [
        Payload(),
        Payload(metadata={"encoding": b"binary/null"}),
        Payload(metadata={"encoding": b"json/plain"}, data=b"null"),
        Payload(metadata={"encoding": b"json/plain"}, data=b"{}"),
    ]
    assert await codec.decode(empty) == empty
    for clear in (
        PLAIN,
        Payload(data=b"x"),
        Payload(metadata={"encoding": b"binary/null"}, data=b"x"),
    ):
        assert await _refuses(codec, clear)
    settings = Settings(temporal_codec_key_file=str(path), temporal_codec_reads_clear=True)
    reading = data_converter(settings).payload_codec
    assert reading is not None
    assert await reading.decode([PLAIN]) == [PLAIN]


async def test_the_old_format_is_read_until_its_last_key_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "old.key"
    create_versions(path)  # as releases before made it
    assert b"payload_format" not in path.read_bytes()
    scope = PayloadScope.of_workflow("default", "user-worker-alice")
    codec = _codec(path).with_scope(scope)
    [old] = await codec.encode([PLAIN])
    assert set(old.metadata) == {"encoding", "encryption-key-id"}, "the release before reads it"
    add_version(path, keep=2, payload_format=BOUND_PAYLOADS)
    age_versions(path, 60)
    [new] = await codec.encode([PLAIN])
    assert new.metadata["workflow-id"] == b"user-worker-alice"
    assert await codec.decode([old, new, PLAIN]) == [PLAIN] * 3
    stripped = Payload(
        metadata={key: new.metadata[key] for key in ("encoding", "encryption-key-id")},
        data=new.data,
    )
    assert await _refuses(codec, stripped), "a new payload does not pass for an old one"
    add_version(path, keep=2, payload_format=BOUND_PAYLOADS)
    assert await codec.decode([new]) == [PLAIN]
    assert await _refuses(codec, old)
    assert await _refuses(codec, PLAIN)


async def test_a_process_reads_what_another_wrote_under_a_newer_key(path: Path) -> None:
    # Its own look at the file is due in an hour only; the unknown key makes it look now.
    late, quick = _codec(path, check_period=3600.0), _codec(path)
    [old] = await late.encode([PLAIN])
    assert add_version(path, keep=2, payload_format=BOUND_PAYLOADS) == 2
    age_versions(path, 60)
    [new] = await quick.encode([PLAIN])
    assert (old.metadata["encryption-key-id"], new.metadata["encryption-key-id"]) == (b"1", b"2")
    assert await late.decode([old, new]) == [PLAIN, PLAIN]
    add_version(path, keep=2, payload_format=BOUND_PAYLOADS)
    assert await quick.decode([new]) == [PLAIN]
    assert await _refuses(quick, old)


async def test_a_new_key_encrypts_when_other_hosts_have_had_a_minute_to_get_it(
    path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "other-host.key"
    key_file.write_key_file(copy, key_file.read_key_file(path, private=True), private=True)
    rotated, behind = _codec(path), _codec(copy)
    add_version(path, keep=2)
    [fresh] = await rotated.encode([PLAIN])
    assert await behind.decode([fresh]) == [PLAIN]
    age_versions(path, 60)
    [later] = await rotated.encode([PLAIN])
    assert later.metadata["encryption-key-id"] == b"2"


def test_rotations_at_the_same_time_lose_no_key(path: Path) -> None:
    with ThreadPoolExecutor(max_workers=8) as threads:
        made = list(threads.map(lambda _: add_version(path, keep=100), range(16)))
    assert sorted(made) == list(range(2, 18))
    assert [version.version for version in load_versions(path)] == list(range(17, 0, -1))


async def test_texts_of_failures_are_encrypted_and_codes_are_not(path: Path) -> None:
    converter = data_converter(Settings(temporal_codec_key_file=str(path)))
    failure = Failure()
    try:
        try:
            raise ValueError("inner words")
        except ValueError as inner:
            raise ApplicationError("outer words", "detail words", type="LOGIN_REJECTED") from inner
    except ApplicationError as error:
        await converter.encode_failure(error, failure)
    stored = failure.SerializeToString()
    assert b"words" not in stored
    assert b"test_codec" not in stored, "stack traces name files"
    assert b"LOGIN_REJECTED" in stored
    back = await converter.decode_failure(failure)
    assert isinstance(back, ApplicationError)
    assert (back.message, back.details, str(back.cause)) == (
        "outer words",
        ("detail words",),
        "ValueError: inner words",
    )


@workflow.defn(name="CodecTest")
class _Talks:
    """Lives through a rotation: hears words, and fails with the last of them."""

    @workflow.init
    def __init__(self, first: str) -> None:  # a word may be said before `run` begins
        self.heard = [first]

    @workflow.run
    async def run(self, first: str) -> None:
        await workflow.wait_condition(
            lambda: self.heard[-1] == "fail", timeout=timedelta(minutes=1)
        )
        raise ApplicationError(" ".join(self.heard))

    @workflow.update
    async def say(self, word: str) -> int:
        self.heard.append(word)
        return len(self.heard)

    @workflow.query
    def all(self) -> list[str]:
        return self.heard


async def test_a_workflow_continues_during_a_rotation(
    temporal_server: TemporalServer, path: Path
) -> None:
    settings = Settings(temporal_address=temporal_server.address, temporal_codec_key_file=str(path))
    client, other = await connection.open_client(settings), await connection.open_client(settings)
    worker = Worker(
        client,
        task_queue="codec",
        workflows=[_Talks],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_cached_workflows=0,  # each task replays what is under both keys
    )
    async with worker:
        options = {"id": "codec-test", "task_queue": "codec", "memo": {"note": "memo-words"}}
        handle = await client.start_workflow("CodecTest", "one", **options)  # type: ignore[call-overload]
        assert await handle.execute_update("say", "two") == 2
        add_version(path, keep=2)
        age_versions(path, 60)
        late = other.get_workflow_handle("codec-test")
        assert await late.execute_update("say", "three") == 3
        assert await late.query("all") == ["one", "two", "three"]
        await late.execute_update("say", "fail")
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
    assert str(failed.value.cause) == "one two three fail"
    assert (await (await late.describe()).memo())["note"] == "memo-words"
    without_key = await Client.connect(temporal_server.address)
    stored = without_key.get_workflow_handle("codec-test")
    shown = (await stored.fetch_history()).to_json() + str(
        (await stored.describe()).raw_description
    )
    assert not [word for word in ('"one"', "three", "memo-words") if word in shown]
    await asyncio.sleep(0.1)


async def _replay(recorded: WorkflowHistory, path: Path) -> Exception | None:
    replayer = Replayer(
        workflows=WORKFLOWS,
        workflow_runner=workflow_runner(),
        data_converter=data_converter(Settings(temporal_codec_key_file=str(path))),
        debug_mode=True,
    )
    return (await replayer.replay_workflow(recorded, raise_on_replay_failure=False)).replay_failure


async def test_recorded_histories_in_clear_are_replayed_under_keys_of_releases_before(
    path: Path, tmp_path: Path
) -> None:
    recorded = read(next(file for file in FILES if file.stem == "cold_then_shut_down"))
    old = tmp_path / "old.key"
    create_versions(old)
    add_version(old, keep=2, payload_format=BOUND_PAYLOADS)
    assert await _replay(recorded, old) is None
    assert await _replay(recorded, path) is not None


def test_the_key_file_is_made_where_it_is_set(tmp_path: Path) -> None:
    places = {
        name: tmp_path / name
        for name in (
            "master_key_file",
            "master_public_file",
            "orchestrator_key_dir",
            "message_key_file",
            "api_secret_file",
        )
    }
    settings = Settings(**places)  # type: ignore[arg-type]
    keyring.create_missing_keys(settings)
    assert data_converter(settings) is DataConverter.default
    path = tmp_path / "temporal.key"
    changed = settings.model_copy(update={"temporal_codec_key_file": str(path)})
    assert keyring.create_missing_keys(changed) == [path]
    assert [key.payload_format for key in load_versions(path)] == [BOUND_PAYLOADS]
    assert path.stat().st_mode & 0o777 == 0o600
    assert keyring.create_missing_keys(changed) == []
