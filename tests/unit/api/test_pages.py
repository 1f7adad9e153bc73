"""What the templates of the pages make of values."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from api.http.fields import EXAMPLES
from api.orders.schemas import OrderView
from api.page.rendering import TEMPLATES


def an_order(**changes: Any) -> OrderView:
    known = {"id": "o-1", "user_id": "alice", "state": "filled", "final": True, "broker_order_id": "b-1"}
    known |= {"code": None, "reason": None, "accepted_at": datetime.now(UTC)}
    return OrderView.model_validate({**EXAMPLES["OrderRequest"][0], **known, **changes})


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("1000.000000", "1000"),
        ("590.000000", "590"),
        ("1005.500000", "1005.5"),
        ("20300.333333", "20300.333333"),
    ],
)
def test_a_page_shows_prices_without_an_exponent(stored: str, shown: str) -> None:
    parts: Any = TEMPLATES.get_template("frame/parts.html").module
    order = an_order(price=Decimal(stored), filled_quantity=1, average_price=Decimal(stored))
    table = str(parts.orders_table([order]))
    assert f"<td>LMT {shown}</td>" in table
    assert f"<td>1 at {shown}</td>" in table
