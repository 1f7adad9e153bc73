"""An order's workflow: events first, growing pauses, an end or an operator."""

from __future__ import annotations

from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import until
from tests.support.workflows.order_fakes import (
    FILLED,
    LISTED,
    UNREACHABLE,
    FakeBook,
    follow,
    following,
)
from workflows.order.messages import VerificationFinding, Verified
from workflows.order.workflow import OrderWorkflow


def missing(now: float, *, certain: bool = True) -> Verified:
    return Verified(
        finding=VerificationFinding.MISSING,
        state="unknown",
        complete=True,
        certain=certain,
        dead=True,
        quiet_since=now,
    )


async def clock(env: WorkflowEnvironment) -> float:
    return (await env.get_current_time()).timestamp()


async def test_an_order_that_events_have_settled_costs_one_check(
    skipping: WorkflowEnvironment,
) -> None:
    book = FakeBook(FILLED)
    async with following(skipping.client, book):
        assert await (await follow(skipping.client, "o")).result() == "filled"
    assert book.asked == [0]
    assert (book.settled, book.demands) == ([], [])


async def test_a_resting_order_is_checked_in_growing_pauses_until_it_is_filled(
    skipping: WorkflowEnvironment,
) -> None:
    book = FakeBook(*[LISTED] * 8, FILLED)
    async with following(skipping.client, book):
        began = await clock(skipping)
        handle = await follow(skipping.client, "o")
        assert await handle.result() == "filled"
        took = await clock(skipping) - began
    assert book.asked == list(range(9))
    assert took >= 240  # 2 + 4 + 8 + 16 + 32 + 60 + 60 + 60


async def test_an_order_that_is_certainly_absent_is_rejected_after_a_minute(
    skipping: WorkflowEnvironment,
) -> None:
    began = await clock(skipping)
    book = FakeBook(missing(began))
    async with following(skipping.client, book):
        handle = await follow(skipping.client, "o")
        assert await handle.result() == "rejected"
        took = await clock(skipping) - began
    assert took >= 60
    [reason] = book.settled
    assert reason.startswith("never reached the broker")
    assert "check 1: the broker does not list it, and the order is unknown" in reason


async def test_where_absence_is_never_certain_operators_are_alerted_once_and_it_is_still_followed(
    skipping: WorkflowEnvironment,
) -> None:
    unsure = missing(await clock(skipping), certain=False)
    book = FakeBook(*[unsure] * 20, FILLED)
    async with following(skipping.client, book):
        handle = await follow(skipping.client, "o")
        assert await handle.result() == "filled"
    assert book.settled == []
    assert len(book.demands) == 1
    assert "does not prove" in book.demands[0]


async def test_a_broker_out_of_reach_is_a_persons_matter_after_a_quarter_of_an_hour(
    skipping: WorkflowEnvironment,
) -> None:
    book = FakeBook(*[UNREACHABLE] * 30, FILLED)
    async with following(skipping.client, book):
        handle = await follow(skipping.client, "o")
        assert await handle.result() == "filled"
    [demand] = book.demands
    assert "BROKER_UNREACHABLE" in demand


async def test_the_end_of_the_trading_day_ends_it_on_the_list_for_a_person(
    skipping: WorkflowEnvironment,
) -> None:
    book = FakeBook(LISTED)
    async with following(skipping.client, book):
        handle = await follow(skipping.client, "o", day_end=await clock(skipping) + 600)
        assert await handle.result() == "submitted"
    [demand] = book.demands
    assert demand.startswith("its trading day has ended")


async def test_a_recheck_checks_at_once(skipping: WorkflowEnvironment) -> None:
    book = FakeBook(LISTED)
    async with following(skipping.client, book):
        handle = await follow(skipping.client, "o", first_pause=30.0)
        await until(lambda: len(book.asked) == 1)
        book.checks = [FILLED]
        await handle.signal(OrderWorkflow.recheck)
        assert await handle.result() == "filled"
    assert book.asked == [0, 1]


async def test_what_it_knows_is_passed_to_a_new_run_after_a_release(
    skipping: WorkflowEnvironment,
) -> None:
    book = FakeBook(LISTED)
    async with following(skipping.client, book):
        handle = await follow(skipping.client, "o", first_pause=30.0)
        await until(lambda: len(book.asked) == 1)
        await handle.signal(OrderWorkflow.renew)
        await until(lambda: len(book.asked) == 3)
        latest = skipping.client.get_workflow_handle("order-o")
        view = await latest.query(OrderWorkflow.view)
        book.checks = [FILLED]
        await latest.signal(OrderWorkflow.recheck)
        assert await handle.result() == "filled"
    assert book.asked[:3] == [0, 1, 2]
    assert view.story == ("check 1: the broker lists it, and the order is submitted",)


async def test_a_database_that_is_away_only_costs_a_check(skipping: WorkflowEnvironment) -> None:
    book = FakeBook(FILLED)
    book.failures = 3
    async with following(skipping.client, book):
        handle = await follow(skipping.client, "o")
        assert await handle.result() == "filled"
    assert book.demands == []
