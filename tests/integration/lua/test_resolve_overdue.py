"""What has become of a request past its deadline, and that it cannot be executed afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lua_scripts import Scripts
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import parse_frame
from worker_runtime.protocol.scripts import ENQUEUE, RESOLVE_OVERDUE, WITHDRAW

USER = "42"
HOUR = 3_600_000


def enqueue(scripts: Scripts, request: str = "r") -> Any:
    names = [keys.seen(USER, request), keys.requests(USER), keys.doorbell(USER), keys.mark(USER)]
    return scripts.run(ENQUEUE, names, request, "payload", 1, HOUR, "mac")


def overdue(scripts: Scripts, request: str = "r") -> Any:
    names = [
        keys.seen(USER, request),
        keys.requests(USER),
        keys.processing(USER),
        keys.journal(USER, request),
        keys.response(USER, request),
    ]
    return scripts.run(RESOLVE_OVERDUE, names, request, "expired", 60, HOUR)


def test_a_request_that_is_still_queued_is_taken_back_with_its_answer(scripts: Scripts) -> None:
    enqueue(scripts, "other")
    enqueue(scripts)
    assert overdue(scripts) == ["withdrawn", ""]
    assert scripts.client.llen(keys.requests(USER)) == 1
    assert overdue(scripts) == ["answered", "expired"]


def test_a_request_that_was_never_queued_cannot_be_any_more(scripts: Scripts) -> None:
    assert overdue(scripts) == ["absent", ""]
    new, item, _ = enqueue(scripts)
    assert new == 0
    assert parse_frame(item.encode()).request_id == "r"
    assert scripts.client.llen(keys.requests(USER)) == 0
    assert overdue(scripts) == ["absent", ""]


@pytest.mark.parametrize("journaled", [True, False])
def test_a_request_that_a_worker_took_is_left_to_it(scripts: Scripts, journaled: bool) -> None:
    enqueue(scripts)
    scripts.client.lmove(keys.requests(USER), keys.processing(USER), "RIGHT", "LEFT")
    if journaled:
        scripts.client.set(keys.journal(USER, "r"), "1")
    assert overdue(scripts) == ["journaled" if journaled else "processing", ""]
    assert scripts.client.llen(keys.processing(USER)) == 1


def test_a_request_that_was_taken_and_answered_without_a_submission_is_absent(
    scripts: Scripts,
) -> None:
    enqueue(scripts)
    scripts.client.rpop(keys.requests(USER))
    assert overdue(scripts) == ["absent", ""]


def test_an_order_in_the_journal_is_not_withdrawn_though_its_item_is_queued(
    scripts: Scripts,
) -> None:
    """As if somebody had pushed it once more after a worker took it."""
    item = enqueue(scripts)[1]
    withdrawal = WITHDRAW, keys.withdrawing(USER, "r"), item, "withdrawn", 60
    scripts.client.set(keys.journal(USER, "r"), "w/1")
    assert scripts.run(*withdrawal) == 0
    assert scripts.client.llen(keys.requests(USER)) == 1
    scripts.client.delete(keys.journal(USER, "r"))
    assert scripts.run(*withdrawal) == 1


def test_of_two_orders_with_one_client_order_id_only_the_first_is_queued(scripts: Scripts) -> None:
    def enqueue_order(order: str, client: str) -> Any:
        names = [keys.seen(USER, order), keys.requests(USER), keys.doorbell(USER), keys.mark(USER)]
        args = (order, "payload", 1, HOUR, "mac", f"tag of {order}", 24 * HOUR)
        return scripts.run(ENQUEUE, [*names, keys.client_order(USER, client)], *args)

    assert enqueue_order("o1", "c")[0] == 1
    assert enqueue_order("o1", "c")[0] == 0  # a repeat of the same order
    for _ in range(2):
        assert enqueue_order("o2", "c")[:2] == [2, "o1|tag of o1"]
    assert enqueue_order("o3", "another")[0] == 1
    assert scripts.client.llen(keys.requests(USER)) == 2
    assert not scripts.client.exists(keys.seen(USER, "o2"))
    assert 23 * HOUR < scripts.client.pttl(keys.client_order(USER, "c")) <= 24 * HOUR
