"""Contains trades and events as Shioaji's SDK reports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def make_trade(sdk: Any, **changes: Any) -> Any:
    """Returns a `Trade` made of the SDK's own enums: the SDK makes one only with a connection."""
    words: dict[str, Any] = {
        "id": "531e27af",
        "action": "Buy",
        "price": 17.05,
        "quantity": 3,
        "price_type": "LMT",
        "status": "Submitted",
        "order_quantity": None,
        "deal_quantity": None,
        "cancel_quantity": None,
        "seqno": "855089",
        "ordno": "X0001",
        "lot": "Common",
        "modified_price": None,
        "deals": [],
        "tag": "abc123",
        "msg": "",
        "account": None,
        **changes,
    }
    return SimpleNamespace(
        contract=sdk.Stock(exchange="TSE", code="2890"),
        order=SimpleNamespace(
            id=words["id"],
            seqno=words["seqno"],
            ordno=words["ordno"],
            action=sdk.Action(words["action"]),
            price=words["price"],
            quantity=words["quantity"],
            price_type=sdk.StockPriceType(words["price_type"]),
            time_in_force=sdk.TimeInForce("ROD"),
            custom_field=words["tag"],
            account=words["account"],
            order_lot=sdk.StockOrderLot(words["lot"]) if words["lot"] else None,
        ),
        status=SimpleNamespace(
            id=words["id"],
            status=sdk.OrderStatus(words["status"]),
            msg=words["msg"],
            order_quantity=words["order_quantity"],
            deal_quantity=words["deal_quantity"],
            cancel_quantity=words["cancel_quantity"],
            modified_price=words["modified_price"],
            deals=[
                SimpleNamespace(seq=seq, quantity=quantity, price=price, ts=ts)
                for seq, quantity, price, ts in words["deals"]
            ],
        ),
    )


TRADE_ID = "531e27af"
REPORTED_AT = 1673501631.6


def make_order_event(
    kind: str = "New", code: str = "00", event_id: str = "e1", **status: Any
) -> dict[str, Any]:
    return {
        "event_id": event_id,
        "operation": {
            "op_type": kind,
            "op_code": code,
            "op_msg": "" if code == "00" else "no margin",
        },
        "order": {
            "id": TRADE_ID,
            "action": "Buy",
            "price": 17.05,
            "quantity": 3,
            "time_in_force": "ROD",
            "price_type": "LMT",
            "custom_field": "abc123",
        },
        "status": {
            "id": TRADE_ID,
            "exchange_ts": REPORTED_AT,
            "order_quantity": 3,
            "cancel_quantity": 0,
            **status,
        },
        "contract": {"code": "2890"},
    }


def make_deal_event(
    sequence: str, quantity: int = 1, event_id: str = "", at: float = REPORTED_AT
) -> dict[str, Any]:
    return {
        "event_id": event_id or f"deal-{sequence}",
        "trade_id": TRADE_ID,
        "exchange_seq": sequence,
        "price": 17.0,
        "quantity": quantity,
        "ts": at,
    }
