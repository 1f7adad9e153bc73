"""What the session asks before it calls a broker: is there room within the broker's limits?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from worker_runtime.process.valkey import Command
from worker_runtime.protocol.errors import RateLimited
from worker_runtime.trading.account_session import OpenedAccount

#: Seconds that a call may wait now; asked again and again, and may raise what forbids the call meanwhile.
WaitLimit = Callable[[], float]


class CallKind(StrEnum):
    """What is counted."""

    LOGIN = "logins"
    #: Place, replace, cancel.
    ORDER = "orders"
    #: Replace or cancel, where the adapter asks for the order's state first.
    QUERY_AND_CHANGE = "changes"
    #: Lists of orders and positions, the balance, a ping.
    QUERY = "queries"


class CountUnavailable(RateLimited):
    """Valkey, which counts the calls, is away or is starting; nothing was sent."""


class RateLimiter(Protocol):
    """One session's part in the budgets of its accounts' persons."""

    @property
    def granted(self) -> bool:
        """Whether the last granted call may still be sent."""
        ...

    def spend(self, account: OpenedAccount, what: CallKind, patience: WaitLimit, *, cost: int = 1) -> None:
        """Waits for room for `cost` of these. Raises `RateLimited` if there is none in time,
        `CountUnavailable` if nobody knows: nothing may be sent then."""
        ...

    def connect(self, account: OpenedAccount, patience: WaitLimit) -> None:
        """Before a login: one of the person's connections, and one login. Raises `LoginLimited`."""
        ...

    def disconnected(self, accounts: Iterable[OpenedAccount]) -> None:
        """After the end of broker sessions: others may connect. Never raises."""
        ...

    def run_due(self, open_accounts: Iterable[OpenedAccount]) -> None:
        """To be called about once a second, with the accounts that have a broker session. Never raises."""
        ...


class PrefetchingRateLimiter(Protocol):
    """Asks for an order's room before the order is known, with the pop that is likely to bring it. Whatever
    becomes of that, `spend` grants what it would have granted."""

    def ask_ahead(self, accounts: Sequence[OpenedAccount]) -> list[Command]:
        """What to send, with `accounts` ready to trade: nothing, or one question. Until it is answered, it is
        the same one, and counted once."""
        ...

    def answered_ahead(self, replies: Sequence[Any]) -> None:
        """The replies to that; error replies stand among them. Never raises."""
        ...


class UnlimitedRateLimiter:
    """A budget without end, for tests."""

    granted = True

    def spend(
        self, account: OpenedAccount, what: CallKind, patience: WaitLimit, *, cost: int = 1
    ) -> None: ...

    def connect(self, account: OpenedAccount, patience: WaitLimit) -> None: ...

    def disconnected(self, accounts: Iterable[OpenedAccount]) -> None: ...

    def run_due(self, open_accounts: Iterable[OpenedAccount]) -> None: ...
