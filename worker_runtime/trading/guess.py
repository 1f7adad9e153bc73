"""Whether the next ring of the doorbell brings an order, and of which account.

Room for it is asked for ahead then. A wrong guess is a call that counts and is never made. So there are never
more of them than orders, and one; and none is made while room is scarce.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from worker_runtime.trading.account_session import OpenedAccount

#: Wrong guesses that a session may make in a row: a client that looks at its positions after each order rings
#: twice for one.
_MOST = 2


class OrderGuess:
    """One session's guesses. At first it takes a ring for an order: a session that is only asked for lists
    pays with one call for that."""

    def __init__(self) -> None:
        self._last: OpenedAccount | None = None
        #: Wrong guesses that may follow.
        self._credit = 1
        self._scarce_until = 0.0

    def among(self, accounts: Sequence[OpenedAccount]) -> OpenedAccount | None:
        """The account of the next order: that of the last one, or the only one; None: no guess."""
        if self._credit <= 0 or time.monotonic() < self._scarce_until:
            return None
        if self._last is not None and self._last in accounts:
            return self._last
        return accounts[0] if len(accounts) == 1 else None

    def ordered(self, account: OpenedAccount) -> None:
        """There was an order, or a cancel or change, which counts as one."""
        self._last = account
        self._credit = min(_MOST, self._credit + 1)

    def wrong(self) -> None:
        """No order came of the last guess."""
        self._credit -= 1

    def scarce(self, seconds: float) -> None:
        """An order had to wait for room: whoever has one at hand comes first for so long."""
        self._scarce_until = time.monotonic() + seconds
