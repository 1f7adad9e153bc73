"""The runs of an order's workflow whose histories are kept."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from temporalio.client import Client, WorkflowHandle, WorkflowHistory

from tests.support.workflows.fakes import until
from tests.support.workflows.order_fakes import FILLED, LISTED, UNREACHABLE, FakeBook, following
from workflows import names
from workflows.order.messages import FollowOrder, FollowSettings, VerificationFinding, Verified
from workflows.order.workflow import OrderWorkflow

Handle = WorkflowHandle[OrderWorkflow, str]
Scenario = Callable[[Client, FakeBook], Awaitable[WorkflowHistory]]


async def start(
    client: Client, scenario: str, *, day: float = 1000.0, first_pause: float = 0.05
) -> Handle:
    settings = FollowSettings(
        first_pause=first_pause, longest_pause=60.0, absent_after=0.0, patience=0.1
    )
    return await client.start_workflow(
        OrderWorkflow.run,
        FollowOrder(
            order_id=f"replay-{scenario}",
            user_id="replay",
            day_end=time.time() + day,
            settings=settings,
        ),
        id=names.order_id(f"replay-{scenario}"),
        task_queue=names.ORDERS_QUEUE,
    )


async def order_absent_is_settled(client: Client, book: FakeBook) -> WorkflowHistory:
    finding = VerificationFinding.MISSING
    book.checks = [
        Verified(finding=finding, state="unknown", complete=True, certain=True, dead=True)
    ]
    handle = await start(client, "absent")
    await handle.result()
    return await handle.fetch_history()


async def order_out_of_reach_then_filled(client: Client, book: FakeBook) -> WorkflowHistory:
    book.checks, book.failures = [*[UNREACHABLE] * 4, LISTED, FILLED], 2
    handle = await start(client, "out-of-reach")
    await until(lambda: len(book.demands) > 0)
    while len(book.checks) > 1:
        await handle.signal(OrderWorkflow.recheck)
        before = len(book.asked)
        await until(lambda before=before: len(book.asked) > before or len(book.checks) == 1)  # type: ignore[misc]
    await handle.result()
    return await handle.fetch_history()


async def order_still_open_at_the_days_end(client: Client, book: FakeBook) -> WorkflowHistory:
    book.checks = [LISTED]
    handle = await start(client, "day-end", day=0.5)
    await handle.result()
    return await handle.fetch_history()


async def order_renewed(client: Client, book: FakeBook) -> WorkflowHistory:
    book.checks = [LISTED]
    handle = await start(client, "renewed", first_pause=30.0)
    await until(lambda: len(book.asked) == 1)
    await handle.signal(OrderWorkflow.renew)
    await until(lambda: len(book.asked) == 3)
    book.checks = [FILLED]
    latest = client.get_workflow_handle(names.order_id("replay-renewed"))
    await latest.signal(OrderWorkflow.recheck)
    await latest.result()
    return await latest.fetch_history()


ORDER_SCENARIOS: tuple[Scenario, ...] = (
    order_absent_is_settled,
    order_out_of_reach_then_filled,
    order_still_open_at_the_days_end,
    order_renewed,
)


async def run_orders(client: Client) -> dict[str, WorkflowHistory]:
    """Every scenario once; name → history."""
    histories: dict[str, WorkflowHistory] = {}
    for scenario in ORDER_SCENARIOS:
        book = FakeBook(FILLED)
        async with following(client, book):
            histories[getattr(scenario, "__name__", "scenario")] = await scenario(client, book)
    return histories
