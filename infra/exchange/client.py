"""A client of the exchange's admin API, and the exchange as a child process."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import TypeAdapter

from infra.exchange.behaviour import Behaviour, FaultPlan
from infra.exchange.hours import ExchangeMaintenance
from infra.exchange.instruments import InstrumentSettings
from infra.exchange.limits import ExchangeLimits
from infra.exchange.market import PriceWalk
from infra.exchange.records import (
    ExchangeHealth,
    Incident,
    IncidentKind,
    LedgerOrder,
    LedgerSession,
    LimitOwnerKind,
)
from infra.local.process import HOST, Server, accepts, free_port
from worker_runtime.protocol.errors import BerthError, from_code

_ORDERS = TypeAdapter(list[LedgerOrder])
_SESSIONS = TypeAdapter(list[LedgerSession])
_INCIDENTS = TypeAdapter(list[Incident])


@cache
def _certificate_authorities() -> ssl.SSLContext:
    """Makes the certificate authorities once: a client that makes its own takes 23 ms to read the
    certificates, also for http."""
    return httpx.create_ssl_context(trust_env=False)


class ExchangeUnreachable(BerthError, code="EXCHANGE_UNREACHABLE", retryable=True):
    """The paper exchange's admin API does not answer."""


class ExchangeAdmin:
    """Use it as an async context manager. Each call takes at most `timeout` seconds.

    Raises `ExchangeUnreachable`, or the exchange's own error (`UnknownAccount`, `OrderRejected`).
    """

    def __init__(self, url: str, *, timeout: float = 5.0) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout, trust_env=False, verify=_certificate_authorities()
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def register(
        self, account: str, api_key: str, secret_key: str, person_id: str = ""
    ) -> None:
        """Adds an account or replaces its keys."""
        body = {
            "account": account,
            "api_key": api_key,
            "secret_key": secret_key,
            "person_id": person_id,
        }
        await self._call("POST", "/accounts", json=body)

    async def set_behaviour(self, account: str, behaviour: Behaviour) -> None:
        """Replaces the whole behaviour; `Behaviour()` is the normal one."""
        await self._call(
            "PUT", f"/accounts/{account}/behaviour", json=behaviour.model_dump(mode="json")
        )

    async def behaviour(self, account: str) -> Behaviour:
        return Behaviour.model_validate(await self._call("GET", f"/accounts/{account}/behaviour"))

    async def count_changes(self, account: str) -> int:
        """Returns how many cancels and replacements of the account have arrived since the exchange
        started."""
        return int((await self._call("GET", f"/accounts/{account}/changes"))["changes"])

    async def ledger(self, account: str | None = None, after: str = "") -> list[LedgerOrder]:
        """Lists orders with fills, oldest first; `after` is the last broker order id already
        read."""
        return _ORDERS.validate_python(
            await self._call("GET", "/ledger", params=_given(account=account, after=after))
        )

    async def sessions(
        self, account: str | None = None, open: bool | None = None
    ) -> list[LedgerSession]:
        return _SESSIONS.validate_python(
            await self._call("GET", "/sessions", params=_given(account=account, open=open))
        )

    async def end_sessions(
        self, account: str, reason: str = "ended by a test", *, abrupt: bool = False
    ) -> int:
        """Ends the account's sessions; returns how many."""
        body = {"reason": reason, "abrupt": abrupt}
        return int(
            (await self._call("POST", f"/accounts/{account}/end-sessions", json=body))["sessions"]
        )

    async def set_instruments(self, settings: InstrumentSettings) -> None:
        """Replaces what is changed of the list;
        `InstrumentSettings()` is the plain list of today."""
        await self._call("PUT", "/instruments", json=settings.model_dump(mode="json"))

    async def instruments(self) -> InstrumentSettings:
        return InstrumentSettings.model_validate(await self._call("GET", "/instruments"))

    async def set_price(self, symbol: str, price: Decimal) -> None:
        await self._call("POST", f"/symbols/{symbol}/price", json={"price": str(price)})

    async def price(self, symbol: str) -> Decimal:
        return Decimal((await self._call("GET", f"/symbols/{symbol}/price"))["price"])

    async def fill(
        self, broker_order_id: str, quantity: int | None = None, price: Decimal | None = None
    ) -> LedgerOrder:
        """Fills a resting order by hand: by default all of it at the market's price."""
        body = {"quantity": quantity, "price": None if price is None else str(price)}
        return LedgerOrder.model_validate(
            await self._call("POST", f"/orders/{broker_order_id}/fill", json=body)
        )

    async def cancel(
        self, broker_order_id: str, reason: str = "cancelled by the exchange"
    ) -> LedgerOrder:
        return LedgerOrder.model_validate(
            await self._call("POST", f"/orders/{broker_order_id}/cancel", json={"reason": reason})
        )

    async def set_fault_plan(self, plan: FaultPlan, account: str | None = None) -> None:
        """Sets random faults for one account, or for all that have no plan of their own."""
        path = "/fault-plan" if account is None else f"/accounts/{account}/fault-plan"
        await self._call("PUT", path, json=plan.model_dump(mode="json"))

    async def limits(self) -> ExchangeLimits:
        return ExchangeLimits.model_validate(await self._call("GET", "/limits"))

    async def set_limits(self, limits: ExchangeLimits) -> None:
        """Replaces all limits; `ExchangeLimits()` are the real broker's."""
        await self._call("PUT", "/limits", json=limits.model_dump(mode="json"))

    async def incidents(
        self,
        kind: IncidentKind | None = None,
        owner: str | None = None,
        since_ms: int | None = None,
    ) -> list[Incident]:
        """Returns incidents, oldest first, of one kind or all."""
        given = _given(kind=kind, owner=owner, since_ms=None if since_ms is None else str(since_ms))
        return _INCIDENTS.validate_python(await self._call("GET", "/incidents", params=given))

    async def lift(self, owner_kind: LimitOwnerKind, owner: str) -> None:
        """Ends the ban and the suspension of a person or an address."""
        await self._call("POST", "/incidents/lift", json={"owner_kind": owner_kind, "owner": owner})

    async def announce_maintenance(self, window: ExchangeMaintenance) -> None:
        await self._call("POST", "/maintenance", json=window.model_dump(mode="json"))

    async def begin_maintenance(self, seconds: float, *, ends_sessions: bool = True) -> None:
        """Begins a window at once that lasts `seconds`."""
        now = time.time_ns() // 1_000_000
        end = now + int(seconds * 1000)
        await self.announce_maintenance(
            ExchangeMaintenance(begin_ms=now, end_ms=end, ends_sessions=ends_sessions)
        )

    async def end_maintenance(self) -> None:
        """Ends the open window and cancels those to come."""
        await self._call("DELETE", "/maintenance")

    async def close_day(self) -> int:
        """Ends the trading day; returns how many orders expired."""
        return int((await self._call("POST", "/day/close"))["orders"])

    async def set_walk(self, walk: PriceWalk) -> None:
        """Begins a random walk of prices; `PriceWalk()` stops it."""
        await self._call("PUT", "/market/walk", json=walk.model_dump(mode="json"))

    async def health(self) -> ExchangeHealth:
        return ExchangeHealth.model_validate(await self._call("GET", "/healthz"))

    async def _call(self, method: str, path: str, **how: Any) -> Any:
        try:
            response = await self._http.request(method, path, **how)
        except httpx.HTTPError as error:
            raise ExchangeUnreachable(f"{method} {path}: {type(error).__name__}") from error
        if response.is_success:
            return response.json() if response.content else None
        try:
            problem = response.json()
            code, detail = str(problem["code"]), str(problem["detail"])
        except (ValueError, KeyError, TypeError):
            code, detail = BerthError.code, f"{method} {path}: HTTP {response.status_code}"
        raise from_code(code, detail)


def _given(**params: str | bool | None) -> dict[str, str | bool]:
    return {name: value for name, value in params.items() if value not in (None, "")}


class ExchangeServer(Server):
    """A paper exchange in a child process.
    `stop(SIGKILL)` crashes it, `start()` starts it again."""

    name = "exchange"

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        *,
        admin_port: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Takes `options`, further words of its command line, such as `--orders-per-10s 5000`."""
        super().__init__(directory, port)
        self.admin_port = admin_port or free_port()
        self.options = tuple(options)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self.admin_port}"

    def command(self) -> Sequence[str]:
        words = [
            sys.executable,
            "-P",
            "-m",
            "infra.exchange",
            "--host",
            HOST,
            "--port",
            str(self.port),
        ]
        words += [
            "--admin-port",
            str(self.admin_port),
            "--ledger",
            str(self.directory / "ledger.db"),
        ]
        return [*words, *self.options]

    def answers(self) -> bool:
        return accepts(self.port) and accepts(self.admin_port)
