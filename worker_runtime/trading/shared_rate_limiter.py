"""The broker's limits, kept before each call, together with all other workers of the person (requirement C4).

Valkey counts (`budget.lua`, `connection.lua`). A call that is too much waits while its caller can; then it is
refused, and nothing has been sent.

Keys hold no person id: a hash of it, keyed with what somebody who reads Valkey alone does not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import hiredis

from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Argument, Command, Valkey, ValkeyFailed, ValkeyUnreachable, evalsha
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError, LoginLimited, RateLimited
from worker_runtime.protocol.launch import BrokerLimits, WorkerConfig
from worker_runtime.protocol.scripts import RENEW_CONNECTIONS, SPEND_BUDGET, TAKE_CONNECTION, Script
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.guess import OrderGuess
from worker_runtime.trading.rate_limiter import CallKind, CountUnavailable, WaitLimit

#: Seconds within which a granted call is to be sent. The windows are longer by it: a call that is sent late
#: is still counted when the broker still counts it.
GRANT_LIFETIME = 0.5
#: Seconds that a broker connection stays taken when its worker says nothing more, and between two renewals.
CONNECTION_LEASE = 150.0
CONNECTION_RENEWAL = 60.0
#: Seconds until a renewal that failed is tried again.
_RETRY = 5.0
#: Seconds for which nothing is asked ahead after an order had to wait: until the window is another one.
_SCARCE = 10.0
#: Longest sleep in one piece: a worker that waits hears of the end of its lease.
_SLICE = 0.2
_DAY = 0


class _BudgetWindow(NamedTuple):
    what: CallKind
    #: How many calls are spent.
    cost: int
    span_ms: int
    limit: int
    #: For the rest of a day whose count was lost.
    reserve: int

    @classmethod
    def of(
        cls, what: CallKind, cost: int, limits: BrokerLimits, share: float, persons: int = 1
    ) -> _BudgetWindow:
        number, span = {
            CallKind.LOGIN: (limits.logins_per_day, _DAY),
            CallKind.ORDER: (limits.orders_per_10s, _span(10.0)),
            CallKind.QUERY: (limits.queries_per_5s, _span(5.0)),
        }[what]
        limit = max(min(1, number), int(number * share)) * persons
        # Half of what the margin left: a count that is lost twice in a day still stays below the number.
        return cls(what, cost, span, limit, (number * persons - limit) // 2)


#: What a call counts in which window. Shioaji counts an update of status, which its list of orders needs, as
#: an order, too.
_WINDOWS = {
    CallKind.LOGIN: {CallKind.LOGIN: 1},
    CallKind.ORDER: {CallKind.ORDER: 1},
    CallKind.QUERY: {CallKind.QUERY: 1, CallKind.ORDER: 1},
    CallKind.QUERY_AND_CHANGE: {CallKind.QUERY: 1, CallKind.ORDER: 2},
}


class _BudgetQuery(NamedTuple):
    """One run of `budget.lua`, but for its call and what is known of the count."""

    owner: str
    names: list[str]
    numbers: list[int]


@dataclass(slots=True)
class _PrefetchedRoom:
    """An order's room that was asked for before the order was known."""

    account: OpenedAccount
    call: str
    #: CLOCK_MONOTONIC seconds before it was first sent: it is counted later than that, if it is.
    asked_at: float
    #: Owner, and whether it was asked for as one who has never made a call; as sent last.
    owners: list[tuple[str, bool]]
    granted: bool = False

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.asked_at < GRANT_LIFETIME


class SharedRateLimiter:
    """One session's part in what Valkey counts. Implements `Budget` and `Ahead`. Times in seconds."""

    def __init__(self, client: Valkey, config: WorkerConfig, board: SharedState, log: Log) -> None:
        self._client = client
        self._allowance = config.allowance
        self._secret = config.orchestrator_key
        self._mark_period = config.mark_period
        self._shared_state = board
        self._log = log
        self._holder = f"{config.worker_id}:{board.session_number}"
        self._calls = 0
        #: The count under which a window was granted, and the first one that an owner had.
        self._known: dict[tuple[str, str], str] = {}
        self._first: dict[str, str] = {}
        #: Before the last question was first sent, and before the one that was granted was.
        self._asked_at = 0.0
        self._granted_at = 0.0
        self._guess = OrderGuess()
        self._ahead: _PrefetchedRoom | None = None
        #: What is asked ahead for one account is always the same.
        self._asked: tuple[OpenedAccount, list[_BudgetQuery]] | None = None
        self._renewed_at = 0.0
        self._lost_seen = board.owner_missing

    @property
    def granted(self) -> bool:
        """Whether the last granted call may still be sent."""
        return time.monotonic() - self._granted_at < GRANT_LIFETIME

    def spend(self, account: OpenedAccount, what: CallKind, patience: WaitLimit, *, cost: int = 1) -> None:
        """Waits for room, with the pulse going on.

        Raises `RateLimited` (`LoginLimited` for a login) if there is none in time, or Valkey cannot be asked:
        `CountUnavailable` if it is away or reads its data in yet.
        """
        if what is CallKind.ORDER and cost == 1 and self._take_ahead(account):
            return
        error = LoginLimited if what is CallKind.LOGIN else RateLimited
        call = self._next_call()
        for owner, names, numbers in self._questions(account, what, cost):
            self._await(
                partial(self._ask, SPEND_BUDGET, names, [call], owner, what, numbers),
                patience,
                error,
                f"the budget of {what.value} is used up",
            )
        self._granted_at = self._asked_at
        if what is CallKind.ORDER:
            self._guess.ordered(account)

    def ask_ahead(self, accounts: Sequence[OpenedAccount]) -> list[Command]:
        ahead = self._ahead
        if ahead is not None and not ahead.fresh:  # counted for nothing, as far as anybody knows
            ahead = self._ahead = None
            self._guess.wrong()
        if ahead is None:
            account = self._guess.among(accounts)
            if account is None:
                return []
            ahead = self._ahead = _PrefetchedRoom(account, self._next_call(), time.monotonic(), [])
        elif ahead.granted:  # by the last ring, which was for something else
            return []
        if self._asked is None or self._asked[0] != ahead.account:
            self._asked = ahead.account, self._questions(ahead.account, CallKind.ORDER, 1)
        ahead.owners.clear()
        commands = []
        for owner, names, numbers in self._asked[1]:
            fresh, known = self._count(owner, CallKind.ORDER)
            ahead.owners.append((owner, fresh))
            commands.append(evalsha(SPEND_BUDGET, names, [ahead.call, known, int(fresh), *numbers]))
        return commands

    def answered_ahead(self, replies: Sequence[Any]) -> None:
        ahead = self._ahead
        if ahead is None or not replies:
            return
        if any(isinstance(reply, hiredis.ReplyError) for reply in replies):
            self._ahead = None  # whoever needs the room hears of it, and sends the script if that is all
            self._guess.wrong()
            return
        waits = [
            self._learn(owner, CallKind.ORDER, fresh, reply)
            for (owner, fresh), reply in zip(ahead.owners, replies, strict=True)
        ]
        if any(waits):
            self._ahead = None
            if not all(waits):  # one of two owners has counted it for nothing
                self._guess.wrong()
        else:
            ahead.granted = True

    def connect(self, account: OpenedAccount, patience: WaitLimit) -> None:
        """Before a login: one of the person's connections, and one login. Raises `LoginLimited`."""
        owner = self._person(account)
        names = [keys.budget(owner, name) for name in ("since", "connections", "holders")]
        words: list[Argument] = [self._connection(account), self._holder, _ms(CONNECTION_LEASE)]
        words += [self._limits(account).connections, _ms(2 * self._mark_period)]
        self._await(
            partial(self._ask, TAKE_CONNECTION, names, words, owner, "connections", []),
            patience,
            LoginLimited,
            "no connection of the person is known to be free",
        )
        try:
            self.spend(account, CallKind.LOGIN, patience)
        except BerthError:
            self.disconnected([account])
            raise

    def disconnected(self, accounts: Iterable[OpenedAccount]) -> None:
        """After the end of broker sessions: others may connect. Never raises: a lease ends by itself."""
        self._tell(accounts, 0.0)

    def run_due(self, open_accounts: Iterable[OpenedAccount]) -> None:
        """Renews the leases of open connections, when that is due or when Valkey has lost its data."""
        lost = self._shared_state.owner_missing
        if lost == self._lost_seen and time.monotonic() - self._renewed_at < CONNECTION_RENEWAL:
            return
        self._lost_seen = lost
        self._renewed_at = time.monotonic()
        self._tell(open_accounts, CONNECTION_LEASE)

    # --- inside ---------------------------------------------------------------------------------------

    def _await(
        self,
        ask: Callable[[], int],
        patience: WaitLimit,
        error: type[BerthError],
        lack: str,
    ) -> None:
        def refusal(ms: int, why: str = lack, away: bool = False) -> BerthError:
            kind = CountUnavailable if away and error is RateLimited else error
            return kind(f"{why}; ask again in {ms} ms. Nothing was sent", retry_after=ms / 1000)

        while True:
            try:
                wait_ms = ask()
            except ValkeyFailed as failed:
                self._log.warning("budget_unknown", code=failed.code, reason=failed.detail)
                raise refusal(
                    1000, "Valkey, which counts the calls, could not be asked", _is_outage(failed)
                ) from None
            if wait_ms <= 0:
                return
            until = time.monotonic() + wait_ms / 1000
            if wait_ms / 1000 >= patience():
                raise refusal(wait_ms)
            self._log.info("budget_awaited", wait_ms=wait_ms)
            while (left := min(until - time.monotonic(), _SLICE)) > 0:
                if patience() <= 0:
                    raise refusal(max(1, _ms(until - time.monotonic())))
                with self._shared_state.busy(left):
                    time.sleep(left)

    def _ask(
        self,
        script: Script,
        names: list[str],
        words: list[Argument],
        owner: str,
        what: str,
        numbers: list[int],
    ) -> int:
        """Milliseconds to wait; 0: granted."""
        fresh, known = self._count(owner, what)
        arguments: list[Argument] = [*words, known, int(fresh), *numbers]
        self._asked_at = time.monotonic()
        try:
            reply = self._client.run(script, names, arguments)
        except ValkeyUnreachable:  # a broken connection; a repeat is recognised, and counted once
            reply = self._client.run(script, names, arguments)
        return self._learn(owner, what, fresh, reply)

    def _take_ahead(self, account: OpenedAccount) -> bool:
        """Whether room for one order was granted ahead; it is there once, and as long as any grant."""
        ahead = self._ahead
        if ahead is None or ahead.account != account:
            return False
        self._ahead = None
        if not (ahead.granted and ahead.fresh):
            if ahead.granted:  # counted for nothing
                self._guess.wrong()
            return False
        self._granted_at = ahead.asked_at
        self._guess.ordered(account)
        return True

    def _next_call(self) -> str:
        self._calls += 1
        return f"{self._holder}:{self._calls}"

    def _questions(self, account: OpenedAccount, what: CallKind, cost: int) -> list[_BudgetQuery]:
        """What to ask for one call: each owner, one after the other."""
        questions = []
        for owner, persons in self._owners(account):
            windows = [
                _BudgetWindow.of(each, cost * weight, self._limits(account), self._allowance.share, persons)
                for each, weight in _WINDOWS[what].items()
            ]
            names = [keys.budget(owner, "since"), *(keys.budget(owner, each.what) for each in windows)]
            questions.append(_BudgetQuery(owner, names, [number for each in windows for number in each[1:]]))
        return questions

    def _count(self, owner: str, what: str) -> tuple[bool, str]:
        """Whether there has been none yet, and the one that is known, or ''."""
        fresh = self._never_served and owner not in self._first
        return fresh, self._known.get((owner, what)) or self._first.get(owner, "")

    def _learn(self, owner: str, what: str, fresh: bool, reply: Any) -> int:
        """Takes in a reply: milliseconds to wait; 0: granted."""
        granted, wait_ms, count = reply
        if not granted:
            if what == CallKind.ORDER:
                self._guess.scarce(_SCARCE)
            return max(1, int(wait_ms))
        if fresh:
            self._first[owner] = count.decode()
        self._known[owner, what] = count.decode()
        return 0

    @property
    def _never_served(self) -> bool:
        """This is the first session of the user's first worker: a missing count was not lost. (Another user
        of the same person may have made calls in the seconds before a loss of data; that is the one gap.)"""
        board = self._shared_state
        return board.epoch == 1 and board.claimed_session == board.session_number

    def _owners(self, account: OpenedAccount) -> list[tuple[str, int]]:
        """Whose calls these are, with the number of persons that each stands for."""
        owners = [(self._person(account), 1)]
        if self._allowance.egress:
            address = self._hash(account.key.broker, "address", self._allowance.egress)
            owners.append((address, self._allowance.egress_persons))
        return owners

    def _person(self, account: OpenedAccount) -> str:
        key, credentials = account.key, account.credentials
        if credentials.person_id:
            return self._hash(key.broker, "person", credentials.person_id)
        if key.broker == "paper":  # there, an account without a person is a person of its own
            return self._hash(key.broker, "account", key.account_id)
        return self._hash(key.broker, "api key", credentials.api_key)

    def _hash(self, *parts: str) -> str:
        return blake2b("\0".join(parts).encode(), key=self._secret, digest_size=16).hexdigest()

    def _limits(self, account: OpenedAccount) -> BrokerLimits:
        # Shioaji's numbers for any other broker: facts of one that bans are a safe start for the next.
        return self._allowance.paper if account.key.broker == "paper" else BrokerLimits()

    def _connection(self, account: OpenedAccount) -> str:
        """The same for all workers of the user, one after the other; another one for other credentials, which
        are proven by a login before the old session is closed."""
        return f"{self._shared_state.user_id}/{account.key.account_id}/{account.version}"

    def _tell(self, accounts: Iterable[OpenedAccount], lease: float) -> None:
        by_owner: dict[str, list[str]] = {}
        for account in accounts:
            by_owner.setdefault(self._person(account), []).append(self._connection(account))
        for owner, connections in by_owner.items():
            names = [keys.budget(owner, name) for name in ("connections", "holders")]
            try:
                self._client.run(RENEW_CONNECTIONS, names, [self._holder, _ms(lease), *connections])
            except ValkeyFailed as error:
                self._log.warning("connections_untold", code=error.code, reason=error.detail)
                self._renewed_at = time.monotonic() - CONNECTION_RENEWAL + _RETRY
                return


def _is_outage(failed: ValkeyFailed) -> bool:
    """Whether nothing else is served either: what is put back now is not popped again at once."""
    return isinstance(failed, ValkeyUnreachable) or failed.detail == "LOADING"


def _span(seconds: float) -> int:
    return _ms(seconds + GRANT_LIFETIME)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
