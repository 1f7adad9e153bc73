"""Keeps the pauses for which a broker asks.

A broker that answers "come back later" means the person, so all accounts of that person make no
call until the pause ends: those of this worker by what is noted here, those of other workers by
what the rate limiter notes in Valkey.
"""

import time

from worker_runtime.protocol.errors import BerthError, BrokerMaintenance, BrokerVersionRefused
from worker_runtime.trading.account_session import PAUSE_ERRORS, OpenedAccount, apply_min_pause
from worker_runtime.trading.rate_limiter import SharedRateLimiter


class BrokerPauses:
    """Holds until when no call may be made for an account's person."""

    def __init__(self, rate_limiter: SharedRateLimiter) -> None:
        self._rate_limiter = rate_limiter
        #: CLOCK_MONOTONIC seconds until which a person makes no call, by the name under which their
        #: calls are counted.
        self._paused_until: dict[str, float] = {}

    def note(self, account: OpenedAccount, error: BerthError | None) -> None:
        """Takes a pause for which the broker asks with this error of a call: until its end no
        account of the person makes a call, in no worker, and no successor of this one logs in. A
        refused SDK version does not concern the person, so it is not noted."""
        if not isinstance(error, PAUSE_ERRORS) or isinstance(error, BrokerVersionRefused):
            return
        if not error.retry_after:
            return
        apply_min_pause(account.key, error)
        pause = max(error.retry_after, self._rate_limiter.note_pause(account, error.retry_after))
        until = time.monotonic() + pause
        for name in account.budgets:
            self._paused_until[name] = max(until, self._paused_until.get(name, 0.0))

    def seconds_left(self, account: OpenedAccount) -> float:
        """Returns the seconds for which the broker wants no call of the account's person."""
        until = max((self._paused_until.get(name, 0.0) for name in account.budgets), default=0.0)
        return max(0.0, until - time.monotonic())

    def check(self, account: OpenedAccount) -> None:
        """Raises `BrokerMaintenance` while the broker wants no call of the account's person."""
        if (pause := self.seconds_left(account)) > 0:
            raise BrokerMaintenance(
                "The broker has asked for a pause. Nothing was sent.", retry_after=pause
            )
