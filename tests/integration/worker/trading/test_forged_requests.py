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
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.trading import make_broker_order
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import OrderState, PlaceOrder, encode
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
    harness: WorkerHarness, forge: Callable[[PlaceOrder, str, int], bytes]
) -> None:
    worker = harness.active()
    order = harness.order()
    deadline_ms = harness.now_ms() + 60_000
    signer = SECRETS.request_keys(harness.user)
    mac = sign_request(signer, harness.user, order.request_id, deadline_ms, encode(order))
    harness.push_item(forge(order, mac, deadline_ms))
    assert harness.send().failure is None  # which came after it
    assert order.order_id not in worker.placed()
    assert not harness.answered(order.request_id)
    assert harness.states(order.order_id) == []
    assert harness.processing() == 0
    assert len(worker.logged("request_refused")) == 1


def test_a_forged_item_in_the_processing_list_is_not_answered_either(
    harness: WorkerHarness,
) -> None:
    order, genuine = harness.order(), harness.order()
    harness.enqueue(genuine)
    item = parse_frame(harness.client.execute("RPOP", keys.requests(harness.user)))
    forged = f"{item.deadline_ms}|{order.request_id}|{item.mac}|".encode() + encode(order)
    for raw_item in (forged, item.raw):
        harness.client.execute("LPUSH", keys.processing(harness.user), raw_item)
    harness.active()
    answer = harness.answer(genuine.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    assert harness.send().failure is None
    assert not harness.answered(order.request_id)
    assert harness.processing() == 0


def test_a_genuine_old_order_in_the_processing_list_is_not_answered_either(
    harness: WorkerHarness,
) -> None:
    late, restored, open_one, asked = (
        harness.order(),
        harness.order(generation="g0"),
        harness.order(),
        harness.order(),
    )
    items = [
        harness.enqueue(late, ttl_ms=1),
        harness.enqueue(restored),
        harness.enqueue(open_one, ttl_ms=1),
    ]
    harness.client.execute("DEL", keys.requests(harness.user))
    for item in items:
        harness.client.execute("LPUSH", keys.processing(harness.user), item)
    harness.open_orders = [open_one]
    worker = harness.active()
    answer = harness.answer(open_one.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    # What is unknown would block orders of the same symbol.
    assert harness.send(order_id=asked.order_id, symbol="2317").failure is None
    assert harness.processing() == 0
    assert worker.placed() == [asked.order_id]
    for replayed in (late, restored):
        assert not harness.answered(replayed.request_id)
        assert harness.states(replayed.order_id) == []


def test_many_forged_orders_are_counted_and_logged_once(harness: WorkerHarness) -> None:
    worker = harness.active()
    for _ in range(50):
        harness.push_item(unsigned(harness.order(), "", harness.now_ms() + 60_000))
    assert harness.send().failure is None
    assert worker.placed() != []
    assert len(worker.logged("request_refused")) == 1


def test_a_genuine_order_pushed_again_within_its_deadline_gets_its_first_answer(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    order = harness.order()
    item = harness.enqueue(order)
    first = harness.answer(order.request_id).outcome
    harness.client.execute("DEL", keys.journal(harness.user, order.order_id))
    harness.push_item(item)
    assert harness.send().failure is None
    assert worker.placed().count(order.order_id) == 1
    assert harness.answer(order.request_id).outcome == first


def test_a_genuine_order_pushed_again_to_a_fresh_session_is_not_executed(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    order = harness.order()
    item = harness.enqueue(order)
    harness.answer(order.request_id)
    os.kill(worker.child("session"), signal.SIGKILL)
    harness.revive(worker)
    harness.client.execute("DEL", keys.journal(harness.user, order.order_id))
    harness.push_item(item)
    assert harness.send().failure is None
    assert worker.placed().count(order.order_id) == 1


def test_a_genuine_order_pushed_again_after_its_deadline_is_not_executed_by_the_next_worker(
    harness: WorkerHarness,
) -> None:
    """Which knows nothing of it: somebody took away the order's journal, its answer and what was
    seen."""
    first = harness.active()
    order = harness.order()
    item = harness.enqueue(order, ttl_ms=3_000)
    assert harness.answer(order.request_id).failure is None
    first.kill()
    names = (keys.seen, keys.response, keys.journal)
    gone = [
        keys.journal(harness.user, order.order_id),
        *(name(harness.user, order.request_id) for name in names),
    ]
    harness.client.execute("DEL", *gone)
    second = harness.ready()
    assert harness.claim(second, claim_id="c2", epoch=2).failure is None
    eventually(lambda: harness.now_ms() > parse_frame(item).deadline_ms, "the deadline")
    harness.push_item(item)
    assert harness.send().failure is None  # which came after it
    assert order.order_id not in second.placed()
    assert not harness.answered(order.request_id)
    assert [line["reason"] for line in second.logged("request_refused")] == ["late"]


@pytest.mark.parametrize("kept", ["nothing", "its journal entry", "its first event", "the list"])
def test_a_genuine_order_pushed_again_before_its_deadline_is_submitted_twice_if_nothing_shows_it(
    harness: WorkerHarness, kept: str
) -> None:
    """By the next worker. Each of the other three keeps it from that: the journal entry, the event
    that the submission began, by which our books know it, and the broker's list."""
    first = harness.active()
    order = harness.order()
    item = harness.enqueue(order)
    assert harness.answer(order.request_id).failure is None
    assert first.placed() == [order.order_id]
    first.kill()
    names = [name(harness.user, order.request_id) for name in (keys.seen, keys.response)]
    if kept != "its journal entry":
        names.append(keys.journal(harness.user, order.order_id))
    harness.client.execute("DEL", *names)
    began = kept == "its first event"
    harness.open_orders = [msgspec.structs.replace(order, begun=began)]
    second = harness.ready()
    if kept == "the list":
        second.broker_lists(make_broker_order(order, OrderState.SUBMITTED))
    assert harness.claim(second, claim_id="c2", epoch=2).failure is None
    harness.push_item(item)
    outcome = harness.answer(order.request_id).outcome
    assert outcome is not None
    assert second.placed() == ([order.order_id] if kept == "nothing" else [])
    if kept != "nothing":
        known = OrderState.SUBMITTED if kept == "the list" else OrderState.UNKNOWN
        assert outcome.state == known
