"""A close above what the market takes in one order: its parts are orders of their own with one
outcome.

All parts are written in one transaction, so PostgreSQL has a close as a whole or not at all. Their
client order ids are made of the close's (`<id>`, `<id>#2`, `<id>#3`…; no caller's id has a `#`), so
a repeat finds all of them and places none twice.
"""

from collections.abc import Sequence
from decimal import Decimal
from uuid import UUID

from pydantic import Field

from api.http.errors import CloseInvalid
from api.orders.outcomes import OrderReader
from api.orders.placer import PlacementResult
from api.orders.schemas import OrderRequest, OrderView
from infra.database.orders.states import rank
from worker_runtime.protocol.broker_record import MarketRule
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.order_terms import ODD_LOTS

#: Orders of one close at most: the largest quantity, in orders of 499 lots, needs as many.
MAX_PARTS = 21
#: Characters of a client order id.
_MAX_ID_LENGTH = 64


class CloseView(OrderView):
    """Shows the order that closes a position; of several, what they come to together, under the
    first one's id."""

    parts: list[OrderView] = Field(
        default_factory=list, description="The orders, if the market's maximum made it several."
    )


def part_ids(client_order_id: str) -> list[str]:
    """Returns the client order ids that the parts of a close can have."""
    return [
        client_order_id,
        *(f"{client_order_id}#{number}" for number in range(2, MAX_PARTS + 1)),
    ]


def split_close(body: OrderRequest, market: MarketRule) -> list[OrderRequest]:
    """Returns the orders of a close: several if the market takes less in one order.

    Odd lots are never split. Raises `CloseInvalid` for more than `MAX_PARTS` orders, and if the
    close's id leaves no room for those of its parts.
    """
    rule = market.lots.get(body.lot)
    if rule is None or body.lot in ODD_LOTS or body.quantity <= rule.max_quantity:
        return [body]
    whole, rest = divmod(body.quantity, rule.max_quantity)
    sizes = [rule.max_quantity] * whole + [rest] * (rest > 0)
    if len(sizes) > MAX_PARTS:
        raise CloseInvalid(
            f"{market.title} takes {rule.max_quantity} lots in an order, and a close is at most "
            f"{MAX_PARTS} orders. Close at most {MAX_PARTS * rule.max_quantity} lots at a time."
        )
    ids = part_ids(body.client_order_id)[: len(sizes)]
    if len(ids[-1]) > _MAX_ID_LENGTH:
        raise CloseInvalid(
            f"This close becomes several orders. Its id may have at most {_MAX_ID_LENGTH - 3} "
            "characters."
        )
    # A copy is not validated: our own ids are not among a caller's.
    named = zip(ids, sizes, strict=True)
    return [
        body.model_copy(update={"client_order_id": client_order_id, "quantity": size})
        for client_order_id, size in named
    ]


def whole_of(parts: Sequence[OrderView]) -> OrderView:
    """Returns the outcome of all parts: final when all are, filled when all are."""
    if len(parts) == 1:
        return parts[0]
    filled = sum(part.filled_quantity for part in parts)
    waiting = [part for part in parts if not part.final]
    unfilled = [part for part in parts if part.state is not OrderState.FILLED]
    shown = min(waiting, key=lambda part: rank(part.state)) if waiting else (unfilled or parts)[0]
    state = shown.state
    if filled and state is OrderState.SUBMITTED:
        state = OrderState.PART_FILLED
    elif filled and state in (OrderState.REJECTED, OrderState.EXPIRED):
        state = OrderState.CANCELLED
    paid = [
        (part.average_price, part.filled_quantity)
        for part in parts
        if part.average_price is not None
    ]
    lots = sum(quantity for _, quantity in paid)
    spent = sum((price * quantity for price, quantity in paid), Decimal())
    return CloseView.model_construct(
        **{
            **dict(shown),
            "id": parts[0].id,
            "client_order_id": parts[0].client_order_id,
            "broker_order_id": None,
            "quantity": sum(part.quantity for part in parts),
            "filled_quantity": filled,
            "average_price": round(spent / lots, 6).normalize() if lots else None,
            "state": state,
            "final": not waiting,
            "parts": list(parts),
        }
    )


def whole_result(results: Sequence[PlacementResult]) -> PlacementResult:
    """Returns the outcome of a close: failed if nothing of it can come to the broker, or if
    something is not known to be on its way."""
    failures = [result for result in results if result.failure is not None]
    lost = next((result.failure for result in failures if not result.order.final), None)
    return PlacementResult(
        whole_of([result.order for result in results]),
        new=any(result.new for result in results),
        failure=lost or (failures[0].failure if len(failures) == len(results) else None),
    )


async def read_again(reader: OrderReader, order: OrderView) -> OrderView:
    """Returns the order, or the whole of several, as it is now."""
    parts = order.parts if isinstance(order, CloseView) else [order]
    return whole_of([await reader.get(UUID(part.id)) for part in parts])
