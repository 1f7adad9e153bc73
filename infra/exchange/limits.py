"""The broker's limits, and what it does to those who exceed them: bans, then suspension.

The defaults are those of Shioaji's documentation ("limit"): 5 connections a person, 1,000 logins a day, 250
orders in 10 s (changes and cancels count), 25 account queries in 5 s. Who exceeds one is banned for a minute,
in which logins are refused, too; whoever does so again and again is suspended, together with the address
used, until the broker is asked to lift it. A ban and a suspension outlive the exchange's process, in the
ledger; the windows of the last seconds do not.
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
    """What is counted."""

    LOGIN = "logins"
    #: Place, replace, cancel.
    ORDER = "orders"
    #: Lists of orders and positions, and the balance.
    QUERY = "queries"


class ExchangeLimits(BaseModel):
    """All numbers; those of an address are off (None), because the broker publishes none."""

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
    #: So many bans in one day end in a suspension. The broker's number is not published.
    suspend_after: int = Field(default=3, ge=1)
    #: Seconds; a session ends after it, as Shioaji's tokens do after a day.
    session_life_s: float = Field(default=86_400.0, gt=0)

    def of(self, owner: LimitOwnerKind, call: ExchangeCallKind) -> int | None:
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
    """So many calls in a span of seconds, for each owner of one kind."""

    def __init__(self, limit: int | None, span: float) -> None:
        self.limit = limit
        self.span = span
        #: Owner → when its last calls were, in Unix milliseconds.
        self._calls: dict[str, deque[int]] = {}

    def take(self, owner: str, now_ms: int) -> bool:
        """Whether one more call is within the limit; counts it if it is."""
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
    """Counts calls, bans and suspends. `now` gives Unix milliseconds.

    `suspended` is called with each newly suspended owner, so that its sessions can be ended.
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
        self._tell_suspended = suspended
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
                self._forgive(owner)

    def admit_login(self, person: str, address: str, account: str) -> None:
        """Counts nothing: the ledger's sessions are the count. Raises `LoginLimited` or `LoginRejected`."""
        for owner in _owners(person, address):
            self._check_standing(owner, ExchangeCallKind.LOGIN, account)
        begins = day_begins_ms(self._now())
        for owner in _owners(person, address):
            limit = self.limits.of(owner.kind, ExchangeCallKind.LOGIN)
            if limit is not None and self._ledger.count_sessions(owner.kind, owner.name, begins) >= limit:
                self._ban(owner, ExchangeCallKind.LOGIN, account, address, f"{limit} logins a day")

    def admit(self, call: ExchangeCallKind, person: str, address: str, account: str) -> None:
        """Counts one order or query. Raises `RateLimited`; the call must not be executed then."""
        if self._bans or self._suspended:
            for owner in _owners(person, address):
                self._check_standing(owner, call, account)
        now = self._now()
        of_person, of_address = self._quotas[call]
        if not of_person.take(person, now):
            self._exceeded(LimitOwner(LimitOwnerKind.PERSON, person), call, account, address, of_person)
        if not of_address.take(address, now):
            self._exceeded(LimitOwner(LimitOwnerKind.ADDRESS, address), call, account, address, of_address)

    def refuse(self, owner: LimitOwner, cause: str, account: str, detail: str) -> None:
        """Writes down that a call was refused."""
        self._note(IncidentKind.REFUSED, owner, cause, account, detail)

    def lift(self, owner: LimitOwner) -> None:
        """An operator of the broker forgives: ban and suspension end, and earlier bans count no more."""
        self._forgive(owner)
        self._note(IncidentKind.LIFTED, owner, "operator", "", "lifted by an operator of the exchange")

    @property
    def limits(self) -> ExchangeLimits:
        return self._limits

    @limits.setter
    def limits(self, limits: ExchangeLimits) -> None:
        """New windows begin empty."""
        self._limits = limits
        self._quotas = {
            call: (
                CallQuota(limits.of(LimitOwnerKind.PERSON, call), span),
                CallQuota(limits.of(LimitOwnerKind.ADDRESS, call), span),
            )
            for call, span in (
                (ExchangeCallKind.ORDER, limits.orders_window_s),
                (ExchangeCallKind.QUERY, limits.queries_window_s),
            )
        }

    # --- inside ---------------------------------------------------------------------------------------

    def _check_standing(self, owner: LimitOwner, call: ExchangeCallKind, account: str) -> None:
        """Raises if the owner is suspended or banned."""
        error: BerthError
        if owner in self._suspended:
            detail = f"the {owner.kind.value} is suspended; the broker has to lift it"
            error = LoginRejected(detail) if call is ExchangeCallKind.LOGIN else RateLimited(detail)
        elif (left := self._bans.get(owner, 0) - self._now()) > 0:
            detail = f"the {owner.kind.value} is banned for {left / 1000:.0f} s more"
            error = LoginLimited(detail) if call is ExchangeCallKind.LOGIN else RateLimited(detail)
        else:
            self._bans.pop(owner, None)
            return
        self._note(IncidentKind.REFUSED, owner, call.value, account, detail)
        raise error

    def _exceeded(
        self, owner: LimitOwner, call: ExchangeCallKind, account: str, address: str, quota: CallQuota
    ) -> None:
        self._ban(owner, call, account, address, f"{quota.limit} {call.value} in {quota.span:g} s")

    def _ban(self, owner: LimitOwner, call: ExchangeCallKind, account: str, address: str, what: str) -> None:
        """Refuses the call that was too much, and bans; always raises."""
        until = self._now() + int(self.limits.ban_s * 1000)
        self._bans[owner] = until
        self._note(IncidentKind.BANNED, owner, call.value, account, f"more than {what}", until)
        if self._bans_today(owner) >= self.limits.suspend_after:
            # The fact that makes one user dangerous for all behind the same address.
            for suspended in dict.fromkeys((owner, LimitOwner(LimitOwnerKind.ADDRESS, address))):
                self._suspended.add(suspended)
                self._note(IncidentKind.SUSPENDED, suspended, call.value, account, "banned again and again")
                self._tell_suspended(suspended)
        detail = f"more than {what}: banned for {self.limits.ban_s:g} s"
        raise LoginLimited(detail) if call is ExchangeCallKind.LOGIN else RateLimited(detail)

    def _bans_today(self, owner: LimitOwner) -> int:
        count = 0
        for incident in self._ledger.incidents(owner=owner.name, since_ms=day_begins_ms(self._now())):
            if incident.owner_kind is owner.kind:
                count += incident.kind is IncidentKind.BANNED
                if incident.kind is IncidentKind.LIFTED:
                    count = 0
        return count

    def _forgive(self, owner: LimitOwner) -> None:
        self._bans.pop(owner, None)
        self._suspended.discard(owner)
        for of_person, of_address in self._quotas.values():
            (of_person if owner.kind is LimitOwnerKind.PERSON else of_address).forget(owner.name)

    def _note(
        self,
        kind: IncidentKind,
        owner: LimitOwner,
        cause: str,
        account: str,
        detail: str,
        until: int | None = None,
    ) -> None:
        _log.warning("exchange.limit", kind=kind.value, owner=owner.kind.value, cause=cause, account=account)
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
