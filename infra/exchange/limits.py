"""The broker's limits, and its bans and suspensions of those who exceed them.

The defaults are those of Shioaji's documentation ("limit"): 5 connections a person, 1,000 logins
a day, 250 orders in 10 s (changes and cancels count), 25 account queries in 5 s. Exceeding one
bans a person for a minute, for logins too. Repeated bans suspend the person and the address used
until the broker lifts it. The ledger keeps bans and suspensions across a restart, but not the
calls of the last seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field

from infra.exchange.hours import day_begins_ms
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.records import Incident, IncidentKind, LimitOwnerKind
from worker_runtime.protocol.errors import BerthError, LoginLimited, LoginRejected, RateLimited

_log = structlog.get_logger()


class ExchangeCallKind(StrEnum):
    """The kinds of calls that are counted."""

    LOGIN = "logins"
    #: Place, replace, cancel.
    ORDER = "orders"
    #: Lists of orders and positions, and the balance.
    QUERY = "queries"


class ExchangeLimits(BaseModel):
    """The numbers of all limits. Those of an address are off (None),
    since the broker publishes none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connections_per_person: int = Field(default=5, ge=0)
    logins_per_day: int = Field(default=1000, ge=0)
    orders: int = Field(default=250, ge=0)
    orders_window_s: float = Field(default=10.0, gt=0)
    queries: int = Field(default=25, ge=0)
    queries_window_s: float = Field(default=5.0, gt=0)
    address_logins_per_day: int | None = Field(default=None, ge=0)
    address_orders: int | None = Field(default=None, ge=0)
    address_queries: int | None = Field(default=None, ge=0)
    ban_s: float = Field(default=60.0, gt=0)
    #: Bans in one day that lead to a suspension. The broker's number is not published.
    suspend_after: int = Field(default=3, ge=1)
    #: Seconds; a session ends after it, as Shioaji's tokens do after a day.
    session_life_s: float = Field(default=86_400.0, gt=0)

    def for_owner(self, owner: LimitOwnerKind, call: ExchangeCallKind) -> int | None:
        if owner is LimitOwnerKind.PERSON:
            return {
                ExchangeCallKind.LOGIN: self.logins_per_day,
                ExchangeCallKind.ORDER: self.orders,
                ExchangeCallKind.QUERY: self.queries,
            }[call]
        return {
            ExchangeCallKind.LOGIN: self.address_logins_per_day,
            ExchangeCallKind.ORDER: self.address_orders,
            ExchangeCallKind.QUERY: self.address_queries,
        }[call]


class CallQuota:
    """A limit of calls in a span of seconds, for each owner of one kind."""

    def __init__(self, limit: int | None, span: float) -> None:
        self.limit = limit
        self.span = span
        #: Times of each owner's last calls, in Unix milliseconds.
        self._calls: dict[str, deque[int]] = {}

    def count_call(self, owner: str, now_ms: int) -> bool:
        """Counts a call if it is within the limit; False if it is not."""
        if self.limit is None:
            return True
        if (calls := self._calls.get(owner)) is None:
            calls = self._calls[owner] = deque()
        begin = now_ms - self.span * 1000
        while calls and calls[0] <= begin:
            calls.popleft()
        if len(calls) >= self.limit:
            return False
        calls.append(now_ms)
        return True

    def forget(self, owner: str) -> None:
        self._calls.pop(owner, None)


class LimitOwner(NamedTuple):
    """Whose calls are counted together."""

    kind: LimitOwnerKind
    name: str


class ExchangeLimiter:
    """Counts calls, bans and suspends. `now` returns Unix milliseconds.

    Calls `suspended` with each newly suspended owner, so that its sessions can be ended.
    """

    def __init__(
        self,
        ledger: ExchangeLedger,
        limits: ExchangeLimits,
        now: Callable[[], int],
        suspended: Callable[[LimitOwner], None],
    ) -> None:
        self._ledger = ledger
        self._now = now
        self._on_suspended = suspended
        self.limits = limits
        #: Unix milliseconds at which a ban ends.
        self._bans: dict[LimitOwner, int] = {}
        self._suspended: set[LimitOwner] = set()
        for incident in ledger.incidents():
            owner = LimitOwner(incident.owner_kind, incident.owner)
            if incident.kind is IncidentKind.BANNED and incident.until_ms is not None:
                self._bans[owner] = incident.until_ms
            elif incident.kind is IncidentKind.SUSPENDED:
                self._suspended.add(owner)
            elif incident.kind is IncidentKind.LIFTED:
                self._clear(owner)

    def admit_login(self, person: str, address: str, account: str) -> None:
        """Checks a login against the ledger's sessions.
        Raises `LoginLimited` or `LoginRejected`."""
        for owner in _owners(person, address):
            self._check_ban(owner, ExchangeCallKind.LOGIN, account)
        begins = day_begins_ms(self._now())
        for owner in _owners(person, address):
            limit = self.limits.for_owner(owner.kind, ExchangeCallKind.LOGIN)
            if (
                limit is not None
                and self._ledger.count_sessions(owner.kind, owner.name, begins) >= limit
            ):
                self._ban(owner, ExchangeCallKind.LOGIN, account, address, f"{limit} logins a day")

    def admit(self, call: ExchangeCallKind, person: str, address: str, account: str) -> None:
        """Counts an order or query. Raises `RateLimited` if it must not be executed."""
        if self._bans or self._suspended:
            for owner in _owners(person, address):
                self._check_ban(owner, call, account)
        now = self._now()
        of_person, of_address = self._quotas[call]
        if not of_person.count_call(person, now):
            self._exceeded(
                LimitOwner(LimitOwnerKind.PERSON, person), call, account, address, of_person
            )
        if not of_address.count_call(address, now):
            self._exceeded(
                LimitOwner(LimitOwnerKind.ADDRESS, address), call, account, address, of_address
            )

    def refuse(self, owner: LimitOwner, cause: str, account: str, detail: str) -> None:
        """Records a refused call."""
        self._record(IncidentKind.REFUSED, owner, cause, account, detail)

    def lift(self, owner: LimitOwner) -> None:
        """Lifts ban and suspension; earlier bans do not count any more."""
        self._clear(owner)
        self._record(
            IncidentKind.LIFTED, owner, "operator", "", "lifted by an operator of the exchange"
        )

    @property
    def limits(self) -> ExchangeLimits:
        return self._limits

    @limits.setter
    def limits(self, limits: ExchangeLimits) -> None:
        """Sets the limits; all counts start at 0."""
        self._limits = limits
        self._quotas = {
            call: (
                CallQuota(limits.for_owner(LimitOwnerKind.PERSON, call), span),
                CallQuota(limits.for_owner(LimitOwnerKind.ADDRESS, call), span),
            )
            for call, span in (
                (ExchangeCallKind.ORDER, limits.orders_window_s),
                (ExchangeCallKind.QUERY, limits.queries_window_s),
            )
        }

    # --- inside -----------------------------------------------------------------------------------

    def _check_ban(self, owner: LimitOwner, call: ExchangeCallKind, account: str) -> None:
        """Raises if the owner is suspended or banned."""
        error: BerthError
        if owner in self._suspended:
            detail = f"the {owner.kind.value} is suspended; the broker has to lift it"
            error = LoginRejected(detail) if call is ExchangeCallKind.LOGIN else RateLimited(detail)
        elif (remaining_ms := self._bans.get(owner, 0) - self._now()) > 0:
            detail = f"the {owner.kind.value} is banned for {remaining_ms / 1000:.0f} s more"
            error = LoginLimited(detail) if call is ExchangeCallKind.LOGIN else RateLimited(detail)
        else:
            self._bans.pop(owner, None)
            return
        self._record(IncidentKind.REFUSED, owner, call.value, account, detail)
        raise error

    def _exceeded(
        self,
        owner: LimitOwner,
        call: ExchangeCallKind,
        account: str,
        address: str,
        quota: CallQuota,
    ) -> None:
        self._ban(owner, call, account, address, f"{quota.limit} {call.value} in {quota.span:g} s")

    def _ban(
        self, owner: LimitOwner, call: ExchangeCallKind, account: str, address: str, limit: str
    ) -> None:
        """Bans the owner; always raises, since the call is refused."""
        until = self._now() + int(self.limits.ban_s * 1000)
        self._bans[owner] = until
        self._record(IncidentKind.BANNED, owner, call.value, account, f"more than {limit}", until)
        if self._bans_today(owner) >= self.limits.suspend_after:
            # The address is suspended, too: one user can lock out all behind it.
            for suspended in dict.fromkeys((owner, LimitOwner(LimitOwnerKind.ADDRESS, address))):
                self._suspended.add(suspended)
                self._record(
                    IncidentKind.SUSPENDED, suspended, call.value, account, "banned again and again"
                )
                self._on_suspended(suspended)
        detail = f"more than {limit}: banned for {self.limits.ban_s:g} s"
        raise LoginLimited(detail) if call is ExchangeCallKind.LOGIN else RateLimited(detail)

    def _bans_today(self, owner: LimitOwner) -> int:
        count = 0
        for incident in self._ledger.incidents(
            owner=owner.name, since_ms=day_begins_ms(self._now())
        ):
            if incident.owner_kind is owner.kind:
                count += incident.kind is IncidentKind.BANNED
                if incident.kind is IncidentKind.LIFTED:
                    count = 0
        return count

    def _clear(self, owner: LimitOwner) -> None:
        self._bans.pop(owner, None)
        self._suspended.discard(owner)
        for of_person, of_address in self._quotas.values():
            (of_person if owner.kind is LimitOwnerKind.PERSON else of_address).forget(owner.name)

    def _record(
        self,
        kind: IncidentKind,
        owner: LimitOwner,
        cause: str,
        account: str,
        detail: str,
        until: int | None = None,
    ) -> None:
        _log.warning(
            "exchange.limit", kind=kind.value, owner=owner.kind.value, cause=cause, account=account
        )
        self._ledger.add_incident(
            Incident(
                at_ms=self._now(),
                kind=kind,
                owner_kind=owner.kind,
                owner=owner.name,
                account=account,
                cause=cause,
                detail=detail,
                until_ms=until,
            )
        )


def _owners(person: str, address: str) -> tuple[LimitOwner, LimitOwner]:
    return LimitOwner(LimitOwnerKind.PERSON, person), LimitOwner(LimitOwnerKind.ADDRESS, address)
