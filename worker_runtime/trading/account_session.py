"""Holds one account of the user: its credentials, its broker session, and why it has none.

`CredentialOpener` is the one place where a user's secrets become readable (invariant *sealed*).
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from worker_runtime.brokers.port import Broker, ConnectionKey, UsesCertificate
from worker_runtime.process.clock import Backoff, wall_ms
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol import errors
from worker_runtime.protocol.authentication import AssignmentKeys
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import AccountLogin, Credentials, SealedAccount, decode
from worker_runtime.protocol.sealing import open_message_keys, unseal

#: Characters of a broker's words about a login that go into an event.
MAX_DETAIL_LENGTH = 500
#: Longest pause, in seconds, between two logins of an account if the broker asks again each time.
MAX_PAUSE_S = 960.0
#: A session whose life is limited is renewed within this part of its life before the end, and
#: within these seconds at most: in the first half of them in a quiet moment only.
_RENEWAL_PART, _MAX_RENEWAL_S = 0.25, 1800.0
#: Seconds without a request that make a moment quiet, or this part of the time for the renewal.
_QUIET_S, _QUIET_PART = 60.0, 0.25
_DAY_S = 86_400.0
#: Login errors that are no fault of this process: it tries again, however long that takes.
_BROKER_AWAY = (errors.BrokerUnreachable, errors.LoginLimited, errors.LeaseLost, errors.Fenced)

#: Errors with which a broker asks for a pause.
PAUSE_ERRORS = (errors.LoginLimited, errors.BrokerMaintenance, errors.OutcomeUnknown)


@dataclass(frozen=True, slots=True)
class OpenedAccount:
    """Holds one account with its credentials in clear."""

    key: ConnectionKey
    version: int
    credentials: Credentials = field(repr=False)
    #: Names under which its person's calls are counted (`SealedAccount`).
    budgets: Sequence[str]
    #: As in `SealedAccount`.
    books_first: bool = False
    address_budgets: Sequence[str] = ()
    address_share: int = 1000
    address_shares: Mapping[str, int] = field(default_factory=dict)
    #: Which of two connections its session has: a renewal logs in on the other one.
    on_second_connection: bool = False


class AccountSession:
    """An account with a live broker session, or without one and the reason for that.

    A broker session is the login of one account at the broker. It is *lost* when it ended without
    being closed by this process. (`session/session.py` has the session *process*.)
    """

    def __init__(self, account: OpenedAccount, login_pause: float) -> None:
        """Takes `login_pause`, the seconds after the first failed login; then it doubles up to a
        minute."""
        self.account = account
        self.broker: Broker | None = None
        self.used_at = time.monotonic()
        #: Whether a call ended without a clear answer, so that it is pinged before its next use.
        self.suspect = False
        #: Set when the broker refused these credentials: trying again could get the person banned.
        self.refused: errors.LoginRejected | None = None
        #: The newest version of the credentials that the broker refused, and why: these, or newer
        #: ones that came while these have a session.
        self.rejected: tuple[int, errors.BerthError] | None = None
        #: Stands for the login under way in another thread.
        self.attempt: object = None
        #: CLOCK_MONOTONIC seconds of the last login's end, or of the begin of the one under way.
        self.changed_at = 0.0
        #: The error of the last login.
        self.error: errors.BerthError | None = None
        #: Logins in a row that failed although the broker could be reached.
        self.failures = 0
        #: Whether this process has had a session of this account.
        self.was_open = False
        #: Why there is no session.
        self.lost_because = ""
        #: Whether the broker's orders were listed since the login, so that requests may be
        #: executed.
        self.listed = False
        #: Code of the error with which the last listing failed.
        self.listing_error = ""
        #: Tries to log in: in the end about 80 an hour (waits of 30 to 60 s), of the 1,000 logins
        #: that a person has in a day.
        self.login_backoff = Backoff(login_pause, 60.0)
        #: Pauses that the broker asked for in a row, by refusing a login.
        self.pauses = 0
        #: Tries to list the orders of a live session.
        self.listing_backoff = Backoff(0.2, 5.0)
        #: Whether the positions were read since the login: only then are the books compared.
        self.positions_known = False
        #: Whether orders still wait for the orchestrator to compare what was listed since the
        #: login.
        self.books_awaited = False
        #: Unix ms, by this process's clock: the time of the login, or just after the last report
        #: that was compared. Earlier reports are repeats or of another session, and are ignored.
        self.opened_ms = 0
        #: CLOCK_MONOTONIC ns at which the books were found to differ; 0: they were not.
        self.differs_since = 0
        #: Tries to read the positions while orders are executed: each may delay an order by as much
        #: as a ping does.
        self.positions_backoff = Backoff(1.0, 60.0)
        #: Tries to get room for a ping.
        self.ping_backoff = Backoff(0.5, 5.0)
        self._failing_since: float | None = None
        #: CLOCK_MONOTONIC seconds at which the broker ends the session, as its record says; `inf`:
        #: nobody knows.
        self.ends_at = math.inf
        #: CLOCK_MONOTONIC seconds from which on the session is renewed ahead of its end.
        self.renewal_at = math.inf
        #: Tries to renew the session ahead of its end.
        self.renewal_backoff = Backoff(1.0, 60.0)

    @property
    def name(self) -> str:
        return self.account.key.account_id

    @property
    def away(self) -> bool:
        """Returns True if the broker cannot be reached or takes no further login for now."""
        return isinstance(self.error, _BROKER_AWAY)

    @property
    def limited(self) -> bool:
        """Returns True if another login now would only count against the limit again."""
        return isinstance(self.error, errors.LoginLimited) and not self.login_backoff.due()

    @property
    def ready(self) -> bool:
        """Returns True if requests need not wait: there is a session with its orders listed, and
        compared where that is awaited, or the login was refused for good."""
        listed = self.broker is not None and self.listed
        return self.refused is not None or (listed and not self.books_awaited)

    @property
    def has_outlived(self) -> bool:
        """Returns True if the broker has ended the session by now, as its record says."""
        return time.monotonic() >= self.ends_at

    def renewal_due(self, quiet_s: float) -> bool:
        """Returns True if the session should be renewed ahead of its end, `quiet_s` seconds after
        the user's last request. Never while anything about it is open."""
        now = time.monotonic()
        if now < self.renewal_at or not self.renewal_backoff.due():
            return False
        if self.suspect or not self.ready or not self.positions_known:
            return False
        span = self.ends_at - self.renewal_at
        return quiet_s >= min(_QUIET_S, span * _QUIET_PART) or self.ends_at - now <= span / 2

    def seconds_until_renewal(self) -> float:
        """Returns the seconds until a renewal may be due, or `inf`."""
        if self.renewal_at == math.inf:
            return math.inf
        due = max(0.0, self.renewal_at - time.monotonic())
        return max(due, self.renewal_backoff.seconds_until_due())

    def seconds_until_relisting(self) -> float:
        """Returns the seconds until orders or positions that could not be read are read again, or
        `inf`."""
        if not self.listed:
            return self.listing_backoff.seconds_until_due()
        done = self.positions_known and not self.books_awaited
        return math.inf if done else self.positions_backoff.seconds_until_due()

    def listing_succeeded(self, positions_known: bool) -> None:
        self.listed = True
        self.listing_backoff.reset()
        self.positions_known = positions_known
        if not positions_known or self.books_awaited:
            self.positions_backoff.failed()

    def books_compared(self, at_ms: int, blocks: bool) -> None:
        """Takes the orchestrator's answer to a report of this account."""
        if at_ms >= self.opened_ms:
            self.opened_ms = at_ms + 1
            self.books_awaited = False
            self.differs_since = time.monotonic_ns() if blocks else 0

    def listing_failed(self, code: str, pause: float = 0.0) -> None:
        """Notes the code of a listing's error. `pause`: seconds for which the broker wants no
        call."""
        self.listing_error = code
        (self.positions_backoff if self.listed else self.listing_backoff).failed(pause)

    def failing_for(self) -> float:
        """Returns the seconds since the first of the latest logins in a row to which the broker
        gave no answer, or no usable one."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    def login(self) -> AccountLogin | None:
        """Returns how the account's login stands; None before it was tried."""
        error, code = self.refused or self.error, ""
        if self.broker is None:
            if error is None and not self.was_open:
                return None
            code = error.code if error else errors.SessionDown.code
        elif not self.listed:
            code = self.listing_error
        version, why = self.rejected or (0, error)
        detail = why.detail if why else self.lost_because if code else ""
        broker = self.broker
        return AccountLogin(
            account_id=self.name,
            code=code,
            rejected=version,
            detail=detail[:MAX_DETAIL_LENGTH],
            version=self.account.version,
            certificate_ends_ms=broker.certificate_ends_ms()
            if isinstance(broker, UsesCertificate)
            else 0,
        )

    def lost(self, reason: str) -> Broker | None:
        """Notes that the broker session was lost and returns it, so that the caller can close it.
        Failed tries are counted from 0 again."""
        broker, self.broker = self.broker, None
        self.attempt = None
        self.suspect = False
        self.error = None
        self.failures = 0
        self._failing_since = None
        self.lost_because = reason
        return broker

    def opened(self, broker: Broker) -> None:
        self.broker = broker
        self.attempt = None
        self.changed_at = time.monotonic()
        self.listed = self.positions_known = False
        self.books_awaited = self.account.books_first
        self.opened_ms = wall_ms()
        self.listing_backoff.reset()
        self.positions_backoff.reset()
        self.error = None
        self.failures = 0
        self._failing_since = None
        self.was_open = True
        self.pauses = 0
        self.used_at = time.monotonic()
        self.login_backoff.reset()
        self.ends_at, self.renewal_at = _life_of(self.account.key, self.used_at)
        self.renewal_backoff.reset()

    def opened_anew(self, account: OpenedAccount, broker: Broker) -> None:
        """Notes that `broker` takes the place of a session that still lived."""
        self.account = account
        self.opened(broker)

    def renewal_failed(self, error: errors.BerthError) -> None:
        """Notes why the session could not be renewed. It is tried again before its end, unless the
        broker refused the credentials."""
        if isinstance(error, errors.LoginRejected):
            self.refused = error
            self.rejected = self.account.version, error
            self.renewal_at = math.inf
        self.renewal_backoff.failed(error.retry_after or 0.0)

    def failed(self, error: errors.BerthError) -> None:
        self.error = error
        self.attempt = None
        self.changed_at = time.monotonic()
        if isinstance(error, errors.LoginRejected):
            self.refused = error
            self.rejected = self.account.version, error
            return
        self.pauses = self.pauses + 1 if error.retry_after else 0
        self.login_backoff.failed(_pause_after(error, self.pauses))
        if not self.away:
            self.failures += 1
        unreachable = isinstance(error, errors.BrokerUnreachable) and not isinstance(
            error, errors.BrokerMaintenance
        )
        if self.away and not unreachable:
            self._failing_since = (
                None  # a limit, maintenance or our own lease is no fault of this process
            )
        elif self._failing_since is None:
            self._failing_since = time.monotonic()


def _life_of(key: ConnectionKey, opened_at: float) -> tuple[float, float]:
    """Returns when a session that was opened at `opened_at` ends, and from when on it is renewed
    ahead of that (CLOCK_MONOTONIC seconds; `inf`: never).

    A time of day ends sessions however old they are, so nothing can be done ahead of it.
    """
    plugin = installed_brokers().get(key.broker)
    if plugin is None:
        return math.inf, math.inf
    life = plugin.record.session
    ends_at = renewal_at = math.inf
    if life.life_s is not None:
        ends_at = opened_at + life.life_s
        renewal_at = ends_at - min(life.life_s * _RENEWAL_PART, _MAX_RENEWAL_S)
    if life.ends_at is not None:
        now = datetime.now(UTC)
        end = datetime.combine(now.date(), life.ends_at, UTC)
        left_s = (end - now).total_seconds() % _DAY_S or _DAY_S
        ends_at = min(ends_at, opened_at + left_s)
    return ends_at, renewal_at if renewal_at < ends_at else math.inf


def apply_min_pause(key: ConnectionKey, error: errors.BerthError) -> None:
    """Extends the pause that a broker has asked for (the `retry_after` of its error) to the minimum
    of its record (`cool_down_s`)."""
    plugin = installed_brokers().get(key.broker)
    if plugin is not None and error.retry_after and isinstance(error, PAUSE_ERRORS):
        error.retry_after = max(error.retry_after, plugin.record.limits.cool_down_s)


def _pause_after(error: errors.BerthError, times: int) -> float:
    """Returns the seconds until the next login after the broker has asked for a pause `times` times
    in a row. The pause doubles each time, because another call during a pause may extend it
    (Shioaji's manual)."""
    if not error.retry_after:
        return 0.0
    doubled: float = error.retry_after * 2 ** (times - 1)
    return min(doubled, max(MAX_PAUSE_S, error.retry_after))


class CredentialOpener:
    def __init__(
        self, private_key: X25519PrivateKey, shared_state: SharedState, worker_id: str
    ) -> None:
        self._private_key = private_key
        self._shared_state = shared_state
        self._worker_id = worker_id

    def open(self, sealed: Iterable[SealedAccount], *, claim_id: str) -> list[OpenedAccount]:
        """Opens the accounts with clear credentials; raises `InvalidSeal` if one cannot be
        opened."""
        return [self._open_one(account, claim_id) for account in sealed]

    def open_message_keys(
        self, sealed: bytes, *, user_id: str, epoch: int, claim_id: str
    ) -> AssignmentKeys:
        """Opens the keys of this worker's messages; raises `InvalidSeal`."""
        return open_message_keys(
            sealed,
            self._private_key,
            user_id=user_id,
            epoch=epoch,
            claim_id=claim_id,
            worker_id=self._worker_id,
        )

    def _open_one(self, sealed: SealedAccount, claim_id: str) -> OpenedAccount:
        clear = unseal(
            sealed.sealed,
            self._private_key,
            user_id=self._shared_state.user_id,
            account_id=sealed.account_id,
            epoch=self._shared_state.epoch,
            claim_id=claim_id,
            worker_id=self._worker_id,
        )
        try:
            credentials: Credentials = decode(clear, Credentials)
        except errors.MalformedMessage:
            # Without the cause: its text comes from what was sealed.
            raise errors.InvalidSeal("what was sealed is no set of credentials") from None
        key = ConnectionKey(
            sealed.broker, sealed.broker_type, sealed.simulation, sealed.account_id, sealed.number
        )
        return OpenedAccount(
            key,
            sealed.version,
            credentials,
            sealed.budgets,
            sealed.books_first,
            sealed.address_budgets,
            sealed.address_share,
            sealed.address_shares,
        )
