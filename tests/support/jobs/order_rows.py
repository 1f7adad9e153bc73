"""Orders as a statement or an export gets them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import (
    MakeStatement,
    OrderRow,
    pack_orders,
)
from worker_runtime.jobs.types.job_type import JobContext
from worker_runtime.jobs.types.statements import make_statement

CONTEXT = JobContext("j", 1, 1, lambda _value: None)


def row(number: int = 1, **fields: Any) -> OrderRow:
    """Returns a filled limit order; `number` makes its ids and its time."""
    values: dict[str, Any] = {
        "accepted_at": f"2026-11-20T01:02:03.{number:06d}Z",
        "id": f"0199f1c2-a5b8-7c3e-8f4f-{number:012x}",
        "client_order_id": f"c-{number}",
        "account_id": "main",
        "symbol": "2330",
        "side": "buy",
        "quantity": 3,
        "price_type": "LMT",
        "price": Decimal("1001.5"),
        "time_in_force": "ROD",
        "state": "filled",
        "filled_quantity": 3,
        "average_price": Decimal("1001"),
    }
    return OrderRow(**(values | fields))


def make_statement_of(*rows: OrderRow) -> catalog.Statement:
    return make_statement(
        MakeStatement(user_id="alice", day="2026-11-20", orders=pack_orders(rows)), CONTEXT
    )
