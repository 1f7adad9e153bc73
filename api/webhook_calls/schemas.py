"""Bodies and views of a webhook's calls, and of a test of a signal."""

from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import Field

from api.http.fields import EMPTY_IS_NONE, Body, View
from api.webhooks.planning import Outcome, QuantityUnit, SignalPlan
from api.webhooks.schemas import MAX_SIGNAL_QUANTITY
from infra.database.trading.models import WebhookCall
from worker_runtime.protocol.messages import Side


class PlannedOrderView(View):
    """Describes an order of a plan."""

    client_order_id: str
    closes: bool = Field(description="True: it can only make the position smaller.")
    side: Side
    quantity: int = Field(description="Lots or contracts; shares of an odd lot.")
    price_type: str
    price: str | None
    time_in_force: str
    lot: str
    condition: str
    open_close: str


class SignalPlanView(View):
    """The orders of a signal, and the position before and after them, in its unit."""

    before: int | None = Field(
        description="Null for `buy` and `sell`, which do not look at the position."
    )
    after: int | None
    outcome: Outcome
    note: str
    orders: list[PlannedOrderView] = Field(description="Closing orders first.")

    @classmethod
    def of(cls, plan: SignalPlan) -> Self:
        return cls.model_validate(plan.to_json())


class WebhookCallView(View):
    """A call that came to a webhook, and what became of it."""

    id: int
    received_at: datetime
    source: Annotated[str | None, EMPTY_IS_NONE] = Field(description="The address that posted it.")
    test: bool = Field(description="True: it was a test, and nothing of it was placed.")
    state: str = Field(description="`queued`, `running`, `done` or `refused`.")
    outcome: str | None = Field(
        description="`placed`, `rejected` (by the broker), `nothing_to_close`, `nothing_to_do`, or "
        "the code of the error that refused it."
    )
    reason: str | None = Field(description="A sentence about the outcome, or what it waits for.")
    action: str | None
    symbol: str | None = Field(description="The contract or share that it meant when it came.")
    unit: QuantityUnit | None
    quantity: int | None = Field(description="In that unit; of `position` the target.")
    plan: SignalPlanView | None
    order_ids: list[UUID]
    repeats: int = Field(description="How often the same signal came again.")
    answered_ms: int | None = Field(description="Milliseconds from its receipt to the answer.")
    completed_ms: int | None = Field(description="Milliseconds from its receipt to its end.")
    body: str | None = Field(description="Its text without secrets, cut to 2,000 characters.")

    @classmethod
    def of(cls, call: WebhookCall) -> Self:
        columns: dict[str, Any] = {
            name: getattr(call, name) for name in cls.model_fields.keys() & _COLUMNS
        }
        completed_ms = None
        if call.completed_at is not None:
            completed_ms = max(
                0, round((call.completed_at - call.received_at).total_seconds() * 1000)
            )
        return cls(
            **columns,
            action=(call.signal or {}).get("action"),
            plan=None if call.plan is None else SignalPlanView.of(SignalPlan.from_json(call.plan)),
            completed_ms=completed_ms,
        )


_COLUMNS = frozenset(WebhookCall.__table__.columns.keys()) - {"plan"}


class WebhookCallList(View):
    """A page of a webhook's last calls, the newest first."""

    calls: list[WebhookCallView]
    next_cursor: int | None = None


class SignalTestRequest(Body):
    """A signal as it would be posted. It is checked and planned, and nothing is placed."""

    signal: dict[str, Any] = Field(
        max_length=64,
        description="The body of the signal; `secret` and `time` may be left out.",
        examples=[{"action": "position", "symbol": "TXF1!", "position_size": "-2"}],
    )
    position: int | None = Field(
        default=None,
        strict=True,
        ge=-MAX_SIGNAL_QUANTITY,
        le=MAX_SIGNAL_QUANTITY,
        description="The position to plan from, in the unit of the webhook, negative when short. "
        "Without it the broker is asked, which starts the user's worker if there is none.",
    )


class EarlierSignalView(View):
    """A signal that came before the tested signal."""

    id: int = Field(description="Its number among the webhook's calls.")
    webhook_id: UUID
    received_at: datetime
    action: str | None
    symbol: str | None
    state: str
    outcome: str | None
    reason: str | None

    @classmethod
    def of(cls, call: WebhookCall) -> Self:
        names = cls.model_fields.keys() - {"action"}
        columns: dict[str, Any] = {name: getattr(call, name) for name in names}
        return cls(**columns, action=(call.signal or {}).get("action"))


class SignalTestView(View):
    """Says what would be done for a signal that came now."""

    symbol: str
    unit: QuantityUnit
    quantity: int | None
    plan: SignalPlanView = Field(description="Of a repeat: nothing is placed.")
    repeat_of: EarlierSignalView | None = Field(
        default=None,
        description="The same signal, which came before: this one would get its outcome.",
    )
    waits_behind: list[EarlierSignalView] = Field(
        default=[],
        description="Signals of the account and symbol that are carried out first, at most 20.",
    )
    waits_for: str | None = Field(
        default=None,
        description="An order that works on the position, or has just changed it.",
    )
    call_id: int = Field(description="The number of the test among the webhook's calls.")
