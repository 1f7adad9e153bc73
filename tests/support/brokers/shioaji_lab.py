"""The Shioaji adapter on the lab's stand-in, whose book is the ledger of a real exchange
process."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from infra.berth_testing.harness import BookedOrder
from infra.lab.shioaji.stand_in import StandInClient
from tests.support.brokers.harnesses import PaperStage, taiwan_facts
from tests.support.brokers.shioaji_client import REAL, BoundToSdk
from worker_runtime.brokers.port import ConnectionKey, OnOrderChanged
from worker_runtime.brokers.shioaji import broker as adapter
from worker_runtime.brokers.shioaji import mapping, sdk
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.protocol.broker_reports import OrderChanged
from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import ConfirmedQuantityChange, QuantityMeaning

#: Production, so that lists are complete.
CERTIFIED = {"person_id": "A123456789", "ca_certificate": b"certificate", "ca_password": "pass"}


class BoundStandIn(BoundToSdk, StandInClient):
    """Checks each call against the installed SDK's signatures, and reports events after answers."""

    def _changed(self, change: OrderChanged) -> None:
        time.sleep(0.02)  # the suite waits for the event of a fill, which may be part of the answer
        super()._changed(change)


class CertifiedBroker(ShioajiBroker):
    """Logs in with a certificate, which the suite's credentials do not have."""

    def login(self, credentials: Credentials, timeout: float) -> None:
        given: dict[str, Any] = {
            "api_key": credentials.api_key,
            "secret_key": credentials.secret_key,
        }
        super().login(Credentials(**given, **CERTIFIED), timeout)  # type: ignore[arg-type]


class ShioajiLabStage:
    """An exchange, set by its admin API."""

    def __init__(self, address: str, admin_url: str) -> None:
        self._address = address
        self.paper = PaperStage(address, admin_url)
        self.clients: list[BoundStandIn] = []
        self.confirmed = (
            ConfirmedQuantityChange(
                sdk_version=REAL.__version__,
                lot=OrderLot.COMMON,
                futures=False,
                meaning=QuantityMeaning.REDUCE_BY,
            ),
        )
        self.set_price = self.paper.set_price
        self.register = self.paper.register
        self.reject_next = self.paper.reject_next
        self.drop_next = self.paper.drop_next
        self.silence_next = self.paper.silence_next
        self.drop_next_change = self.paper.drop_next_change
        self.silence_next_change = self.paper.silence_next_change
        self.count_changes = self.paper.count_changes
        self.facts = taiwan_facts(adapter, mapping, sdk)

    def broker(self, account: str, on_order: OnOrderChanged) -> CertifiedBroker:
        return self._broker(account, on_order, simulation=False)

    def other_system(self, account: str, on_order: OnOrderChanged) -> CertifiedBroker:
        """A simulation without accounts."""
        return self._broker(account, on_order, simulation=True)

    def _broker(
        self, account: str, on_order: OnOrderChanged, *, simulation: bool
    ) -> CertifiedBroker:
        def make(simulation: bool) -> BoundStandIn:
            known = f"{account}-in-simulation" if simulation else account
            self.clients.append(
                BoundStandIn(REAL, self._address, client="worker", account_of=lambda _: known)
            )
            return self.clients[-1]

        loaded = SimpleNamespace(
            Shioaji=make,
            StockOrder=REAL.StockOrder,
            FuturesOrder=REAL.FuturesOrder,
            __version__=REAL.__version__,
        )
        key = ConnectionKey("shioaji", "stock", simulation, account, account)
        return CertifiedBroker(key, on_order, lambda: loaded)

    def taken(self, account: str) -> list[BookedOrder]:
        """Without our order ids: the real broker keeps the tag only."""
        return [BookedOrder("", taken.tag, taken.state) for taken in self.paper.taken(account)]
