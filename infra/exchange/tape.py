"""The stream of order events to the sessions of an account, with the faults that it may have."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from infra.exchange.accounts import Accounts
from infra.exchange.behaviour import Behaviour
from infra.exchange.faults import FaultPoint
from worker_runtime.protocol.exchange import ExchangeOrder, OrderChanged
from worker_runtime.protocol.messages import Fill


class Tape:
    """Makes events and sends them; `deliver` brings one event to every session of an account."""

    def __init__(
        self,
        accounts: Accounts,
        deliver: Callable[[str, OrderChanged], None],
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
        #: Until when (Unix milliseconds) the events of an account are lost.
        self._gaps: dict[str, int] = {}

    def events_of(self, order: ExchangeOrder, fills: Sequence[Fill]) -> tuple[OrderChanged, ...]:
        """One event for each fill, or one for the change of state when there is none."""
        if not fills:
            return (OrderChanged(event_id=self._new_event_id(), order=order),)
        return tuple(OrderChanged(event_id=self._new_event_id(), order=order, fill=fill) for fill in fills)

    def publish(self, account: str, events: tuple[OrderChanged, ...]) -> None:
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
            if event.fill is not None and self._accounts.strikes(account, FaultPoint.DUPLICATE_FILL):
                copies.append(msgspec.structs.replace(event, event_id=self._new_event_id()))
            late = self._accounts.strikes(account, FaultPoint.LATE_EVENT)
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
        if self._accounts.strikes(account, FaultPoint.EVENT_GAP):
            self._gaps[account] = self._now() + behaviour.event_gap_ms
            return True
        return self._accounts.strikes(account, FaultPoint.LOST_EVENT)

    def _deliver_later(self, account: str, event: OrderChanged, milliseconds: int) -> None:
        self._later(milliseconds / 1000, lambda: self._deliver(account, event))

    def _new_event_id(self) -> str:
        self._events += 1
        return f"{self._boot}-{self._events}"
