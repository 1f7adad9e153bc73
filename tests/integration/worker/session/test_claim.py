"""From the pool to a user."""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.waiting import eventually
from tests.support.workers.harness import CONNECT_TIMEOUT, WorkerHarness
from tests.support.workers.process import PATIENCE
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import Connect, ReleaseClaim
from worker_runtime.protocol.scripts import SETTLE_CLAIM


def test_a_launched_worker_announces_itself_with_a_proven_key(harness: WorkerHarness) -> None:
    worker = harness.ready()
    assert harness.client.execute("ZCARD", keys.pool_ready(harness.pool)) == 1
    entry = keys.pool_worker(harness.pool, worker.worker_id)
    task = f"task-{worker.worker_id}".encode()
    assert harness.client.execute("HMGET", entry, "task", "version") == [task, b"test"]
    status, worker_id, public_key, proof = harness.take("c1")
    assert (status, worker_id) == (b"claimed", worker.worker_id.encode())
    token = sealing.launch_token(harness.secret, worker.worker_id)
    assert sealing.check_key(token, worker.worker_id, public_key, proof)


def test_a_claimed_worker_connects_and_replies(harness: WorkerHarness) -> None:
    worker = harness.ready()
    reply = harness.claim(worker)
    assert reply.failure is None
    assert (reply.epoch, reply.attempt, reply.worker_id) == (1, 1, worker.worker_id)
    assert reply.connected_at_ms >= reply.claimed_at_ms > 0
    assert harness.mark() == f"1:{worker.worker_id}"
    metadata = harness.metadata()
    assert metadata["state"] == "Active"
    assert metadata["task"] == f"task-{worker.worker_id}"
    public_key, proof = (bytes.fromhex(metadata[name]) for name in ("public_key", "proof"))
    assert public_key == harness.public_key(worker)
    token = sealing.launch_token(harness.secret, worker.worker_id)
    assert sealing.check_key(token, worker.worker_id, public_key, proof)
    assert [entry["client"] for entry in worker.ledger("login")] == [f"{worker.worker_id}/1"]


def test_a_reserved_worker_is_claimed_from_birth_and_says_so(harness: WorkerHarness) -> None:
    worker = harness.ready(reserved_claim="c9")
    born = harness.client.execute("BLPOP", keys.pool_born(harness.pool, "c9"), PATIENCE - 5)
    assert born[1].decode() == worker.worker_id
    assert harness.client.execute("ZCARD", keys.pool_ready(harness.pool)) == 0
    reply = harness.claim(worker, claim_id="c9")
    assert reply.failure is None


def test_a_claim_that_nobody_tells_the_worker_ends_it(harness: WorkerHarness) -> None:
    worker = harness.ready(confirm_timeout=0.5, mark_period=0.1)
    assert harness.take("c1")[0] == b"claimed"  # and its claimer dies
    assert worker.wait() == ExitCode.CLAIM_REFUSED
    assert harness.take("c1")[0] == b"gone"
    assert not harness.client.execute("EXISTS", keys.pool_worker(harness.pool, worker.worker_id))


def test_the_same_claim_twice_is_answered_twice_and_connected_once(harness: WorkerHarness) -> None:
    worker = harness.ready()
    first = harness.claim(worker)
    harness.push(worker, harness.claim_message(worker, "c1"))
    assert harness.reply("c1") == first
    assert len(worker.ledger("login")) == 1


def test_a_claim_with_a_wrong_signature_is_dropped(harness: WorkerHarness) -> None:
    worker = harness.ready()
    harness.take("c1")
    harness.own(worker.worker_id, 1)
    message = harness.claim_message(worker, "c1")
    harness.push_raw(worker, sealing.sign(message, Ed25519PrivateKey.generate()))
    harness.push_raw(worker, b"\xff no message")
    eventually(lambda: len(worker.logged("inbox_dropped")) == 2, "both were dropped")
    codes = [line["code"] for line in worker.logged("inbox_dropped")]
    assert codes == ["INVALID_SIGNATURE", "MALFORMED_MESSAGE"]
    assert worker.ledger() == []
    assert harness.replies("c1") == 0
    harness.push(worker, message)
    assert harness.reply("c1").failure is None


def test_a_claim_for_another_worker_is_dropped(harness: WorkerHarness) -> None:
    worker, other = harness.ready(), harness.ready()
    harness.push(worker, harness.claim_message(other, "c1"))
    eventually(lambda: worker.logged("inbox_dropped"), "the claim was dropped")
    assert worker.logged("inbox_dropped")[0]["code"] == "NOT_FOR_THIS_WORKER"
    assert harness.replies("c1") == 0
    assert worker.process.poll() is None


def test_a_released_claim_is_not_confirmed_and_ends_the_worker(harness: WorkerHarness) -> None:
    worker = harness.ready()
    harness.take("c1")
    entry = keys.pool_worker(harness.pool, worker.worker_id)
    assert harness.client.run(SETTLE_CLAIM, [entry], ["c1", "released"]) == b"released"
    harness.own(worker.worker_id, 1)
    harness.push(worker, harness.claim_message(worker, "c1"))
    reply = harness.reply("c1")
    assert reply.failure is not None
    assert reply.failure.code == "CLAIM_REFUSED"
    assert worker.wait() == ExitCode.CLAIM_REFUSED
    assert worker.ledger() == []


def test_credentials_sealed_to_another_key_are_refused(harness: WorkerHarness) -> None:
    worker = harness.ready()
    harness.take("c1")
    harness.own(worker.worker_id, 1)
    sealed = harness.sealed(
        sealing.new_worker_key().public_key().public_bytes_raw(),
        "a1",
        "good",
        worker_id=worker.worker_id,
        claim_id="c1",
    )
    message = harness.claim_message(worker, "c1", accounts={})
    harness.push(worker, msgspec.structs.replace(message, accounts=[sealed]))
    reply = harness.reply("c1")
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.retryable) == ("INVALID_SEAL", False)


def test_message_keys_sealed_to_another_key_end_the_claim(harness: WorkerHarness) -> None:
    worker = harness.ready()
    harness.take("c1")
    harness.own(worker.worker_id, 1)
    message = harness.claim_message(worker, "c1")
    other = sealing.new_worker_key().public_key().public_bytes_raw()
    harness.push(
        worker,
        msgspec.structs.replace(message, sealed_keys=harness.sealed_keys(other, worker, "c1")),
    )
    reply = harness.reply("c1")
    assert reply.failure is not None
    assert reply.failure.code == "INVALID_SEAL"
    assert worker.wait() == ExitCode.CLAIM_REFUSED


def test_a_claim_without_accounts_fails_for_good(harness: WorkerHarness) -> None:
    reply = harness.claim(harness.ready(), accounts={})
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.retryable) == ("UNKNOWN_ACCOUNT", False)


def test_wrong_credentials_are_reported_and_not_retried(harness: WorkerHarness) -> None:
    worker = harness.ready()
    reply = harness.claim(worker, accounts={"a1": "wrong"})
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.retryable) == ("LOGIN_REJECTED", False)
    assert len(worker.ledger("login")) == 1
    harness.push(worker, ReleaseClaim(claim_id="c1", worker_id=worker.worker_id, reason="test"))
    assert worker.wait() == ExitCode.OK


def test_a_failed_connect_is_tried_again_when_told(harness: WorkerHarness) -> None:
    worker = harness.ready()
    reply = harness.claim(worker, accounts={"a1": "wrong", "a2": "closed"})
    assert reply.failure is not None
    assert (reply.failure.code, reply.failure.retryable) == ("BROKER_UNREACHABLE", True)
    assert harness.metadata()["state"] == "Connecting"
    again = Connect(
        claim_id="c1", worker_id=worker.worker_id, attempt=2, connect_timeout=CONNECT_TIMEOUT
    )
    harness.push(worker, again)
    assert harness.reply("c1").attempt == 2
    logins = len(worker.ledger("login"))
    harness.push(worker, again)  # a replay of it spends no login
    assert harness.reply("c1").attempt == 2
    assert len(worker.ledger("login")) == logins
    worker.tell_broker("open")
    harness.push(worker, msgspec.structs.replace(again, attempt=3))
    reply = harness.reply("c1")
    assert (reply.failure, reply.attempt) == (None, 3)
    assert harness.send(account_id="a2").outcome is not None
    refused = [login for login in worker.ledger("login") if login["api_key"] == "wrong"]
    assert len(refused) == 1


def test_a_fault_of_the_adapter_at_login_is_answered(harness: WorkerHarness) -> None:
    reply = harness.claim(harness.ready(), accounts={"a1": "odd"})
    assert reply.failure is not None
    assert reply.failure.code == "BROKER_ERROR"


def test_no_secret_is_in_arguments_environment_or_log(harness: WorkerHarness) -> None:
    worker = harness.active(accounts={"a1": "canary-5c1d"})
    for pid in (worker.pid, *worker.both()):
        for name in ("cmdline", "environ"):
            try:
                content = Path(f"/proc/{pid}/{name}").read_bytes()
            except PermissionError:  # not even another process of the same user may look
                continue
            assert b"canary-5c1d" not in content
            assert worker.config.launch_token not in content
    assert b"canary-5c1d" not in worker.log_path.read_bytes()
