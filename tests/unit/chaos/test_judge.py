"""The judge of the chaos run sees each harm it is there for, and none where there is none."""

from __future__ import annotations

from decimal import Decimal

import pytest

from infra.exchange.records import LedgerFill, LedgerOrder, LedgerSession
from infra.lab.chaos.orders.books import Books, OurOrder, OurSignal
from infra.lab.chaos.orders.client import ClientOrder
from infra.lab.chaos.orders.judge import OrderHarm, judge_orders
from worker_runtime.protocol.messages import (
    CANCELLED_IN_QUEUE,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)


def ours(state: str = "filled", **changes: object) -> OurOrder:
    fields: dict[str, object] = {
        "order_id": "o1",
        "client_order_id": "c1",
        "user_id": "u",
        "account_id": "a",
        "quantity": 2,
        "state": state,
    }
    if state == "filled":
        fields |= {"filled_quantity": 2, "average_price": Decimal("10.5")}
    return OurOrder(**{**fields, **changes})  # type: ignore[arg-type]


def fill(quantity: int, price: str) -> LedgerFill:
    return LedgerFill(
        fill_id=f"F{quantity}{price}", quantity=quantity, price=Decimal(price), at_ms=5
    )


def theirs(state: OrderState = OrderState.FILLED, **changes: object) -> LedgerOrder:
    fields: dict[str, object] = {
        "broker_order_id": "P1",
        "account": "a",
        "session_id": "s",
        "client": "w/1",
        "tag": "000001",
        "client_note": "o1",
        "symbol": "2330",
        "side": Side.BUY,
        "quantity": 2,
        "price_type": PriceType.MARKET,
        "price": None,
        "time_in_force": TimeInForce.IOC,
        "state": state,
        "reason": None,
        "received_ms": 4,
        "updated_ms": 5,
        "fills": (fill(1, "10"), fill(1, "11")) if state is OrderState.FILLED else (),
    }
    return LedgerOrder(**{**fields, **changes})  # type: ignore[arg-type]


def harms(books: Books, placed: tuple[ClientOrder, ...] = ()) -> list[OrderHarm]:
    return [finding.harm for finding in judge_orders(books, placed).findings]


def client_order(order_id: str = "o1") -> ClientOrder:
    return ClientOrder(
        client_order_id="c1", user_id="u", account_id="a", quantity=2, order_id=order_id
    )


@pytest.mark.parametrize(
    ("our", "their"),
    [
        (ours(), theirs()),
        (ours("cancelled"), theirs(OrderState.CANCELLED)),
        (ours("rejected"), theirs(OrderState.REJECTED)),
        (
            ours("cancelled", filled_quantity=1, average_price=Decimal("10.0")),
            theirs(OrderState.CANCELLED, fills=(fill(1, "10"),)),
        ),
    ],
)
def test_books_that_agree_are_settled_by_the_broker(our: OurOrder, their: LedgerOrder) -> None:
    verdict = judge_orders(Books(ours=[our], ledger=[their]), [client_order()])
    assert verdict.findings == ()
    assert (verdict.orders, verdict.settled_by_broker, verdict.unsettled) == (1, 1, 0)


def test_an_order_that_never_reached_the_broker_is_neither_a_harm_nor_settled_by_it() -> None:
    withdrawn = ours("cancelled", order_id="o3", reason=CANCELLED_IN_QUEUE)
    verdict = judge_orders(
        Books(ours=[ours("expired"), ours("rejected", order_id="o2"), withdrawn], ledger=[]), []
    )
    assert verdict.findings == ()
    assert (verdict.orders, verdict.settled_by_broker, verdict.unsettled) == (3, 0, 0)


def test_an_order_that_was_cancelled_at_the_broker_is_found_there() -> None:
    assert harms(Books(ours=[ours("cancelled")], ledger=[])) == [OrderHarm.MISMATCHED]


def test_an_order_that_was_withdrawn_in_time_and_is_filled_all_the_same_is_lost() -> None:
    withdrawn = ours("cancelled", reason=CANCELLED_IN_QUEUE)
    assert harms(Books(ours=[withdrawn], ledger=[theirs()])) == [OrderHarm.LOST]


def test_open_orders_are_counted_apart_from_those_that_need_attention() -> None:
    books = Books(
        ours=[ours("unknown"), ours("submitted", order_id="o2", attention="nobody knows")],
        ledger=[theirs(), theirs(OrderState.SUBMITTED, client_note="o2", tag="000002")],
    )
    verdict = judge_orders(books, [])
    assert verdict.findings == ()
    assert (verdict.attention, verdict.unsettled, verdict.settled_by_broker) == (1, 1, 0)


@pytest.mark.parametrize("state", ["rejected", "expired"])
def test_an_order_that_we_take_for_absent_and_the_broker_has_is_lost(state: str) -> None:
    assert harms(Books(ours=[ours(state)], ledger=[theirs()])) == [OrderHarm.LOST]


def test_an_order_at_the_broker_that_our_books_do_not_have_is_lost() -> None:
    assert harms(Books(ours=[], ledger=[theirs()])) == [OrderHarm.LOST]


def test_an_order_whose_id_a_client_knows_and_that_is_gone_is_lost() -> None:
    assert harms(Books(ours=[], ledger=[]), (client_order(),)) == [OrderHarm.LOST]
    assert harms(Books(ours=[ours()], ledger=[theirs()]), (client_order("another"),)) == [
        OrderHarm.LOST
    ]
    assert harms(Books(ours=[], ledger=[]), (client_order(""),)) == []  # nobody ever accepted it


@pytest.mark.parametrize(
    ("ends", "expected"), [({"filled"}, []), ({"rejected"}, [OrderHarm.MISMATCHED])]
)
def test_an_end_that_differs_between_a_client_and_the_books_is_a_mismatch(
    ends: set[str], expected: list[OrderHarm]
) -> None:
    heard = client_order()
    heard.ends = ends
    assert harms(Books(ours=[ours()], ledger=[theirs()]), (heard,)) == expected


@pytest.mark.parametrize(
    ("close", "opened_at", "expected"),
    [
        ("filled", 5, []),
        ("filled", 4, [OrderHarm.OUT_OF_TURN]),
        ("cancelled", 9, [OrderHarm.OUT_OF_TURN]),
    ],
)
def test_a_reversal_that_opens_before_its_close_is_filled_is_named(
    close: str, opened_at: int, expected: list[OrderHarm]
) -> None:
    """The close of `theirs` is filled at 5 ms."""
    state = OrderState(close)
    closing = ours(close, client_order_id="r.close")
    opening = ours(order_id="o2", client_order_id="r.open")
    ledger = [theirs(state), theirs(client_note="o2", tag="000002", received_ms=opened_at)]
    assert harms(Books(ours=[closing, opening], ledger=ledger)) == expected


def test_an_order_that_is_there_twice_is_doubled() -> None:
    again = theirs(broker_order_id="P2", tag="000001")
    assert harms(Books(ours=[ours()], ledger=[theirs(), again])) == [OrderHarm.DOUBLED]


def test_an_order_that_filled_more_than_it_asked_for_is_doubled() -> None:
    overfilled = theirs(fills=(fill(1, "10"), fill(1, "11"), fill(1, "10.5")))
    assert OrderHarm.DOUBLED in harms(Books(ours=[ours()], ledger=[overfilled]))


def test_one_tag_for_two_orders_is_doubled() -> None:
    books = Books(
        ours=[ours(), ours(order_id="o2", client_order_id="c2")],
        ledger=[theirs(), theirs(client_note="o2")],
    )
    assert harms(books) == [OrderHarm.DOUBLED]


@pytest.mark.parametrize(
    ("our", "their"),
    [
        (ours(average_price=Decimal("10.4")), theirs()),
        (ours(filled_quantity=1), theirs()),
        (ours(), None),
        (ours("cancelled"), theirs()),
        (ours("submitted", filled_quantity=1), theirs(OrderState.SUBMITTED)),
    ],
)
def test_fills_that_differ_are_mismatched(our: OurOrder, their: LedgerOrder | None) -> None:
    assert harms(Books(ours=[our], ledger=[their] if their else [])) == [OrderHarm.MISMATCHED]


def test_two_sessions_at_once_and_orders_of_a_replaced_worker_are_named() -> None:
    def session(name: str, epoch: int, opened: int, closed: int | None) -> LedgerSession:
        return LedgerSession(
            session_id=name,
            account="a",
            person_id="u",
            client=f"w/{epoch}",
            opened_ms=opened,
            closed_ms=closed,
            close_reason=None,
        )

    sessions = [session("s1", 1, 0, 3), session("s2", 2, 2, None)]
    session_harms = harms(Books(ours=[ours()], ledger=[theirs()], sessions=sessions))
    assert session_harms == [OrderHarm.TWO_OWNERS, OrderHarm.TWO_OWNERS]


def a_signal(
    number: int, *order_ids: str, completed: bool = True, account_id: str = "A1"
) -> OurSignal:
    return OurSignal(
        number=number,
        user_id="u1",
        account_id=account_id,
        lane="C00",
        completed=completed,
        order_ids=order_ids,
    )


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ((a_signal(1, "o1"), a_signal(2, "o2")), []),
        ((a_signal(1, "o2"), a_signal(2, "o1")), [OrderHarm.OUT_OF_TURN]),
        ((a_signal(1, "o2"), a_signal(2, "o1", account_id="A2")), []),
        ((a_signal(1), a_signal(2, "o1"), a_signal(3)), []),
        ((a_signal(1, "o1"), a_signal(2, completed=False)), [OrderHarm.LOST]),
    ],
)
def test_signals_keep_their_order_and_end(
    signals: tuple[OurSignal, ...], expected: list[OrderHarm]
) -> None:
    rows = [ours(), ours(order_id="o2", client_order_id="n2")]
    ledger = [
        theirs(),
        theirs(client_note="o2", broker_order_id="P2", tag="000002", received_ms=9_999),
    ]
    assert harms(Books(ours=rows, ledger=ledger, signals=signals)) == expected
