"""Control messages of an active worker."""

from __future__ import annotations

import os
import signal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.protocol import sealing
from worker_runtime.protocol.messages import ReloadCredentials, Shutdown


def test_control_messages_overtake_queued_orders(harness: WorkerHarness) -> None:
    worker = harness.active()
    slow = harness.order(symbol="SLOW")
    harness.enqueue(slow)
    eventually(worker.placed, "the slow order is at the broker")
    harness.enqueue(harness.order())
    harness.control(Shutdown(user_id=harness.user, epoch=1, reason="test"))
    worker.tell_broker("gate")
    assert worker.wait() == 0
    assert worker.placed() == [slow.order_id]


def test_forged_garbled_and_misdirected_control_messages_are_dropped(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    shutdown = Shutdown(user_id=harness.user, epoch=1, reason="forged")
    harness.control_raw(sealing.sign(shutdown, Ed25519PrivateKey.generate()))
    harness.control_raw(b"{}")
    harness.control_raw(b"\x00\xff")
    harness.control(Shutdown(user_id=harness.user, epoch=2, reason="another epoch"))
    harness.control(Shutdown(user_id="someone else", epoch=1, reason="another user"))
    assert harness.send().failure is None
    assert [line["code"] for line in worker.logged("control_dropped")] == [
        "INVALID_SIGNATURE",
        *["MALFORMED_MESSAGE"] * 2,
        *["NOT_FOR_THIS_ASSIGNMENT"] * 2,
    ]


def test_new_credentials_rebuild_only_what_changed(harness: WorkerHarness) -> None:
    worker = harness.active(accounts={"a1": "one", "a2": "two"})
    reply = harness.reload(worker, "reload-1", a1=("one", 1), a2=("new", 2), a3=("three", 1))
    assert (reply.failure, reply.worker_id) == (None, worker.worker_id)
    logins = [entry["api_key"] for entry in worker.ledger("login")]
    assert (sorted(logins[:2]), logins[2:]) == (["one", "two"], ["new", "three"])
    assert [entry["account_id"] for entry in worker.ledger("close")] == ["a2"]
    for account in ("a1", "a2", "a3"):
        assert harness.send(account_id=account).failure is None


def test_wrong_new_credentials_leave_the_old_connection(harness: WorkerHarness) -> None:
    worker = harness.active()
    reply = harness.reload(worker, "reload-1", a1=("wrong", 2))
    assert reply.failure is not None
    assert reply.failure.code == "LOGIN_REJECTED"
    [login] = reply.logins
    # It continues with version 1.
    assert (login.account_id, login.code, login.rejected) == ("a1", "", 2)
    answer = harness.send()
    assert answer.failure is None
    assert len(worker.ledger("login")) == 2
    # The failed session is closed, the old one is not.
    assert len(worker.ledger("close")) == 1
    assert harness.reload(worker, "reload-2", a1=("right", 3)).failure is None


def test_an_old_signed_reload_restores_no_old_credentials(harness: WorkerHarness) -> None:
    worker = harness.active()
    key = harness.proven_key(worker)
    old = harness.push_reload(worker, key, "reload-1", a1=("second", 2))
    assert harness.reply("reload-1").failure is None
    assert harness.reload(worker, "reload-2", a1=("third", 3)).failure is None
    harness.control_raw(old)
    eventually(lambda: worker.logged("control_dropped"), "the old message is dropped")
    # Not even with a new number: what counts are the versions of the credentials.
    assert harness.reload(worker, "reload-3", a1=("second", 2)).failure is None
    assert [login["api_key"] for login in worker.ledger("login")] == ["good", "second", "third"]
    assert harness.replies("reload-1") == 0


def test_a_shutdown_that_a_reload_has_overtaken_still_ends_the_worker(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    shutdown = sealing.sign(Shutdown(user_id=harness.user, epoch=1, reason="idle"), harness.key)
    assert harness.reload(worker, "reload-1", a1=("second", 2)).failure is None
    harness.control_raw(shutdown)
    assert worker.wait() == 0


def test_a_message_that_was_handled_before_counts_for_no_fresh_session_either(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    reload = harness.push_reload(worker, harness.proven_key(worker), "reload-1", a1=("second", 2))
    assert harness.reply("reload-1").failure is None
    os.kill(worker.child("session"), signal.SIGKILL)
    harness.revive(worker, a1=("second", 2))
    logins = len(worker.ledger("login"))
    harness.control_raw(reload)
    eventually(lambda: worker.logged("control_dropped"), "the old message is dropped")
    assert len(worker.ledger("login")) == logins
    assert harness.send().failure is None


def test_message_keys_sealed_for_another_claim_are_refused(harness: WorkerHarness) -> None:
    worker = harness.active()
    key = harness.proven_key(worker)
    harness.control(
        ReloadCredentials(
            reload_id="reload-1",
            user_id=harness.user,
            epoch=1,
            worker_id=worker.worker_id,
            accounts=[],
            sealed_keys=harness.sealed_keys(key, worker, "another"),
        )
    )
    reply = harness.reply("reload-1")
    assert reply.failure is not None
    assert reply.failure.code == "INVALID_SEAL"


def test_credentials_sealed_for_another_claim_are_refused(harness: WorkerHarness) -> None:
    worker = harness.active()
    sealed = harness.sealed(
        bytes.fromhex(harness.metadata()["public_key"]),
        "a1",
        "new",
        worker_id=worker.worker_id,
        claim_id="another",
        version=2,
    )
    harness.control(
        ReloadCredentials(
            reload_id="reload-1",
            user_id=harness.user,
            epoch=1,
            worker_id=worker.worker_id,
            accounts=[sealed],
            sealed_keys=harness.sealed_keys(harness.proven_key(worker), worker, "reload-1"),
        )
    )
    reply = harness.reply("reload-1")
    assert reply.failure is not None
    assert reply.failure.code == "INVALID_SEAL"
    assert len(worker.ledger("login")) == 1
