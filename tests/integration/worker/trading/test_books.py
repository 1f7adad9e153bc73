"""Orders wait after a login until the orchestrator has compared the books, where the account says
so."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.protocol.messages import AccountReported, OrderState, PlaceOrder
from worker_runtime.protocol.requests import BooksCompared

#: Milliseconds.
LIFE = 60_000


@pytest.fixture
def careful(harness: WorkerHarness) -> WorkerHarness:
    harness.books_first = True
    return harness


def accept(harness: WorkerHarness, account_id: str = "a1", ttl_ms: int = LIFE) -> PlaceOrder:
    order = harness.order(account_id=account_id, lifetime_ms=ttl_ms)
    harness.enqueue(order, ttl_ms=ttl_ms)
    return order


def compare(
    harness: WorkerHarness, account_id: str = "a1", *, blocks: bool = False, late_ms: int = 0
) -> None:
    """Answers the account's last report."""
    told = [event for event in harness.events() if isinstance(event, AccountReported)]
    at_ms = max(event.at_ms for event in told if event.account_id == account_id) - late_ms
    harness.control(
        BooksCompared(
            user_id=harness.user, epoch=1, account_id=account_id, at_ms=at_ms, blocks=blocks
        )
    )


def test_an_order_waits_for_the_comparison_of_this_logins_list(careful: WorkerHarness) -> None:
    worker = careful.active()
    first = accept(careful)
    eventually(lambda: careful.waiting() == 1 and careful.processing() == 0, "it is in its queue")
    compare(careful, late_ms=60_000)  # of an earlier login
    careful.control(
        BooksCompared(user_id=careful.user, epoch=1, account_id="x", at_ms=1, blocks=False)
    )
    second = accept(careful)
    eventually(
        lambda: len(careful.reports()) >= 2, "the account is listed again, as nobody has answered"
    )
    assert worker.placed() == []
    compare(careful)
    for order in (first, second):
        assert careful.answer(order.request_id).failure is None
    assert worker.placed() == [first.order_id, second.order_id]


def test_books_that_differ_refuse_what_was_accepted_before_and_nothing_later(
    careful: WorkerHarness,
) -> None:
    worker = careful.active()
    before = accept(careful)
    compare(careful, blocks=True)
    answer = careful.answer(before.request_id)
    assert answer.outcome is not None
    assert answer.failure is not None
    assert (answer.outcome.state, answer.failure.code) == (OrderState.REJECTED, "ACCOUNT_BLOCKED")
    later = accept(careful)  # PostgreSQL took it, so an operator has looked
    assert careful.answer(later.request_id).failure is None
    assert worker.placed() == [later.order_id]


def test_a_comparison_that_comes_again_changes_nothing(careful: WorkerHarness) -> None:
    """An earlier one would let pass what was accepted before the books were found to differ."""
    worker = careful.active()
    compare(careful, blocks=True)
    compare(careful)
    before = careful.order(account_id="a1", lifetime_ms=LIFE)
    careful.enqueue(before, ttl_ms=LIFE - 10_000)
    answer = careful.answer(before.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "ACCOUNT_BLOCKED"
    assert worker.placed() == []


def test_an_order_that_nobody_compares_for_expires(careful: WorkerHarness) -> None:
    worker = careful.active()
    order = accept(careful, ttl_ms=700)
    answer = careful.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "DEADLINE_EXCEEDED"
    assert worker.placed() == []


def test_each_account_waits_for_its_own_comparison(careful: WorkerHarness) -> None:
    worker = careful.active(accounts={"a1": "good", "a2": "good"})
    eventually(
        lambda: len({report.account_id for report in careful.reports()}) == 2, "both are listed"
    )
    compare(careful, "a2")
    second, first = accept(careful, "a2"), accept(careful, "a1")
    assert careful.answer(second.request_id).failure is None
    eventually(lambda: careful.waiting() == 1, "the other one waits")
    compare(careful, "a1")
    assert careful.answer(first.request_id).failure is None
    assert worker.placed() == [second.order_id, first.order_id]


def test_a_replaced_session_waits_anew(careful: WorkerHarness) -> None:
    worker = careful.active()
    compare(careful)
    order = accept(careful)
    assert careful.answer(order.request_id).failure is None
    os.kill(worker.child("session"), signal.SIGKILL)
    assert careful.revive(worker).failure is None
    again = accept(careful)
    eventually(lambda: careful.waiting() == 1 and careful.processing() == 0, "it is in its queue")
    compare(careful)
    assert careful.answer(again.request_id).failure is None
