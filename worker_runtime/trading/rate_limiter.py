"""Asks whether there is room within the broker's limits, before each call of a broker.

Valkey counts for each user and person (`spend_budget.lua`, `take_connection.lua`), across the
user's successive workers. A call beyond the limit waits while its caller can wait; then it is
refused, and nothing has been sent.

The names in Valkey hold a keyed hash of user and person instead of a person id. Neither a worker
nor anyone who reads Valkey has the key of that hash. The key is rotated: for a while there are two,
and a worker claimed then counts under the names of both, so that it shares each limit with workers
claimed before and after.

| worker claimed | counts under the name of |
|---|---|
| before the rotation | the older key |
| during the rotation, while both keys are in use | both keys |
| after the rotation, when the older key is gone | the newer key |

In the same way a worker also counts under the name that linked users share, and under the name of
release 0.1.0 if that release claimed the user's previous worker.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, Self

from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Argument, Valkey, ValkeyFailed, ValkeyUnreachable
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError, LoginLimited, RateLimited
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.launch import BrokerLimits, WorkerConfig
from worker_runtime.protocol.scripts import (
    NOTE_PAUSE,
    RENEW_CONNECTIONS,
    SPEND_BUDGET,
    TAKE_CONNECTION,
    Script,
)
from worker_runtime.trading.account_session import MAX_PAUSE_S, OpenedAccount

#: Returns the seconds that a call may still wait, or raises the error that forbids the call by now.
#: The limiter asks repeatedly while the call waits.
WaitLimit = Callable[[], float]

#: Seconds within which a granted call must be sent. The windows are longer by this time, so that a
#: call sent late is still counted while the broker counts it.
GRANT_LIFETIME_S = 0.5
#: Seconds that a broker connection stays taken after its last renewal, and seconds between two
#: renewals.
CONNECTION_LEASE_S = 150.0
CONNECTION_RENEW_INTERVAL_S = 60.0
#: Seconds after the end of a pause that a broker has asked for, within which the next one is twice
#: as long.
_PAUSES_GROW_WITHIN_S = 3600.0
#: Seconds until a renewal that failed is tried again.
_RENEW_RETRY_INTERVAL_S = 5.0
#: Longest sleep between two checks of the caller's limit: a waiting worker has to notice the end of
#: its lease.
_MAX_SLEEP_S = 0.2
#: Stands for the broker's day instead of a number of milliseconds (`spend_budget.lua`).
_DAY_WINDOW_MS = 0


class CallKind(StrEnum):
    """The kinds of calls that are counted."""

    LOGIN = "logins"
    #: Place, replace, cancel.
    ORDER = "orders"
    #: Replace or cancel, where the adapter asks for the order's state first.
    QUERY_AND_CHANGE = "changes"
    #: Lists of orders and positions, the balance, a ping.
    QUERY = "queries"


class CountUnavailable(RateLimited):
    """Valkey, which counts the calls, cannot be reached or is starting; nothing was sent."""


class _BudgetWindow(NamedTuple):
    kind: CallKind
    #: How many calls are spent.
    cost: int
    span_ms: int
    limit: int
    #: How many calls are allowed in the rest of a day whose count was lost.
    reserve: int

    @classmethod
    def of(
        cls, kind: CallKind, cost: int, limits: BrokerLimits, share: float, persons: float = 1
    ) -> Self:
        number, span = {
            CallKind.LOGIN: (limits.logins_per_day, _DAY_WINDOW_MS),
            CallKind.ORDER: (limits.orders_per_10s, _ms(10.0 + GRANT_LIFETIME_S)),
            CallKind.QUERY: (limits.queries_per_5s, _ms(5.0 + GRANT_LIFETIME_S)),
        }[kind]
        limit = max(min(1, number), int(number * share * persons))
        # Half of the margin: a count lost twice in a day still stays below the broker's number.
        return cls(kind, cost, span, limit, max(0, int(number * persons) - limit) // 2)


#: What a call counts in which window. Shioaji also counts the status update that its list of orders
#: needs as an order.
_WINDOWS = {
    CallKind.LOGIN: {CallKind.LOGIN: 1},
    CallKind.ORDER: {CallKind.ORDER: 1},
    CallKind.QUERY: {CallKind.QUERY: 1, CallKind.ORDER: 1},
    CallKind.QUERY_AND_CHANGE: {CallKind.QUERY: 1, CallKind.ORDER: 2},
}


class _BudgetOwner(NamedTuple):
    """Names whose calls are counted under one key."""

    name: str
    #: How many persons' limits it may use, and of which kinds it may use others.
    persons: float = 1
    persons_by_kind: Mapping[str, float] = {}
    #: Whether the calls are counted under an older key as well, which is asked first: then a
    #: missing count is not a lost one.
    counted_before: bool = False

    def persons_for(self, kind: str) -> float:
        return self.persons_by_kind.get(kind, self.persons)


class _BudgetQuery(NamedTuple):
    """Describes one question for Valkey: a script, and who asks for what.

    `words` and `numbers` are its arguments.
    """

    script: Script
    owner: _BudgetOwner
    kind: str
    names: list[str]
    words: list[Argument]
    numbers: list[int]


class SharedRateLimiter:
    """Counts one session's calls in Valkey. Times in seconds."""

    def __init__(
        self, client: Valkey, config: WorkerConfig, shared_state: SharedState, log: Log
    ) -> None:
        self._client = client
        self._allowance = config.allowance
        self._mark_period = config.mark_period
        self._shared_state = shared_state
        self._log = log
        self._holder = f"{config.worker_id}:{shared_state.session_number}"
        self._calls = 0
        self._record_limits: dict[str, BrokerLimits] = {}
        #: Permille of the fullest limit that were in use after the last granted call.
        self.limit_used: int | None = None
        #: The count id under which a window was granted last, and the first count id of each owner.
        self._known: dict[tuple[str, str], str] = {}
        self._first: dict[str, str] = {}
        #: CLOCK_MONOTONIC seconds before the last question was sent, and before the last granted
        #: one was.
        self._asked_at = 0.0
        self._granted_at = 0.0
        self._renewed_at = 0.0
        self._owner_missing_seen = shared_state.owner_missing

    def grant_is_fresh(self) -> bool:
        """Returns True if the last granted call may still be sent."""
        return time.monotonic() - self._granted_at < GRANT_LIFETIME_S

    def spend(
        self, account: OpenedAccount, kind: CallKind, wait_limit: WaitLimit, *, cost: int = 1
    ) -> None:
        """Waits for room for `cost` calls. Raises `RateLimited` (`LoginLimited` for a login) if
        there is none in time, `CountUnavailable` if Valkey cannot count; nothing may be sent
        then."""
        error = LoginLimited if kind is CallKind.LOGIN else RateLimited
        self._calls += 1
        call = f"{self._holder}:{self._calls}"
        for owner in self._owners(account):
            share, limits = self._allowance.share, self._limits(account)
            windows = [
                _BudgetWindow.of(each, cost * weight, limits, share, owner.persons_for(each))
                for each, weight in _WINDOWS[kind].items()
            ]
            names = [
                keys.budget(owner.name, name)
                for name in ("since", *(each.kind for each in windows))
            ]
            numbers = [self._day_begins_ms(account)]
            numbers += [number for each in windows for number in each[1:]]
            query = _BudgetQuery(SPEND_BUDGET, owner, kind, names, [call], numbers)
            self._await(query, wait_limit, error, f"The broker's limit of {kind.value} is used up")
        self._granted_at = self._asked_at

    def connect(self, account: OpenedAccount, wait_limit: WaitLimit) -> None:
        """Takes one of the person's connections and the room for one login.

        Raises `LoginLimited`.
        """
        connections = self._limits(account).connections
        try:
            for owner in self._connection_owners(account):
                words: list[Argument] = [self._connection(account), self._holder]
                words += [_ms(CONNECTION_LEASE_S)]
                words += [max(1, int(connections * owner.persons_for("connections")))]
                words += [_ms(2 * self._mark_period)]
                names = [
                    keys.budget(owner.name, name) for name in ("since", "connections", "holders")
                ]
                query = _BudgetQuery(TAKE_CONNECTION, owner, "connections", names, words, [])
                self._await(
                    query,
                    wait_limit,
                    LoginLimited,
                    "No connection of the person is known to be free",
                )
            self.spend(account, CallKind.LOGIN, wait_limit)
        except BerthError:
            self.release_connections([account])
            raise

    def note_pause(self, account: OpenedAccount, first_pause_s: float) -> float:
        """Blocks calls and logins of the account's person for a while, as the broker has asked.
        Returns the seconds of the pause, which grows while it comes again. Never raises."""
        arguments = [
            _ms(first_pause_s),
            _ms(max(MAX_PAUSE_S, first_pause_s)),
            _ms(_PAUSES_GROW_WITHIN_S),
        ]
        pause_s = first_pause_s
        for owner in self._person(account):
            try:
                left_ms = self._client.run(
                    NOTE_PAUSE, [keys.budget(owner.name, "since")], arguments
                )
            except ValkeyFailed as error:
                self._log.warning("suspension_not_noted", code=error.code, reason=error.detail)
                break
            pause_s = max(pause_s, left_ms / 1000)
        return pause_s

    def release_connections(self, accounts: Iterable[OpenedAccount]) -> None:
        """Frees the connections of ended broker sessions. Never raises: a lease ends by itself."""
        self._renew_leases(accounts, 0.0)

    def renew_connections(self, open_accounts: Iterable[OpenedAccount]) -> None:
        """Renews the leases of the open connections when due.

        Called about once a second; never raises.
        """
        owner_missing = self._shared_state.owner_missing
        if (
            owner_missing == self._owner_missing_seen
            and time.monotonic() - self._renewed_at < CONNECTION_RENEW_INTERVAL_S
        ):
            return
        self._owner_missing_seen = owner_missing
        self._renewed_at = time.monotonic()
        self._renew_leases(open_accounts, CONNECTION_LEASE_S)

    def _await(
        self, query: _BudgetQuery, wait_limit: WaitLimit, error: type[BerthError], lack: str
    ) -> None:
        """Asks until there is room. Raises `error` if there is none in time."""

        def refusal(ms: int, why: str = lack, away: bool = False) -> BerthError:
            kind = CountUnavailable if away and error is RateLimited else error
            return kind(f"{why}. Nothing was sent. Retry in {ms} ms.", retry_after=ms / 1000)

        while True:
            try:
                wait_ms = self._ask(query)
            except ValkeyFailed as failed:
                self._log.warning("budget_unknown", code=failed.code, reason=failed.detail)
                raise refusal(
                    1000, "Valkey, which counts the calls, could not be asked", _is_outage(failed)
                ) from None
            if wait_ms <= 0:
                return
            until = time.monotonic() + wait_ms / 1000
            if wait_ms / 1000 >= wait_limit():
                raise refusal(wait_ms)
            self._log.info("budget_awaited", wait_ms=wait_ms)
            while (seconds_left := min(until - time.monotonic(), _MAX_SLEEP_S)) > 0:
                if wait_limit() <= 0:
                    raise refusal(max(1, _ms(until - time.monotonic())))
                with self._shared_state.busy(seconds_left):
                    time.sleep(seconds_left)

    def _ask(self, query: _BudgetQuery) -> int:
        """Asks once; returns the milliseconds to wait, 0 if granted. Raises `ValkeyFailed`."""
        owner = query.owner.name
        # Whether the owner never had a count, and the id of the known one, or ''.
        fresh = (self._never_served or query.owner.counted_before) and owner not in self._first
        known = self._known.get((owner, query.kind)) or self._first.get(owner, "")
        arguments: list[Argument] = [*query.words, known, int(fresh), *query.numbers]
        self._asked_at = time.monotonic()
        try:
            reply = self._client.run(query.script, query.names, arguments)
        except ValkeyUnreachable:  # a broken connection; a repeat is recognised, and counted once
            reply = self._client.run(query.script, query.names, arguments)
        granted, wait_ms, count, *used = reply
        if not granted:
            return max(1, int(wait_ms))
        if used:  # no connection was asked for
            self.limit_used = int(used[0])
        if fresh:
            self._first[owner] = count.decode()
        self._known[owner, query.kind] = count.decode()
        return 0

    @property
    def _never_served(self) -> bool:
        """Returns True in the first session of the user's first worker: a count that is missing
        then was not lost. The one gap: another user whom an operator linked to the same person may
        have called in the seconds before a loss of data."""
        state = self._shared_state
        return state.epoch == 1 and state.claimed_session == state.session_number

    def _owners(self, account: OpenedAccount) -> list[_BudgetOwner]:
        """Returns the owners that the account's calls count for."""
        owners = self._person(account)
        if account.address_budgets:
            # Only this user's calls are in it, and each was counted for its person before.
            return owners + self._address(account)
        address = (f"{account.key.broker}-{name}" for name in self._allowance.egress)
        return owners + self._named(address, self._allowance.egress_persons)

    @staticmethod
    def _address(account: OpenedAccount) -> list[_BudgetOwner]:
        """Returns the owners of the user's share of the address."""
        shares = {kind: share / 1000 for kind, share in account.address_shares.items()}
        return [
            _BudgetOwner(name, account.address_share / 1000, shares, counted_before=True)
            for name in account.address_budgets
        ]

    def _connection_owners(self, account: OpenedAccount) -> list[_BudgetOwner]:
        """Returns the owners that the account's connection counts for: the address only where the
        broker limits its connections."""
        owners = self._person(account)
        return owners + self._address(account) if _limits_connections(account) else owners

    def _person(self, account: OpenedAccount) -> list[_BudgetOwner]:
        return self._named(account.budgets)

    @staticmethod
    def _named(names: Iterable[str], persons: float = 1) -> list[_BudgetOwner]:
        """Returns the owners for `names`, those of one owner, the oldest first."""
        return [
            _BudgetOwner(name, persons, counted_before=number > 0)
            for number, name in enumerate(names)
        ]

    def _limits(self, account: OpenedAccount) -> BrokerLimits:
        """Return the broker's limits: an operator's, else those of its record."""
        broker = account.key.broker
        limits = self._record_limits.get(broker)
        if limits is None:
            plugin = installed_brokers().get(broker)
            limits = self._allowance.limits.get(broker) or (
                plugin.record.limits.as_limits() if plugin is not None else BrokerLimits()
            )
            self._record_limits[broker] = limits
        return limits

    @staticmethod
    def _day_begins_ms(account: OpenedAccount) -> int:
        plugin = installed_brokers().get(account.key.broker)
        return plugin.record.limits.day_begins_ms if plugin is not None else 0

    def _connection(self, account: OpenedAccount) -> str:
        """Returns the connection's name: the same for a user's successive workers, another one for
        new credentials and for a renewal, which log in before the old session is closed."""
        second = "/second" if account.on_second_connection else ""
        return f"{self._shared_state.user_id}/{account.key.account_id}/{account.version}{second}"

    def _renew_leases(self, accounts: Iterable[OpenedAccount], lease: float) -> None:
        by_owner: dict[str, list[str]] = {}
        for account in accounts:
            for owner in self._connection_owners(account):
                by_owner.setdefault(owner.name, []).append(self._connection(account))
        for owner_name, connections in by_owner.items():
            names = [keys.budget(owner_name, name) for name in ("connections", "holders")]
            try:
                self._client.run(RENEW_CONNECTIONS, names, [self._holder, _ms(lease), *connections])
            except ValkeyFailed as error:
                self._log.warning("connections_not_renewed", code=error.code, reason=error.detail)
                self._renewed_at = (
                    time.monotonic() - CONNECTION_RENEW_INTERVAL_S + _RENEW_RETRY_INTERVAL_S
                )
                return


def _limits_connections(account: OpenedAccount) -> bool:
    return "connections" in account.address_shares


def _is_outage(failed: ValkeyFailed) -> bool:
    """Returns True if Valkey serves nothing else either, so that an order put back now is not
    popped again at once."""
    return isinstance(failed, ValkeyUnreachable) or failed.detail == "LOADING"


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
