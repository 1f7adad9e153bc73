"""Rate limiters that ask no Valkey."""

from __future__ import annotations

from collections.abc import Iterable

from worker_runtime.protocol.errors import (
    RateLimited,
)
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.rate_limiter import (
    CallKind,
    SharedRateLimiter,
    WaitLimit,
)


class UnlimitedRateLimiter(SharedRateLimiter):
    """Grants every call at once."""

    def __init__(self) -> None:
        self.limit_used = None
        #: Accounts and seconds of the pauses that brokers have asked for.
        self.pauses: list[tuple[str, float]] = []

    def note_pause(self, account: OpenedAccount, first_pause_s: float) -> float:
        self.pauses.append((account.key.account_id, first_pause_s))
        return first_pause_s

    def grant_is_fresh(self) -> bool:
        return True

    def spend(
        self, account: OpenedAccount, kind: CallKind, wait_limit: WaitLimit, *, cost: int = 1
    ) -> None: ...

    def connect(self, account: OpenedAccount, wait_limit: WaitLimit) -> None: ...

    def release_connections(self, accounts: Iterable[OpenedAccount]) -> None: ...

    def renew_connections(self, open_accounts: Iterable[OpenedAccount]) -> None: ...


class CountingBudget(UnlimitedRateLimiter):
    """A rate limiter that writes down how long its callers would wait, and may be used up."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.asked: list[WaitLimit] = []
        self.full = False

    def spend(
        self, account: OpenedAccount, kind: CallKind, wait_limit: WaitLimit, *, cost: int = 1
    ) -> None:
        self._note(wait_limit)
        if self.full:
            raise RateLimited(retry_after=7.0)

    def connect(self, account: OpenedAccount, wait_limit: WaitLimit) -> None:
        self._note(wait_limit)

    def _note(self, wait_limit: WaitLimit) -> None:
        self.asked.append(wait_limit)
        self.waits.append(wait_limit())
