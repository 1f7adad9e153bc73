"""The workflow of one order that did not become final soon,
`order-{order_id}`: follows it until it is.

It changes nothing at the broker. In growing pauses it reads PostgreSQL, where events have settled
most orders by then, and the broker's own list. An order that makes no progress is put on
the operators' list. The sweeper starts the workflow again until the order is final.
"""

import contextlib
from dataclasses import asdict, replace
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.entity import (
        carried_state,
        continue_as_new,
        copied_fields,
        raise_cancellation,
        wait_until,
    )
    from workflows.order.messages import (
        FollowOrder,
        FollowView,
        UnresolvedOrder,
        VerificationFinding,
        Verified,
        VerifyOrder,
    )
    from workflows.order.state import FollowedOrder, OrderStep

from workflows import calls


@workflow.defn(name=names.ORDER)
class OrderWorkflow:
    @workflow.init
    def __init__(self, given: FollowOrder) -> None:
        self._given = given
        self._order = carried_state(FollowedOrder, given.carried)
        self._wake = False
        self._renew = False
        self._shown = ""

    @workflow.run
    async def run(self, given: FollowOrder) -> str:
        """Returns the state in which it left the order."""
        while True:
            self._wake = False
            await self._verify()
            step = self._order.step(workflow.time(), given.day_end)
            if step == OrderStep.SETTLE:
                await self._settle()
                continue
            await self._demand_attention()
            self._show()
            if self._order.step(workflow.time(), given.day_end) == OrderStep.END:
                await workflow.wait_condition(workflow.all_handlers_finished)
                return self._order.state
            if self._renew or workflow.info().is_continue_as_new_suggested():
                continue_as_new(replace(self._given, carried=asdict(self._order)))
            pause = self._order.pause(workflow.time(), given.day_end, given.settings)
            await wait_until(lambda: self._wake, pause, "until the next verification of the order")

    @workflow.signal(name="recheck")
    def recheck(self, *payload: Any) -> None:
        """Verifies the order soon, because an operator asked. What the signal carries is
        ignored."""
        self._order = self._order.rechecked()
        self._wake = True

    @workflow.signal(name="renew")
    def renew(self, *payload: Any) -> None:
        """Continues in a new run, after a release."""
        self._renew = self._wake = True

    @workflow.query(name="view")
    def view(self) -> FollowView:
        return FollowView(order_id=self._given.order_id, **copied_fields(self._order, FollowView))

    async def _verify(self) -> None:
        request = VerifyOrder(
            order_id=self._given.order_id, user_id=self._given.user_id, check=self._order.checks
        )
        try:
            seen = await calls.verify_order(request)
        except FailureError as error:
            raise_cancellation(error)
            seen = Verified(
                finding=VerificationFinding.UNASKED,
                code="NOT_VERIFIED",
                detail=calls.cause(error),
            )
        self._order = self._order.after_check(seen, workflow.time(), self._given.settings)

    async def _settle(self) -> None:
        """Settles an order that never reached the broker. The next verification finds it final, or
        finds what was learned in the meantime."""
        with contextlib.suppress(FailureError):
            await calls.settle_absent(
                UnresolvedOrder(
                    order_id=self._given.order_id,
                    reason=self._order.full_story(
                        "never reached the broker: complete listings lack it"
                    ),
                )
            )
        self._order = replace(self._order, missing=0)

    async def _demand_attention(self) -> None:
        follow = self._order
        if follow.step(workflow.time(), self._given.day_end) == OrderStep.END:
            return
        concern = follow.concern(workflow.time(), self._given.day_end, self._given.settings)
        if not concern or concern == follow.attention:
            return
        request = UnresolvedOrder(order_id=self._given.order_id, reason=follow.full_story(concern))
        with contextlib.suppress(FailureError):  # the next verification tries again
            await calls.demand_attention(request)
            self._order = replace(self._order, attention=concern)

    def _show(self) -> None:
        follow = self._order
        text = f"### {follow.state}\n\nAt the broker: {follow.finding}."
        if follow.attention:
            text += f"\n\n**Needs attention**: {follow.attention}"
        if text != self._shown:
            shown = "needs_attention" if follow.attention else follow.state
            workflow.upsert_search_attributes(
                [names.SA_USER.value_set(self._given.user_id), names.SA_STATE.value_set(shown)]
            )
            workflow.set_current_details(text)
            self._shown = text
