"""What the session asks before it calls a broker: is there room within the broker's limits?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from worker_runtime.connection import Account
from worker_runtime.protocol.errors import RateLimited
from worker_runtime.valkey import Command

#: Seconds that a call may wait now; asked again and again, and may raise what forbids the call meanwhile.
Patience = Callable[[], float]


class What(StrEnum):
    """What is counted."""

    LOGIN = "logins"
    #: Place, replace, cancel.
    ORDER = "orders"
    #: Replace or cancel, where the adapter asks for the order's state first.
    LOOK_AND_CHANGE = "changes"
    #: Lists of orders and positions, the balance, a ping.
    QUERY = "queries"


class Uncounted(RateLimited):
    """Valkey, which counts the calls, is away or is starting; nothing was sent."""


class Budget(Protocol):
    """One session's part in the budgets of its accounts' persons."""

    @property
    def granted(self) -> bool:
        """Whether the last granted call may still be sent."""
        ...

    def spend(self, account: Account, what: What, patience: Patience, *, cost: int = 1) -> None:
        """Waits for room for `cost` of these. Raises `RateLimited` if there is none in time, `Uncounted` if
        nobody knows: nothing may be sent then."""
        ...

    def connect(self, account: Account, patience: Patience) -> None:
        """Before a login: one of the person's connections, and one login. Raises `LoginLimited`."""
        ...

    def disconnected(self, accounts: Iterable[Account]) -> None:
        """After the end of broker sessions: others may connect. Never raises."""
        ...

    def tend(self, open_accounts: Iterable[Account]) -> None:
        """To be called about once a second, with the accounts that have a broker session. Never raises."""
        ...


class Ahead(Protocol):
    """Asks for an order's room before the order is known, with the pop that is likely to bring it. Whatever
    becomes of that, `spend` grants what it would have granted."""

    def ask_ahead(self, accounts: Sequence[Account]) -> list[Command]:
        """What to send, with `accounts` ready to trade: nothing, or one question. Until it is answered, it is
        the same one, and counted once."""
        ...

    def answered_ahead(self, replies: Sequence[Any]) -> None:
        """The replies to that; error replies stand among them. Never raises."""
        ...


class Unlimited:
    """A budget without end, for tests."""

    granted = True

    def spend(self, account: Account, what: What, patience: Patience, *, cost: int = 1) -> None: ...

    def connect(self, account: Account, patience: Patience) -> None: ...

    def disconnected(self, accounts: Iterable[Account]) -> None: ...

    def tend(self, open_accounts: Iterable[Account]) -> None: ...
