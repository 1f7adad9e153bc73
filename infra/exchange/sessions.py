"""The sessions of the exchange: who is logged in,
and the feed of order events to them, with its faults."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import structlog

from infra.exchange.accounts import ExchangeAccounts
from infra.exchange.behaviour import Behaviour, FaultPoint
from infra.exchange.hours import MaintenancePlan
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.limits import ExchangeCallKind, ExchangeLimiter, ExchangeLimits, LimitOwner
from infra.exchange.records import LedgerSession, LimitOwnerKind
from worker_runtime.brokers.paper.wire import ExchangeOrder, ExchangeOrderChanged, Login
from worker_runtime.protocol.errors import LoginLimited
from worker_runtime.protocol.messages import Fill


class OrderEventFeed:
    """Makes order events and publishes them; `deliver` sends one to every session of an account."""

    def __init__(
        self,
        accounts: ExchangeAccounts,
        deliver: Callable[[str, ExchangeOrderChanged], None],
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], int],
    ) -> None:
        self._accounts = accounts
        self._deliver = deliver
        self._later = later
        self._now = now
        # Event ids of different starts of the exchange must differ.
        self._boot = secrets.token_hex(4)
        self._events = 0
        #: When the loss of an account's events ends, in Unix milliseconds.
        self._gaps: dict[str, int] = {}

    def events_of(
        self, order: ExchangeOrder, fills: Sequence[Fill]
    ) -> tuple[ExchangeOrderChanged, ...]:
        """Makes one event per fill, or one for the change of state if there is no fill."""
        if not fills:
            return (ExchangeOrderChanged(event_id=self._new_event_id(), order=order),)
        return tuple(
            ExchangeOrderChanged(event_id=self._new_event_id(), order=order, fill=fill)
            for fill in fills
        )

    def publish(self, account: str, events: tuple[ExchangeOrderChanged, ...]) -> None:
        """Sends events to every session of the account."""
        if not events:
            return
        behaviour = self._accounts.behaviour(account)
        for event in events:
            if self._lost(account, behaviour):
                continue
            if behaviour.events_without_tag:
                untagged = msgspec.structs.replace(event.order, tag="")
                event = msgspec.structs.replace(event, order=untagged)
            copies = [event]
            if event.fill is not None and self._accounts.fault_hits(
                account, FaultPoint.DUPLICATE_FILL
            ):
                copies.append(msgspec.structs.replace(event, event_id=self._new_event_id()))
            late = self._accounts.fault_hits(account, FaultPoint.LATE_EVENT)
            for copy in copies:
                if late:
                    self._deliver_later(account, copy, behaviour.late_event_ms)
                else:
                    self._deliver(account, copy)

    def _lost(self, account: str, behaviour: Behaviour) -> bool:
        if account in self._gaps:
            if self._now() < self._gaps[account]:
                return True
            del self._gaps[account]
        if self._accounts.fault_hits(account, FaultPoint.EVENT_GAP):
            self._gaps[account] = self._now() + behaviour.event_gap_ms
            return True
        return self._accounts.fault_hits(account, FaultPoint.LOST_EVENT)

    def _deliver_later(self, account: str, event: ExchangeOrderChanged, milliseconds: int) -> None:
        self._later(milliseconds / 1000, lambda: self._deliver(account, event))

    def _new_event_id(self) -> str:
        self._events += 1
        return f"{self._boot}-{self._events}"


_LIMITS_SETTING = "limits"
_log = structlog.get_logger()


class SessionListener(Protocol):
    """A logged-in connection."""

    def deliver(self, event: ExchangeOrderChanged) -> None: ...

    def end(self, reason: str, *, abrupt: bool) -> None: ...


class ExchangeSessions:
    """All open sessions. `limits` hold unless an admin
    call has set others, which survive a restart."""

    def __init__(
        self,
        ledger: ExchangeLedger,
        accounts: ExchangeAccounts,
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], int],
        limits: ExchangeLimits,
    ) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._later = later
        self._now = now
        self._open: dict[str, tuple[LedgerSession, SessionListener]] = {}
        #: The same sessions by account, for the events.
        self._listeners: dict[str, dict[str, SessionListener]] = {}
        ledger.close_all_sessions(now(), "the exchange restarted")
        if kept := ledger.setting(_LIMITS_SETTING):
            limits = ExchangeLimits.model_validate_json(kept)
        self.limiter = ExchangeLimiter(ledger, limits, now, self._end_suspended)
        self.maintenance = MaintenancePlan(ledger, later, now, self._end_for_maintenance)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def limits(self) -> ExchangeLimits:
        return self.limiter.limits

    def set_limits(self, limits: ExchangeLimits) -> None:
        """Sets the limits of all further calls; the life of open sessions stays."""
        self._ledger.save_setting(_LIMITS_SETTING, limits.model_dump_json())
        self.limiter.limits = limits

    def login(self, request: Login, listener: SessionListener, address: str = "") -> LedgerSession:
        """Opens a session; raises `LoginRejected`, `LoginLimited` or `BrokerMaintenance`."""
        self.maintenance.check()
        person_id = self._accounts.check_login(request)
        self.limiter.admit_login(person_id, address, request.account)
        connected = sum(session.person_id == person_id for session, _ in self._open.values())
        if connected >= self.limits.connections_per_person:
            detail = f"{connected} connections are open for this person"
            self.limiter.refuse(
                LimitOwner(LimitOwnerKind.PERSON, person_id), "connections", request.account, detail
            )
            raise LoginLimited(detail)
        session = LedgerSession(
            session_id=self._ledger.new_session_id(),
            account=request.account,
            person_id=person_id,
            client=request.client[:128],
            opened_ms=self._now(),
            closed_ms=None,
            close_reason=None,
            address=address,
        )
        self._ledger.open_session(session)
        self._open[session.session_id] = (session, listener)
        self._listeners.setdefault(session.account, {})[session.session_id] = listener
        life = self._accounts.behaviour(request.account).session_life_ms
        seconds = self.limits.session_life_s if life is None else life / 1000
        self._later(seconds, lambda: self._expire(session.session_id))
        return session

    def admit(self, session: LedgerSession, call: ExchangeCallKind) -> None:
        """Counts an order or query; raises `RateLimited` or `BrokerMaintenance`."""
        self.maintenance.check()
        self.limiter.admit(call, session.person_id, session.address, session.account)

    def logout(self, session_id: str, reason: str) -> None:
        if (opened := self._open.pop(session_id, None)) is not None:
            account = opened[0].account
            del self._listeners[account][session_id]
            if not self._listeners[account]:
                del self._listeners[account]
            self._ledger.close_session(session_id, self._now(), reason)

    def deliver(self, account: str, event: ExchangeOrderChanged) -> None:
        """Sends an event to every session of the account."""
        if listeners := self._listeners.get(account):
            for listener in list(listeners.values()):
                listener.deliver(event)

    def end(self, account: str, reason: str, *, abrupt: bool) -> int:
        """Ends all sessions of an account, `abrupt` without a message; returns how many."""
        return self._end_all(lambda session: session.account == account, reason, abrupt=abrupt)

    # --- inside -----------------------------------------------------------------------------------

    def _end_all(
        self, chosen: Callable[[LedgerSession], bool], reason: str, *, abrupt: bool = False
    ) -> int:
        ending = [entry for entry in self._open.values() if chosen(entry[0])]
        for session, listener in ending:
            self.logout(session.session_id, reason)
            listener.end(reason, abrupt=abrupt)
        return len(ending)

    def _expire(self, session_id: str) -> None:
        if session_id in self._open:
            _log.info("exchange.token_expired", session=session_id)
            self._end_all(lambda session: session.session_id == session_id, "the token expired")

    def _end_suspended(self, owner: LimitOwner) -> None:
        def affected(session: LedgerSession) -> bool:
            return owner.name == (
                session.person_id if owner.kind is LimitOwnerKind.PERSON else session.address
            )

        def end() -> None:
            self._end_all(affected, f"the {owner.kind.value} is suspended")

        # Later, so that the refused call is still answered.
        self._later(0.0, end)

    def _end_for_maintenance(self) -> None:
        self._end_all(lambda session: True, "maintenance begins")
