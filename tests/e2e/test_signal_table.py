"""Each row of the table of signals in the docs, with real orders on the whole system.

All rows are played once, next to each other: each has a symbol of its own, so no row is in the way
of another one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from api.webhooks.planning import EntryMode, SignalAction
from infra.exchange.records import LedgerOrder
from tests.support.signal_table import rows, wish_of
from tests.support.systems.local import POOL, RunningSystem
from tests.support.systems.signals import TraderHook, make_hook
from tests.support.systems.trading import account_path, wait_for_final_orders
from worker_runtime.protocol.messages import OrderState, Side

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

    @property
    def fields(self) -> dict[str, Any]:
        """What the signal says, apart from its action."""
        wish = wish_of(self.signal)
        said: dict[str, Any] = {"symbol": self.symbol}
        if wish.action is SignalAction.POSITION:
            said["position_size"] = str(wish.target)
        if wish.quantity is not None:
            said["quantity"] = str(wish.quantity)
        return said | ({"reduce_only": True} if wish.reduce_only else {})


@dataclass(frozen=True)
class PlayedRow:
    """What became of a row: the answer, and what exchange and API say of its symbol afterwards."""

    status: int
    answer: dict[str, Any]
    #: What the exchange took for the signal, in this order.
    taken: list[LedgerOrder]
    #: The exchange's fills, with those that made the position before.
    net: int
    #: The position that the API reports.
    position: int


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
    running_system.stack.wait_pool(POOL)
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
    wait_for_final_orders(system, trader)
    setup = {order.broker_order_id for order in system.ledger(trader)}

    def send(row: TableRow) -> tuple[int, dict[str, Any]]:
        hook: TraderHook = hooks[row.mode]
        answer = hook.send(wish_of(row.signal).action.value, **row.fields)
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(SIGNALS_AT_ONCE) as threads:
        answers = list(threads.map(send, share))
    wait_for_final_orders(system, trader)
    ledger = sorted(system.ledger(trader), key=lambda order: order.received_ms)
    shown = system.call("GET", f"/v1{account_path(trader)}/positions", trader.api_key)
    assert shown.status_code == 200, shown.text
    played = {}
    for row, (status, answer) in zip(share, answers, strict=True):
        orders = [order for order in ledger if order.symbol == row.symbol]
        played[row] = PlayedRow(
            status,
            answer,
            [order for order in orders if order.broker_order_id not in setup],
            sum(order.filled if order.side is Side.BUY else -order.filled for order in orders),
            sum(
                position["quantity"] * (1 if position["direction"] == "long" else -1)
                for position in shown.json()["positions"]
                if position["symbol"] == row.symbol
            ),
        )
    return played


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
    taken = [f"{'+' if order.side is Side.BUY else '-'}{order.quantity}" for order in result.taken]
    assert taken == [text.removesuffix(" (close)") for text in row.orders.split(", ") if legs]
    assert {order.state for order in result.taken} <= {OrderState.FILLED}
    assert (result.net, result.position) == (row.after, row.after)
