"""The templates of the pages format values."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api.http.fields import EXAMPLES
from api.http.middleware import RequestMiddleware
from api.orders.schemas import OrderView
from api.page.rendering import TEMPLATES, current_page
from api.page.router import router


def an_order(**changes: Any) -> OrderView:
    known = {
        "id": "o-1",
        "user_id": "alice",
        "state": "filled",
        "final": True,
        "broker_order_id": "b-1",
    }
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
    parts: Any = TEMPLATES.get_template("frame/parts.html").make_module({"root": ""})
    order = an_order(price=Decimal(stored), filled_quantity=1, average_price=Decimal(stored))
    table = str(parts.orders_table([order]))
    assert f"<td>LMT {shown}</td>" in table
    assert f"<td>1 at {shown}</td>" in table


@pytest.mark.parametrize("page", ["users?prefix=%00", "users?cursor=%00", "switches?prefix=%00"])
async def test_a_filter_with_a_nul_is_refused_before_anything_is_read(page: str) -> None:
    app = FastAPI()
    app.include_router(router)
    app.dependency_overrides[current_page] = lambda: None
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(RequestMiddleware(app)), base_url="http://page"
    ) as client:
        assert (await client.get(f"/page/{page}")).status_code == 422
