"""The daily statement is a text for people."""

from __future__ import annotations

from decimal import Decimal

from tests.support.jobs.order_rows import make_statement_of, row
from worker_runtime.jobs.types.statements import statement_text


def test_a_statement_says_what_was_bought_and_sold_on_which_account() -> None:
    made = make_statement_of(
        row(1),
        row(
            2, side="sell", state="part_filled", filled_quantity=2, average_price=Decimal("1010.50")
        ),
        row(3, symbol="2317", state="rejected", filled_quantity=0, average_price=None),
        row(4, account_id="second", average_price=None),
    )
    assert statement_text(made).splitlines() == [
        "User alice, 2026-11-20",
        "",
        "Orders: 4, of which not final yet: 1",
        "",
        "Account main",
        "  2317: no fills (orders: 1 rejected)",
        "  2330: bought 3 at 1001 on average; sold 2 at 1010.5 on average (orders: 1 filled, 1 "
        "part_filled)",
        "",
        "Account second",
        "  2330: bought 3 at prices not all known (orders: 1 filled)",
        "",
        "Quantities are lots, or shares. Fees and taxes are the broker's and not in it.",
    ]


def test_shares_of_odd_lots_are_not_added_to_lots() -> None:
    made = make_statement_of(row(1), row(2, lot="odd", filled_quantity=700))
    assert [(line.symbol, line.odd, line.bought) for line in made.lines] == [
        ("2330", False, 3),
        ("2330", True, 700),
    ]
    text = statement_text(made)
    assert "  2330: bought 3 at 1001 on average (orders: 1 filled)\n" in text
    assert "  2330 (shares): bought 700 at 1001 on average (orders: 1 filled)\n" in text


def test_a_day_without_orders_is_said_in_one_line() -> None:
    assert statement_text(make_statement_of()).splitlines() == [
        "User alice, 2026-11-20",
        "",
        "No orders on this day.",
    ]


def test_a_round_price_is_written_without_an_exponent() -> None:
    assert "at 1000 on average" in statement_text(
        make_statement_of(row(1, average_price=Decimal("1000")))
    )
