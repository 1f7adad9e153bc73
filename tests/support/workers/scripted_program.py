"""A worker whose broker does what the symbol says, and writes down what was asked of it.

Run as `python -m tests.support.workers.scripted_program FOLDER` with a configuration on standard
input. The folder holds the ledger (`ledger.jsonl`) and files by which a test steers the broker.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from worker_runtime.__main__ import main
from worker_runtime.brokers.port import (
    Broker,
    BrokerFactory,
    BrokerOrderTerms,
    ConnectionKey,
    Listing,
    OnOrderChanged,
)
from worker_runtime.protocol.broker_reports import Balance, BrokerOrder, OrderChanged, Position
from worker_runtime.protocol.errors import (
    BrokerMaintenance,
    BrokerUnreachable,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    RateLimited,
    SessionDown,
)
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Credentials, Fill, OrderState
from worker_runtime.protocol.requests import ConfirmedQuantityChange

PRICE = Decimal("100.5")


class ScriptedBroker:
    """Implements `Broker`. Logins by api key (`hang-3`: after 3 s), orders by symbol: see the two
    methods."""

    def __init__(
        self, folder: Path, key: ConnectionKey, client: str, on_order: OnOrderChanged
    ) -> None:
        self._folder = folder
        self._key = key
        self._client = client
        self._on_order = on_order
        #: The file that ends sessions was there before this one began: it is meant for its
        #: predecessor.
        self._ended_before = False

    def login(self, credentials: Credentials, timeout: float) -> None:
        self._write("login", client=self._client, timeout=timeout, api_key=credentials.api_key)
        if (self._folder / "away").exists():
            raise BrokerUnreachable
        if (self._folder / "broken").exists():
            raise ValueError("broken")
        if (self._folder / f"refuse-{credentials.api_key}").exists():
            raise LoginRejected
        if credentials.api_key == "wrong":
            raise LoginRejected
        if credentials.api_key == "closed" and not (self._folder / "open").exists():
            raise BrokerUnreachable
        if credentials.api_key.startswith("hang-"):
            time.sleep(min(float(credentials.api_key.removeprefix("hang-")), timeout))
        if credentials.api_key == "odd":
            raise ValueError("odd")
        (self._folder / "dead").unlink(missing_ok=True)
        self._ended_before = (self._folder / "ended").exists()

    def place(self, order: BrokerOrderTerms, timeout: float) -> BrokerOrder:
        self._write(
            "place",
            order_id=order.order_id,
            symbol=order.symbol,
            timeout=timeout,
            key=list(self._key),
        )
        if order.symbol == "REJECT":
            raise OrderRejected("price limit")
        if order.symbol == "LIMITED":
            raise RateLimited
        if order.symbol == "CLOSED":
            raise BrokerMaintenance
        if order.symbol == "LOST":
            raise OutcomeUnknown("no acknowledgement")
        if order.symbol == "CRASH":
            raise ValueError("a fault in the adapter")
        if order.symbol == "DOWN":
            raise SessionDown
        if order.symbol == "SLOW":
            while not (self._folder / "gate").exists():
                time.sleep(0.005)
        while order.symbol == "SPIN":
            pass
        if order.symbol == "GIL":  # years of work in C that never lets go of the interpreter's lock
            re.match(r"(a+)+$", "a" * 60 + "b")
        if order.symbol == "LATER":
            threading.Thread(target=self._fill_later, args=(order,), daemon=True).start()
            return self._exchange_order(order, OrderState.SUBMITTED, [])
        fills = [
            Fill(
                fill_id=f"f-{order.order_id}",
                quantity=order.quantity,
                price=PRICE,
                at_ms=1_795_410_000_001,
            )
        ]
        return self._exchange_order(order, OrderState.FILLED, fills)

    def orders(self, timeout: float) -> Listing:
        if (self._folder / "unlisted").exists():
            raise BrokerUnreachable
        return Listing(self._listed(), behind=0.0, reaches=3600.0)

    def _listed(self) -> list[BrokerOrder]:
        listing = self._folder / "listing.json"
        return (
            msgspec.json.decode(listing.read_bytes(), type=list[BrokerOrder])
            if listing.exists()
            else []
        )

    def positions(self, timeout: float) -> list[Position]:
        if (self._folder / "positions-away").exists():
            raise BrokerUnreachable
        return []

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        return False

    def reference_price(self, symbol: str) -> Decimal | None:
        return Decimal("100.5") if (self._folder / "reference").exists() else None

    def cancel(self, broker_order_id: str, timeout: float) -> BrokerOrder:
        self._write("cancel", broker_order_id=broker_order_id)
        return self._changed(broker_order_id, state=OrderState.CANCELLED)

    def replace(
        self,
        broker_order_id: str,
        quantity: int | None,
        price: Decimal | None,
        timeout: float,
        confirmed: Sequence[ConfirmedQuantityChange] = (),
    ) -> BrokerOrder:
        self._write("replace", broker_order_id=broker_order_id, quantity=quantity, price=str(price))
        return self._changed(broker_order_id, **({"quantity": quantity} if quantity else {}))

    def _changed(self, broker_order_id: str, **changes: Any) -> BrokerOrder:
        for name, error in (("refuse-change", OrderRejected), ("lose-change", OutcomeUnknown)):
            if (self._folder / name).exists():
                raise error
        [listed] = [order for order in self._listed() if order.broker_order_id == broker_order_id]
        return msgspec.structs.replace(listed, **changes)

    def balance(self, timeout: float) -> Balance:
        return Balance(currency="TWD", cash=Decimal(10), available=Decimal(7))

    def ping(self, timeout: float) -> None:
        self._write("ping")
        if (self._folder / "dead").exists():
            raise SessionDown

    def alive(self) -> bool:
        return self._ended_before or not (self._folder / "ended").exists()

    def close(self) -> None:
        self._write("close", account_id=self._key.account_id)

    def _fill_later(self, order: BrokerOrderTerms) -> None:
        fill = Fill(
            fill_id=f"f-{order.order_id}",
            quantity=order.quantity,
            price=PRICE,
            at_ms=1_795_410_000_002,
        )
        told = self._exchange_order(order, OrderState.FILLED, [fill])
        for repeat in (1, 2):  # the same fill twice, as two events
            self._on_order(
                OrderChanged(event_id=f"e{repeat}-{order.order_id}", order=told, fill=fill)
            )

    @staticmethod
    def _exchange_order(
        order: BrokerOrderTerms, state: OrderState, fills: list[Fill]
    ) -> BrokerOrder:
        return BrokerOrder(
            broker_order_id=f"b-{order.order_id}",
            tag=order.tag,
            symbol=order.symbol,
            side=order.side,
            quantity=order.quantity,
            price_type=order.price_type,
            price=order.price,
            time_in_force=order.time_in_force,
            state=state,
            fills=fills,
        )

    def _write(self, kind: str, **fields: Any) -> None:
        with (self._folder / "ledger.jsonl").open("a") as ledger:
            ledger.write(json.dumps({"what": kind, **fields}) + "\n")


def load(config: WorkerConfig) -> BrokerFactory:
    folder = Path(sys.argv[1])

    def create(key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker:
        return ScriptedBroker(folder, key, client, on_order)

    return create


_fork = os.fork


def fork_if_there_is_room() -> int:
    """A fork as it fails on a host without room for another process, while the file `full` is
    there."""
    if (Path(sys.argv[1]) / "full").exists():
        raise BlockingIOError(errno.EAGAIN, "no room")
    return _fork()


if __name__ == "__main__":
    os.fork = fork_if_there_is_room
    sys.exit(main(load))
