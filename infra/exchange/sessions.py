"""Sessions: who is logged in, how long, and what the exchange refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from infra.exchange.accounts import Accounts
from infra.exchange.hours import MaintenancePlan
from infra.exchange.ledger import Ledger
from infra.exchange.limits import Call, Limiter, Limits, Owner
from infra.exchange.records import LedgerSession, OwnerKind
from worker_runtime.protocol.errors import LoginLimited
from worker_runtime.protocol.exchange import Login, OrderChanged

_SETTING = "limits"
_log = structlog.get_logger()


class Listener(Protocol):
    """One logged-in connection."""

    def deliver(self, event: OrderChanged) -> None: ...

    def end(self, reason: str, *, abrupt: bool) -> None: ...


class Sessions:
    """All open sessions. Limits that an admin call has set outlive a restart; else `limits` hold."""

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], int],
        limits: Limits,
    ) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._later = later
        self._now = now
        self._open: dict[str, tuple[LedgerSession, Listener]] = {}
        #: The same sessions by account, because each event looks for those of one.
        self._listeners: dict[str, dict[str, Listener]] = {}
        ledger.close_all_sessions(now(), "the exchange restarted")
        if kept := ledger.setting(_SETTING):
            limits = Limits.model_validate_json(kept)
        self.limiter = Limiter(ledger, limits, now, self._end_suspended)
        self.maintenance = MaintenancePlan(ledger, later, now, self._end_for_maintenance)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def limits(self) -> Limits:
        return self.limiter.limits

    def set_limits(self, limits: Limits) -> None:
        """For all calls from now on; the life of an open session stays what it was."""
        self._ledger.save_setting(_SETTING, limits.model_dump_json())
        self.limiter.limits = limits

    def login(self, request: Login, listener: Listener, address: str = "") -> LedgerSession:
        """Opens a session; raises `LoginRejected`, `LoginLimited` or `BrokerMaintenance`."""
        self.maintenance.check()
        person_id = self._accounts.check_login(request)
        self.limiter.admit_login(person_id, address, request.account)
        connected = sum(session.person_id == person_id for session, _ in self._open.values())
        if connected >= self.limits.connections_per_person:
            detail = f"{connected} connections are open for this person"
            self.limiter.refuse(Owner(OwnerKind.PERSON, person_id), "connections", request.account, detail)
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

    def admit(self, session: LedgerSession, call: Call) -> None:
        """Before each order and query; raises `RateLimited` or `BrokerMaintenance`."""
        self.maintenance.check()
        self.limiter.admit(call, session.person_id, session.address, session.account)

    def logout(self, session_id: str, reason: str) -> None:
        if (found := self._open.pop(session_id, None)) is not None:
            account = found[0].account
            del self._listeners[account][session_id]
            if not self._listeners[account]:
                del self._listeners[account]
            self._ledger.close_session(session_id, self._now(), reason)

    def deliver(self, account: str, event: OrderChanged) -> None:
        """To every session of the account."""
        if listeners := self._listeners.get(account):
            for listener in list(listeners.values()):
                listener.deliver(event)

    def end(self, account: str, reason: str, *, abrupt: bool) -> int:
        """Ends all sessions of an account, with or without telling them; returns how many."""
        return self._end_all(lambda session: session.account == account, reason, abrupt=abrupt)

    # --- inside ---------------------------------------------------------------------------------------

    def _end_all(self, chosen: Callable[[LedgerSession], bool], reason: str, *, abrupt: bool = False) -> int:
        ending = [entry for entry in self._open.values() if chosen(entry[0])]
        for session, listener in ending:
            self.logout(session.session_id, reason)
            listener.end(reason, abrupt=abrupt)
        return len(ending)

    def _expire(self, session_id: str) -> None:
        if session_id in self._open:
            _log.info("exchange.token_expired", session=session_id)
            self._end_all(lambda session: session.session_id == session_id, "the token expired")

    def _end_suspended(self, owner: Owner) -> None:
        def hit(session: LedgerSession) -> bool:
            return owner.name == (session.person_id if owner.kind is OwnerKind.PERSON else session.address)

        def end() -> None:
            self._end_all(hit, f"the {owner.kind.value} is suspended")

        # Not now: whoever is refused should still get the answer to that call.
        self._later(0.0, end)

    def _end_for_maintenance(self) -> None:
        self._end_all(lambda session: True, "maintenance begins")
