"""The payload codec: what it refuses, how it follows its file, and workflows that run under a rotation."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client, WorkflowFailureError
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal import connection
from infra.temporal.codec import ENCODING, PayloadEncryption, PayloadNotDecrypted, data_converter
from infra.vault import key_file, keyring
from infra.vault.secret_versions import SecretVersionFile, add_version, create_versions, load_versions
from tests.replay.test_replay import FILES, WORKFLOWS, read
from tests.signed import age_versions
from workflows.sandbox import workflow_runner

PLAIN = Payload(metadata={"encoding": b"json/plain"}, data=b'"words of a user"')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_versions(tmp_path / "temporal.key")
    return tmp_path / "temporal.key"


def _codec(path: Path, check_period: float = 0.0) -> PayloadEncryption:
    return PayloadEncryption(SecretVersionFile(path, check_period=check_period))


async def test_what_is_altered_or_under_another_key_is_refused(path: Path, tmp_path: Path) -> None:
    codec = _codec(path)
    [one], [again] = await codec.encode([PLAIN]), await codec.encode([PLAIN])
    assert one.data != again.data
    assert b"words" not in one.SerializeToString()
    assert await codec.decode([one, PLAIN]) == [PLAIN, PLAIN]
    altered = Payload(metadata=one.metadata, data=one.data[:-1] + bytes([one.data[-1] ^ 1]))
    cut = Payload(metadata=one.metadata, data=one.data[:5])
    renamed = Payload(metadata={"encoding": ENCODING, "encryption-key-id": b"9"}, data=one.data)
    for bad in (altered, cut, renamed, Payload(metadata={"encoding": ENCODING})):
        with pytest.raises(PayloadNotDecrypted):
            await codec.decode([bad])
    create_versions(tmp_path / "other.key")
    with pytest.raises(PayloadNotDecrypted):
        await _codec(tmp_path / "other.key").decode([one])


async def test_a_process_reads_what_another_wrote_under_a_newer_key(path: Path) -> None:
    # Its own look at the file is due in an hour only; the unknown key makes it look now.
    late, quick = _codec(path, check_period=3600.0), _codec(path)
    [old] = await late.encode([PLAIN])
    assert add_version(path, keep=2) == 2
    age_versions(path, 60)
    [new] = await quick.encode([PLAIN])
    assert (old.metadata["encryption-key-id"], new.metadata["encryption-key-id"]) == (b"1", b"2")
    assert await late.decode([old, new]) == [PLAIN, PLAIN]
    add_version(path, keep=2)
    assert await quick.decode([new]) == [PLAIN]
    with pytest.raises(PayloadNotDecrypted):
        await quick.decode([old])


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
    assert [one.version for one in load_versions(path)] == list(range(17, 0, -1))


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
        *("outer words", ("detail words",), "ValueError: inner words"),
    )


@workflow.defn(name="CodecTest")
class _Talks:
    """Lives through a rotation: hears words, and fails with the last of them."""

    @workflow.init
    def __init__(self, first: str) -> None:  # a word may be said before `run` begins
        self.heard = [first]

    @workflow.run
    async def run(self, first: str) -> None:
        await workflow.wait_condition(lambda: self.heard[-1] == "fail", timeout=timedelta(minutes=1))
        raise ApplicationError(" ".join(self.heard))

    @workflow.update
    async def say(self, word: str) -> int:
        self.heard.append(word)
        return len(self.heard)

    @workflow.query
    def all(self) -> list[str]:
        return self.heard


async def test_a_workflow_goes_on_under_a_rotation(temporal_server: TemporalServer, path: Path) -> None:
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
    shown = (await stored.fetch_history()).to_json() + str((await stored.describe()).raw_description)
    assert not [word for word in ('"one"', "three", "memo-words") if word in shown]
    await asyncio.sleep(0.1)


async def test_recorded_histories_in_clear_are_replayed_with_the_codec(path: Path) -> None:
    converter = data_converter(Settings(temporal_codec_key_file=str(path)))
    recorded = next(file for file in FILES if file.stem == "cold_then_shut_down")
    replayer = Replayer(
        workflows=WORKFLOWS, workflow_runner=workflow_runner(), data_converter=converter, debug_mode=True
    )
    result = await replayer.replay_workflow(read(recorded), raise_on_replay_failure=False)
    assert result.replay_failure is None


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
    assert path.stat().st_mode & 0o777 == 0o600
    assert keyring.create_missing_keys(changed) == []
