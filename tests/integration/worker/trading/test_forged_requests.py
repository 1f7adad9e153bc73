"""Who can only write to Valkey makes no worker do anything, and gets no answer about anybody's
order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import msgspec
import pytest

from infra.vault.message_secret import MessageSecrets
from infra.vault.secret_versions import new_version
from tests.support.message_signing import SECRETS
from tests.support.workers.harness import WorkerStage
from tests.support.workers.process import eventually
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import PlaceOrder, encode
from worker_runtime.protocol.requests import parse_frame, sign_request

#: Another user's worker has its own request key, and those of an installation of its own.
STRANGERS = MessageSecrets([new_version(1)])


def framed(order: PlaceOrder, deadline_ms: int, mac: str) -> bytes:
    return f"{deadline_ms}|{order.request_id}|{mac}|".encode() + encode(order)


def altered(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    return framed(msgspec.structs.replace(order, quantity=499), deadline_ms, mac)


def longer(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    return framed(order, deadline_ms + 3_600_000, mac)


def unsigned(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    return framed(order, deadline_ms, "")


def without_mac(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    return f"{deadline_ms}|{order.request_id}|".encode() + encode(order)


def renamed(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    return f"{deadline_ms}|another|{mac}|".encode() + encode(order)


def by_a_stranger(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    signer = STRANGERS.request_keys(order.user_id)
    mac = sign_request(signer, order.user_id, order.request_id, deadline_ms, encode(order))
    return framed(order, deadline_ms, mac)


def by_another_user(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    signer = SECRETS.request_keys("another")
    mac = sign_request(signer, order.user_id, order.request_id, deadline_ms, encode(order))
    return framed(order, deadline_ms, mac)


def by_its_own_assignment(order: PlaceOrder, mac: str, deadline_ms: int) -> bytes:
    signer = SECRETS.assignment_keys(order.user_id, 1)
    mac = sign_request(signer, order.user_id, order.request_id, deadline_ms, encode(order))
    return framed(order, deadline_ms, mac)


FORGERIES = [altered, longer, unsigned, without_mac, renamed, by_a_stranger, by_another_user]


@pytest.mark.parametrize("forge", [*FORGERIES, by_its_own_assignment])
def test_a_forged_order_leaves_the_queue_unexecuted_and_unanswered(
    stage: WorkerStage, forge: Callable[[PlaceOrder, str, int], bytes]
) -> None:
    worker = stage.active()
    order = stage.order()
    deadline_ms = stage.now_ms() + 60_000
    signer = SECRETS.request_keys(stage.user)
    mac = sign_request(signer, stage.user, order.request_id, deadline_ms, encode(order))
    stage.push_item(forge(order, mac, deadline_ms))
    assert stage.send().failure is None  # which came after it
    assert order.order_id not in worker.placed()
    assert not stage.answered(order.request_id)
    assert stage.states(order.order_id) == []
    assert stage.processing() == 0
    assert len(worker.logged("request_refused")) == 1


def test_a_forged_item_in_the_processing_list_is_not_answered_either(stage: WorkerStage) -> None:
    order, genuine = stage.order(), stage.order()
    stage.enqueue(genuine)
    item = parse_frame(stage.client.execute("RPOP", keys.requests(stage.user)))
    forged = f"{item.deadline_ms}|{order.request_id}|{item.mac}|".encode() + encode(order)
    for left in (forged, item.raw):
        stage.client.execute("LPUSH", keys.processing(stage.user), left)
    stage.active()
    answer = stage.answer(genuine.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    assert stage.send().failure is None
    assert not stage.answered(order.request_id)
    assert stage.processing() == 0


def test_a_genuine_old_order_in_the_processing_list_is_not_answered_either(
    stage: WorkerStage,
) -> None:
    late, restored, open_one, asked = (
        stage.order(),
        stage.order(generation="g0"),
        stage.order(),
        stage.order(),
    )
    items = [
        stage.enqueue(late, ttl_ms=1),
        stage.enqueue(restored),
        stage.enqueue(open_one, ttl_ms=1),
    ]
    stage.client.execute("DEL", keys.requests(stage.user))
    for item in items:
        stage.client.execute("LPUSH", keys.processing(stage.user), item)
    stage.open_orders = [open_one]
    worker = stage.active()
    answer = stage.answer(open_one.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    # What is unknown would block orders of the same symbol.
    assert stage.send(order_id=asked.order_id, symbol="2317").failure is None
    assert stage.processing() == 0
    assert worker.placed() == [asked.order_id]
    for replayed in (late, restored):
        assert not stage.answered(replayed.request_id)
        assert stage.states(replayed.order_id) == []


def test_many_forged_orders_are_counted_and_logged_once(stage: WorkerStage) -> None:
    worker = stage.active()
    for _ in range(50):
        stage.push_item(unsigned(stage.order(), "", stage.now_ms() + 60_000))
    assert stage.send().failure is None
    assert worker.placed() != []
    assert len(worker.logged("request_refused")) == 1


def test_a_genuine_order_pushed_again_within_its_deadline_gets_its_first_answer(
    stage: WorkerStage,
) -> None:
    worker = stage.active()
    order = stage.order()
    item = stage.enqueue(order)
    first = stage.answer(order.request_id).outcome
    stage.client.execute("DEL", keys.journal(stage.user, order.order_id))
    stage.push_item(item)
    assert stage.send().failure is None
    assert worker.placed().count(order.order_id) == 1
    assert stage.answer(order.request_id).outcome == first


def test_a_genuine_order_pushed_again_to_a_fresh_session_is_not_executed(
    stage: WorkerStage,
) -> None:
    worker = stage.active()
    order = stage.order()
    item = stage.enqueue(order)
    stage.answer(order.request_id)
    os.kill(worker.child("session"), signal.SIGKILL)
    stage.revive(worker)
    stage.client.execute("DEL", keys.journal(stage.user, order.order_id))
    stage.push_item(item)
    assert stage.send().failure is None
    assert worker.placed().count(order.order_id) == 1


def test_a_genuine_order_pushed_again_after_its_deadline_is_not_executed_by_the_next_worker(
    stage: WorkerStage,
) -> None:
    """Which knows nothing of it: somebody took away the order's journal, its answer and what was
    seen."""
    first = stage.active()
    order = stage.order()
    item = stage.enqueue(order, ttl_ms=3_000)
    assert stage.answer(order.request_id).failure is None
    first.kill()
    names = (keys.seen, keys.response, keys.journal)
    gone = [
        keys.journal(stage.user, order.order_id),
        *(name(stage.user, order.request_id) for name in names),
    ]
    stage.client.execute("DEL", *gone)
    second = stage.ready()
    assert stage.claim(second, claim_id="c2", epoch=2).failure is None
    eventually(lambda: stage.now_ms() > parse_frame(item).deadline_ms, "the deadline")
    stage.push_item(item)
    assert stage.send().failure is None  # which came after it
    assert order.order_id not in second.placed()
    assert not stage.answered(order.request_id)
    assert [line["reason"] for line in second.logged("request_refused")] == ["late"]
