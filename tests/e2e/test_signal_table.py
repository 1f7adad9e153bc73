"""Each row of the tables of signals in the docs, with real orders on the whole system.

All rows of a table are played once, next to each other: each has a symbol of its own, so no row is
in the way of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import pytest

from api.webhooks.planning import EntryMode, SignalAction
from infra.exchange.records import LedgerOrder
from tests.support.signal_table import rows, wish_of
from tests.support.systems.local import RunningSystem, Trader
from tests.support.systems.signals import TraderHook, make_hook
from tests.support.systems.trading import account_path, set_price, wait_for_final_orders
from worker_runtime.protocol.messages import OrderState, Side
from worker_runtime.protocol.order_terms import SHARES_PER_LOT, OrderLot

#: Accounts that share the rows. A signal asks the broker for the position, and it takes 25
#: questions of an account in 5 s.
TRADERS = 6
#: Signals of one account that are under way at a time.
SIGNALS_AT_ONCE = 3


@dataclass(frozen=True)
class TableRow:
    """A row of the table in one of the modes that it is for."""

    symbol: str
    before: int
    signal: str
    mode: EntryMode
    orders: str
    after: int

    def __str__(self) -> str:
        return f"{self.before} {self.signal.replace('`', '')} {self.mode}"


@dataclass(frozen=True)
class SharesRow:
    """A row of the table of webhooks that count shares and round down to lots."""

    symbol: str
    before: int
    signal: str
    orders: str
    after: int

    def __str__(self) -> str:
        return f"{self.before} {self.signal.replace('`', '')}"


@dataclass(frozen=True)
class PlayedRow:
    """What became of a row: the answer, and what exchange and API say of its symbol afterwards."""

    status: int
    answer: dict[str, Any]
    #: What the exchange took for the signal, in this order.
    taken: list[LedgerOrder]
    #: The exchange's fills in shares, with those that made the position before.
    net: int
    #: The position that the API reports, in shares.
    position: int


Row = TypeVar("Row", TableRow, SharesRow)


def table() -> list[TableRow]:
    """Returns each row of the docs in each of its modes."""
    modes = {"any": list(EntryMode), "open": [EntryMode.OPEN], "delta": [EntryMode.DELTA]}
    cells = [(row, mode) for row in rows() for mode in modes[row[2]]]
    return [
        TableRow(f"{2301 + number}", int(before), signal, mode, orders, int(after))
        for number, ((before, signal, _, orders, after), mode) in enumerate(cells)
    ]


@pytest.fixture(scope="module")
def played(running_system: RunningSystem) -> dict[TableRow, PlayedRow]:
    running_system.restore()
    everything = table()
    shares = [everything[number::TRADERS] for number in range(TRADERS)]
    with ThreadPoolExecutor(TRADERS) as threads:
        results = list(threads.map(lambda share: play(running_system, share), shares))
    return {row: played for result in results for row, played in result.items()}


def play(system: RunningSystem, share: list[TableRow]) -> dict[TableRow, PlayedRow]:
    """Makes the positions of some rows in one account, then sends their signals."""
    trader = system.trader()
    hooks = {
        mode: make_hook(system, trader, quantity_unit="lots", entry_mode=mode.value)
        for mode in EntryMode
    }
    for row in share:
        if row.before:
            side = "buy" if row.before > 0 else "sell"
            made = system.order(trader, symbol=row.symbol, side=side, quantity=abs(row.before))
            assert made.json()["state"] == "filled", made.text
    return send_all(system, trader, [(row, hooks[row.mode]) for row in share])


def send_all(
    system: RunningSystem, trader: Trader, hooks: Sequence[tuple[Row, TraderHook]]
) -> dict[Row, PlayedRow]:
    """Sends the signals of rows whose positions were made."""
    wait_for_final_orders(system, trader)
    setup = {order.broker_order_id for order in system.ledger(trader)}

    def send(row_and_hook: tuple[Row, TraderHook]) -> httpx.Response:
        row, hook = row_and_hook
        return hook.send(wish_of(row.signal).action.value, **fields_of(row))

    with ThreadPoolExecutor(SIGNALS_AT_ONCE) as threads:
        answers = list(threads.map(send, hooks))
    wait_for_final_orders(system, trader)
    ledger = sorted(system.ledger(trader), key=lambda order: order.received_ms)
    shown = system.call("GET", f"/v1{account_path(trader)}/positions", trader.api_key)
    assert shown.status_code == 200, shown.text
    played = {}
    for (row, _), answer in zip(hooks, answers, strict=True):
        orders = [order for order in ledger if order.symbol == row.symbol]
        played[row] = PlayedRow(
            answer.status_code,
            answer.json(),
            [order for order in orders if order.broker_order_id not in setup],
            sum(
                (order.filled if order.side is Side.BUY else -order.filled)
                * (SHARES_PER_LOT if order.lot is OrderLot.COMMON else 1)
                for order in orders
            ),
            sum(
                (position["quantity"] * SHARES_PER_LOT + position["odd_shares"])
                * (1 if position["direction"] == "long" else -1)
                for position in shown.json()["positions"]
                if position["symbol"] == row.symbol
            ),
        )
    return played


def fields_of(row: TableRow | SharesRow) -> dict[str, Any]:
    """Returns what the signal of a row says, apart from its action."""
    wish = wish_of(row.signal)
    said: dict[str, Any] = {"symbol": row.symbol}
    if wish.action is SignalAction.POSITION:
        said["position_size"] = str(wish.target)
    if wish.quantity is not None:
        said["quantity"] = str(wish.quantity)
    return said | ({"reduce_only": True} if wish.reduce_only else {})


def taken_orders(result: PlayedRow) -> list[str]:
    """Returns what the exchange took, as the table writes it."""
    return [f"{'+' if order.side is Side.BUY else '-'}{order.quantity}" for order in result.taken]


def sides(orders: str) -> list[str]:
    """Returns orders of the table as the exchange has them: it does not know of closes."""
    return [text.removesuffix(" (close)") for text in orders.split(", ") if text]


def shown_order(order: dict[str, Any]) -> str:
    """Returns an order of an answer as the table writes it."""
    sign = "+" if order["side"] == "buy" else "-"
    return f"{sign}{order['quantity']}{' (close)' if order['reduce_only'] else ''}"


@pytest.mark.parametrize("row", table(), ids=str)
def test_a_row_of_the_docs_table_is_what_the_exchange_gets_and_holds(
    played: dict[TableRow, PlayedRow], row: TableRow
) -> None:
    result = played[row]
    assert result.status in (200, 201), result.answer
    # A plain order is answered with the order itself.
    legs = result.answer.get("legs", [result.answer])
    shown = ", ".join(map(shown_order, legs)) or result.answer["outcome"].replace("_", " ")
    assert shown == row.orders
    assert taken_orders(result) == (sides(row.orders) if legs else [])
    assert {order.state for order in result.taken} <= {OrderState.FILLED}
    after = row.after * SHARES_PER_LOT
    assert (result.net, result.position) == (after, after)


def shares_table() -> list[SharesRow]:
    return [
        SharesRow(f"{2361 + number}", int(before), signal, orders, int(after))
        for number, (before, signal, orders, after) in enumerate(rows("shares before"))
    ]


@pytest.fixture(scope="module")
def played_shares(running_system: RunningSystem) -> dict[SharesRow, PlayedRow]:
    """Each position is made by a webhook that orders odd lots, too."""
    running_system.restore()
    system, everything = running_system, shares_table()
    trader = system.trader()
    splits = make_hook(system, trader, odd="split")
    rounds = make_hook(system, trader, odd="round_down")
    for row in everything:
        set_price(system, row.symbol)
        if row.before:
            size = str(row.before)
            made = splits.send("position", symbol=row.symbol, position_size=size, price="100")
            assert made.status_code in (200, 201), made.text
    return send_all(system, trader, [(row, rounds) for row in everything])


@pytest.mark.parametrize("row", shares_table(), ids=str)
def test_a_row_of_the_docs_table_of_shares_is_what_the_exchange_gets_and_holds(
    played_shares: dict[SharesRow, PlayedRow], row: SharesRow
) -> None:
    result = played_shares[row]
    if row.orders.startswith("`"):
        assert f"`{result.answer['code']}`" == row.orders
        shown = ""
    else:
        assert result.status in (200, 201), result.answer
        shown = ", ".join(map(shown_order, result.answer["legs"]))
        assert (shown or result.answer["outcome"].replace("_", " ")) == row.orders
    assert taken_orders(result) == sides(shown)
    assert {order.lot for order in result.taken} <= {OrderLot.COMMON}
    assert (result.net, result.position) == (row.after, row.after)
