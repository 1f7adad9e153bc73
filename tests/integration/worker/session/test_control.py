"""Control messages of an active worker."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.integration.worker.stage import WorkerStage
from tests.integration.worker.worker import eventually
from worker_runtime.protocol import sealing
from worker_runtime.protocol.messages import ReloadCredentials, Shutdown


def test_control_messages_overtake_queued_orders(stage: WorkerStage) -> None:
    worker = stage.active()
    slow = stage.order(symbol="SLOW")
    stage.enqueue(slow)
    eventually(worker.placed, "the slow order is at the broker")
    stage.enqueue(stage.order())
    stage.control(Shutdown(user_id=stage.user, epoch=1, reason="test"))
    worker.tell_broker("gate")
    assert worker.wait() == 0
    assert worker.placed() == [slow.order_id]


def test_forged_garbled_and_misdirected_control_messages_are_dropped(stage: WorkerStage) -> None:
    worker = stage.active()
    shutdown = Shutdown(user_id=stage.user, epoch=1, reason="forged")
    stage.control_raw(sealing.sign(shutdown, Ed25519PrivateKey.generate()))
    stage.control_raw(b"{}")
    stage.control_raw(b"\x00\xff")
    stage.control(Shutdown(user_id=stage.user, epoch=2, reason="another epoch"))
    stage.control(Shutdown(user_id="someone else", epoch=1, reason="another user"))
    assert stage.send().failure is None
    assert [line["code"] for line in worker.logged("control_dropped")] == [
        "INVALID_SIGNATURE",
        *["MALFORMED_MESSAGE"] * 2,
        *["NOT_FOR_THIS_ASSIGNMENT"] * 2,
    ]


def test_new_credentials_rebuild_only_what_changed(stage: WorkerStage) -> None:
    worker = stage.active(accounts={"a1": "one", "a2": "two"})
    reply = stage.reload(worker, "reload-1", a1=("one", 1), a2=("new", 2), a3=("three", 1))
    assert (reply.failure, reply.worker_id) == (None, worker.worker_id)
    logins = [entry["api_key"] for entry in worker.ledger("login")]
    assert logins == ["one", "two", "new", "three"]
    assert [entry["account_id"] for entry in worker.ledger("close")] == ["a2"]
    for account in ("a1", "a2", "a3"):
        assert stage.send(account_id=account).failure is None


def test_wrong_new_credentials_leave_the_old_connection(stage: WorkerStage) -> None:
    worker = stage.active()
    reply = stage.reload(worker, "reload-1", a1=("wrong", 2))
    assert reply.failure is not None
    assert reply.failure.code == "LOGIN_REJECTED"
    answer = stage.send()
    assert answer.failure is None
    assert len(worker.ledger("login")) == 2
    # The failed session is closed, the old one is not.
    assert len(worker.ledger("close")) == 1
    assert stage.reload(worker, "reload-2", a1=("right", 3)).failure is None


def test_credentials_sealed_for_another_claim_are_refused(stage: WorkerStage) -> None:
    worker = stage.active()
    sealed = stage.sealed(
        bytes.fromhex(stage.metadata()["public_key"]),
        "a1",
        "new",
        worker_id=worker.worker_id,
        claim_id="another",
        version=2,
    )
    stage.control(
        ReloadCredentials(
            reload_id="reload-1",
            user_id=stage.user,
            epoch=1,
            worker_id=worker.worker_id,
            accounts=[sealed],
        )
    )
    reply = stage.reply("reload-1")
    assert reply.failure is not None
    assert reply.failure.code == "INVALID_SEAL"
    assert len(worker.ledger("login")) == 1
