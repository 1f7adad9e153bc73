"""Somebody who only has Valkey queues jobs in our name, and says how jobs ended."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from infra.jobs.client import JobClient
from tests.integration.jobs.conftest import fleet, harness
from tests.support.jobs.queue import KEYS, QueueHarness
from tests.support.jobs.runners import RunnerFleet
from tests.support.jobs.scripted_program import JobScript
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import (
    Job,
    JobResult,
    JobStatus,
    encode_job,
    sign_job,
    sign_result,
)
from worker_runtime.protocol.authentication import KEY_BYTES, MessageKey
from worker_runtime.protocol.errors import InvalidSignature, NewerKeyNeeded
from worker_runtime.protocol.messages import encode

__all__ = ["fleet", "harness"]  # fixtures

MADE_UP = (MessageKey(1, b"x" * KEY_BYTES),)


def scripted(fleet: RunnerFleet, job_id: str) -> Job:
    arguments = msgspec.Raw(msgspec.json.encode(JobScript(ledger=str(fleet.ledger_path))))
    return Job(job_id=job_id, name="scripted", args=arguments)


def put(harness: QueueHarness, job: Job, body: bytes) -> None:
    """What `enqueue` does, with a text of the attacker's."""
    call = job_calls.enqueue(job, KEYS)
    call.args[1] = body
    assert harness.call(call)[0] == "queued"


def test_a_job_that_no_process_of_ours_made_is_not_run(fleet: RunnerFleet) -> None:
    runner = fleet.start()
    genuine, altered = scripted(fleet, "genuine"), scripted(fleet, "altered")
    other = msgspec.structs.replace(altered, args=msgspec.Raw(b"{}"))
    mac = sign_job(altered, KEYS).split(b" ")[0]
    forged = {
        "unsigned": encode_job(scripted(fleet, "unsigned")),
        "made-up": sign_job(scripted(fleet, "made-up"), MADE_UP),
        "of-a-user": sign_job(
            scripted(fleet, "of-a-user"), SECRETS.job_keys(job_keys.user_tag("mallory"))
        ),
        "another-id": sign_job(genuine, KEYS),
        "altered": mac + b" " + encode_job(other),
        "newer-key": sign_job(scripted(fleet, "newer-key"), (MessageKey(99, b"x" * KEY_BYTES),)),
        "garbled": b"\xff",
        "empty": b"",
    }
    for job_id, body in forged.items():
        put(fleet.harness, scripted(fleet, job_id), body)
    put(fleet.harness, genuine, sign_job(genuine, KEYS))
    assert fleet.result("genuine").status == JobStatus.DONE
    for job_id in forged:
        failed = fleet.result(job_id)
        assert failed.failure is not None
        expected_error = NewerKeyNeeded if job_id == "newer-key" else InvalidSignature
        assert (failed.status, failed.failure.code) == (JobStatus.FAILED, expected_error.code)
    assert {start.job_id for start in fleet.ledger()} == {"genuine"}
    assert len(runner.logged("job_not_authentic")) == len(forged)


def test_a_genuine_job_that_is_pushed_again_after_its_end_runs_again(fleet: RunnerFleet) -> None:
    """Once somebody has deleted what Valkey keeps of its end."""
    fleet.start()
    job = scripted(fleet, "a-mail")
    body = sign_job(job, KEYS)
    put(fleet.harness, job, body)
    assert fleet.result(job.job_id).status == JobStatus.DONE
    assert fleet.harness.call(job_calls.enqueue(job, KEYS))[0] == "seen"
    kept = (job_keys.job, job_keys.result)
    fleet.harness.client.execute("DEL", *(name(job_keys.FLEET_TAG, job.job_id) for name in kept))
    put(fleet.harness, job, body)
    assert fleet.result(job.job_id).status == JobStatus.DONE
    assert [start.job_id for start in fleet.ledger()] == [job.job_id] * 2


@pytest.mark.parametrize("tag", [job_keys.FLEET_TAG, job_keys.user_tag("alice")])
async def test_a_forged_end_of_a_job_is_reported_as_unknown(valkey_client: Redis, tag: str) -> None:
    client: Any = valkey_client
    jobs, own = JobClient(client, SECRETS), SECRETS.job_keys(tag)
    done = JobResult(job_id="j", status=JobStatus.DONE, value=msgspec.Raw(b'"all is well"'))
    refused = ("berth_messages_refused_total", {"kind": "job result"})
    before = REGISTRY.get_sample_value(*refused) or 0
    signed = sign_result(done, own)
    for stored in (
        encode(done),  # as a script writes it of a runner that died
        sign_result(done, MADE_UP),
        sign_result(done, SECRETS.job_keys(job_keys.user_tag("mallory"))),
        sign_result(msgspec.structs.replace(done, job_id="another"), own),
        signed.replace(b"well", b"lost"),
        b"\xff",
    ):
        await client.set(job_keys.result(tag, "j"), stored)
        state = await jobs.get("j", tag=tag)
        assert state is not None
        assert state.result is not None
        assert state.result.failure is not None
        assert (state.state, state.result.failure.code) == ("failed", "JOB_OUTCOME_UNKNOWN")
        assert bytes(state.result.value) == b"null"
    assert (REGISTRY.get_sample_value(*refused) or 0) - before == 5
    await client.set(job_keys.result(tag, "j"), signed)
    state = await jobs.get("j", tag=tag)
    assert state is not None
    assert state.result is not None
    assert (state.state, encode(state.result)) == ("done", encode(done))


@pytest.mark.parametrize("forged", ["done", "cancelled", "", "x" * 100])
async def test_a_state_in_which_no_script_leaves_a_job_ends_it_as_unknown(
    valkey_client: Redis, forged: str
) -> None:
    """It would be told as done and be forgotten, a mail that was never sent."""
    client: Any = valkey_client
    await client.hset(
        job_keys.job(job_keys.FLEET_TAG, "j"), mapping={"state": forged, "name": "email"}
    )
    state = await JobClient(client, SECRETS).get("j")
    assert state is not None
    assert state.result is not None
    assert state.result.failure is not None
    assert (state.state, state.result.failure.code) == ("failed", "JOB_OUTCOME_UNKNOWN")
