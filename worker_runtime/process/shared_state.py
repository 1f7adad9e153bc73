"""The memory that a worker's processes share. The zygote makes it before it forks.

Each number is one aligned 8-byte word with a single writer, so a reader sees the old or the new
value and never a mixture, and a killed process can hold no lock. Texts are written once, before the
number that announces them.

It also holds the orders that the worker has begun to submit (invariant *submit-once*): the
successor of a dead session reads there what may have been sent, and never sends it again. And it
holds the lease, which both processes renew and read.
"""

from __future__ import annotations

import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from hashlib import blake2b

import msgspec

from worker_runtime.process.clock import NS_PER_S, boot_ns
from worker_runtime.protocol import errors
from worker_runtime.protocol.authentication import AssignmentKeys

#: Bytes of a hash. When the list is full, two orders share one with a chance of 2^-115.
_HASH_BYTES = 16
#: Hashes kept. A busy day of one person has some hundreds of orders.
MAX_SUBMISSIONS = 8192
_COUNT_BYTES = 8


class Submissions:
    """Hashes of the last `MAX_SUBMISSIONS` order ids,
    written by the session alone; at most 128 KiB."""

    def __init__(self, limit: int = MAX_SUBMISSIONS) -> None:
        self._limit = limit
        self._memory = mmap.mmap(
            -1, _COUNT_BYTES + limit * _HASH_BYTES, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        )
        self._count = memoryview(self._memory)[:_COUNT_BYTES].cast("q")
        self._read = 0
        self._known: set[bytes] = set()
        self._order: deque[bytes] = deque()

    def add(self, order_id: str) -> None:
        """Adds an order. Call it before the broker: from here on the order may have been sent."""
        count = self._count[0]
        start = _COUNT_BYTES + count % self._limit * _HASH_BYTES
        self._memory[start : start + _HASH_BYTES] = _hash_order_id(order_id)
        self._count[0] = count + 1  # after the hash: what is counted is complete

    def __contains__(self, order_id: str) -> bool:
        """Returns True if this worker, in any of its session processes, has begun to submit the
        order."""
        self._catch_up()
        return _hash_order_id(order_id) in self._known

    def _catch_up(self) -> None:
        count = self._count[0]
        for number in range(max(self._read, count - self._limit), count):
            start = _COUNT_BYTES + number % self._limit * _HASH_BYTES
            digest = self._memory[start : start + _HASH_BYTES]
            self._order.append(digest)
            self._known.add(digest)
        self._read = count
        while len(self._order) > self._limit:
            self._known.discard(self._order.popleft())


def _hash_order_id(order_id: str) -> bytes:
    return blake2b(order_id.encode(), digest_size=_HASH_BYTES).digest()


#: Two pages. The words begin at 0; the offsets, in bytes, are where the texts begin.
_MEMORY_BYTES = 8192
_KEY_OFFSET = 1024
_USER_OFFSET = 1088
_CLAIM_OFFSET = 1376
#: Two places in turn, so that a reader of the present message keys never meets half-written ones.
_MESSAGE_KEYS_OFFSETS = (4096, 6144)
#: Bytes of a user or claim id, and of the message keys (two versions take about 250).
_MAX_TEXT_BYTES = 256
_MAX_MESSAGE_KEYS_BYTES = 2046


class SharedStateOverflow(errors.BerthError, code="BOARD_OVERFLOW"):
    """An id is too long for the shared state."""


class WorkerActivity(IntEnum):
    """Says what the worker is doing. The metadata shows it."""

    PoolIdle = 0
    Claimed = 1
    Connecting = 2
    Active = 3
    Processing = 4
    HealthCheck = 5
    Reconnecting = 6
    #: Broker sessions are closed, because the lease is about to end or has ended. (A *user* is
    #: parked after crashes: `errors.Parked`.)
    Parked = 7
    Draining = 8


class HealthCondition(IntEnum):
    """The state of all broker sessions together."""

    NEW = 0  # not yet connected, or a fresh session without credentials
    WELL = 1
    RECONNECTING = 2
    DEGRADED = 3


#: Error codes by their number in the shared state; the first is for all others.
ERROR_CODES = (
    errors.BrokerError.code,
    errors.BrokerUnreachable.code,
    errors.LoginLimited.code,
    errors.LoginRejected.code,
    errors.LeaseLost.code,
    errors.SessionDown.code,
    errors.BrokerMaintenance.code,
    errors.RateLimited.code,
    errors.BrokerVersionRefused.code,
    errors.BrokerClockRefused.code,
)
NO_ERROR = -1
#: Before the claim: nothing can be checked or signed.
NO_KEYS = AssignmentKeys(request=(), assignment=())

#: Seconds before the end of the lease at which the session takes nothing more and closes
#: its broker sessions: longer than a logout (1 s), so that the broker sees the end
#: before a new owner connects.
LEASE_MARGIN_S = 5.0
#: Seconds before the end of the lease at which the supervisor kills a session that has not closed.
KILL_MARGIN_S = 2.0
#: Seconds that a reply may take even when the lease is used up, for what is still to be sent.
_MIN_REPLY_TIMEOUT_S = 0.1


class _Word:
    """One 8-byte word of the shared state."""

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __get__(self, shared_state: SharedState, owner: type[SharedState]) -> int:
        return shared_state.numbers[self._slot]

    def __set__(self, shared_state: SharedState, value: int) -> None:
        shared_state.numbers[self._slot] = value  # CPython stores a "q" item with one 8-byte move


class SharedState:
    """The words, with their writer in the comment.
    Times on CLOCK_MONOTONIC or CLOCK_BOOTTIME, in ns."""

    session_pid = _Word(0)  # zygote; 0 while there is none
    session_number = _Word(1)  # zygote; grows with every fork of a session
    session_lost = _Word(2)  # zygote; 1 when a claimed session died
    launched_at_ms = _Word(3)  # zygote; Unix ms
    key_session = _Word(4)  # session; number of the session whose public key is here
    pulse = _Word(5)  # session; monotonic ns of its last sign of life
    state = _Word(6)  # session; a `WorkerActivity`
    # Session, supervisor; Unix ms of the last order, control message, job.
    last_activity_ms = _Word(7)
    assigned = _Word(8)  # session; 1 from the moment a claim was confirmed
    claiming = _Word(9)  # session; 1 from the moment it acts on a claim
    epoch = _Word(10)  # session
    broker_open = _Word(11)  # session; 1 while a broker session may be open
    lease_session = _Word(12)  # session; boot ns, end of the lease by its own renewals
    pop_number = _Word(13)  # session; outlives it
    session_events = _Word(14)  # session; last sequence it used (even)
    lease_supervisor = _Word(15)  # supervisor; boot ns, end of the lease by its renewals
    fenced = _Word(16)  # supervisor, session; 1 for good
    supervisor_events = _Word(17)  # supervisor; last sequence it used (odd)
    # Session; monotonic ns until which a broker call may keep it from pulsing.
    busy_until = _Word(18)
    connected = _Word(19)  # session; 1 from the first time that an account was connected
    session_end = _Word(20)  # zygote; how the last session ended: exit code, or minus the signal
    killed_for = _Word(21)  # supervisor; session number * 16 + `KillReason`
    condition = _Word(22)  # session; a `HealthCondition`
    trouble = _Word(23)  # session; number of an error code in `ERROR_CODES`
    accounts = _Word(24)  # session; how many there are
    accounts_connected = _Word(25)  # session; how many of them have a broker session
    claimed_session = _Word(27)  # session; number of the session that was claimed
    # Supervisor; how often it found the owner key missing: Valkey lost its data.
    owner_missing = _Word(26)

    # Session; monotonic ns of the claim, before which the former worker had ended.
    assigned_ns = _Word(31)

    control_number = _Word(34)  # session; of the last reload
    switch_version = _Word(33)  # session; the newest that it has seen
    message_keys_written = _Word(32)  # session; how often message keys were written

    jobs_pid = _Word(28)  # zygote; the job runner, 0 while there is none
    jobs_number = _Word(29)  # zygote; grows with every fork of a job runner
    jobs_not_before = _Word(30)  # zygote; monotonic ns before which there is no other job runner

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _MEMORY_BYTES, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self.numbers = memoryview(self._memory).cast("q")
        self.submissions = Submissions()
        self._user_id = ""
        self._message_keys = 0, NO_KEYS
        #: Calls under way → until when they may take (monotonic ns).
        self._calls: dict[object, int] = {}

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Surrounds a call that may take `seconds`: for that time a missing pulse does not count.

        Calls may lie within each other, or run in several threads.
        """
        call = object()
        self._calls[call] = time.monotonic_ns() + int(seconds * NS_PER_S)
        self.busy_until = max(self._calls.values())
        try:
            yield
        finally:
            del self._calls[call]
            self.pulse = time.monotonic_ns()
            self.busy_until = max(self._calls.values(), default=0)

    def publish_key(self, public_key: bytes) -> None:
        """Publishes the public key (32 bytes) of the present session."""
        self._memory[_KEY_OFFSET : _KEY_OFFSET + 32] = public_key
        self.key_session = self.session_number

    def public_key(self) -> bytes:
        """Returns the present session's public key; empty while it has not made one."""
        session = self.session_number
        if session == 0 or self.key_session != session:
            return b""
        key = self._memory[_KEY_OFFSET : _KEY_OFFSET + 32]
        # A fresh one may have written over it meanwhile.
        return key if self.session_number == session else b""

    def assign(self, user_id: str, claim_id: str, epoch: int) -> None:
        """Records whose worker this is. Readers see nothing of it until all of it is there."""
        self._write_text(_USER_OFFSET, user_id.encode())
        self._write_text(_CLAIM_OFFSET, claim_id.encode())
        self.epoch = epoch
        self.claimed_session = self.session_number
        self.assigned_ns = time.monotonic_ns()
        self.assigned = 1

    @property
    def user_id(self) -> str:
        if not self._user_id and self.assigned:  # from here on it stays
            self._user_id = self._read_text(_USER_OFFSET)
        return self._user_id or self._read_text(_USER_OFFSET)

    @property
    def claim_id(self) -> str:
        return self._read_text(_CLAIM_OFFSET)

    def write_message_keys(self, message_keys: AssignmentKeys) -> None:
        """Records the keys under which this worker's messages
        are authenticated; later ones replace them."""
        written = self.message_keys_written + 1
        self._write_text(
            _MESSAGE_KEYS_OFFSETS[written % 2],
            msgspec.json.encode(message_keys),
            _MAX_MESSAGE_KEYS_BYTES,
        )
        self.message_keys_written = written

    def message_keys(self) -> AssignmentKeys:
        """Returns the present message keys; none before the first were written."""
        while self._message_keys[0] != (written := self.message_keys_written):
            data = self._read_text(_MESSAGE_KEYS_OFFSETS[written % 2])
            # Otherwise a later write may have begun in this place.
            if self.message_keys_written == written:
                self._message_keys = written, msgspec.json.decode(data, type=AssignmentKeys)
        return self._message_keys[1]

    def next_session_event(self) -> int:
        """Returns a sequence number for an event of the session: even, and later than any seen
        before."""
        following = max(self.session_events, self.supervisor_events) + 1
        self.session_events = following + following % 2
        return self.session_events

    def next_supervisor_event(self) -> int:
        """Returns a sequence number for an event of the supervisor: odd, so that the two never
        collide."""
        following = max(self.session_events, self.supervisor_events) + 1
        self.supervisor_events = following + 1 - following % 2
        return self.supervisor_events

    def _write_text(self, offset: int, data: bytes, limit: int = _MAX_TEXT_BYTES) -> None:
        if len(data) > limit:
            raise SharedStateOverflow(f"{len(data)} bytes are more than {limit}")
        self._memory[offset : offset + 2] = len(data).to_bytes(2, "big")
        self._memory[offset + 2 : offset + 2 + len(data)] = data

    def _read_text(self, offset: int) -> str:
        size = int.from_bytes(self._memory[offset : offset + 2], "big")
        return self._memory[offset + 2 : offset + 2 + size].decode()


def health_text(shared_state: SharedState) -> str:
    """Returns the health for the metadata: `well`, `waiting for credentials`, `connecting`,
    `reconnecting`, `degraded: CODE`."""
    condition, trouble = HealthCondition(shared_state.condition), shared_state.trouble
    if condition in (HealthCondition.WELL, HealthCondition.DEGRADED) and 0 <= trouble < len(
        ERROR_CODES
    ):
        return f"degraded: {ERROR_CODES[trouble]}"
    if condition is HealthCondition.NEW:
        return "waiting for credentials" if shared_state.connected else "connecting"
    return condition.name.lower()


def lease_end_of(sent_ns: int, ttl: float) -> int:
    """Returns the end of a lease (CLOCK_BOOTTIME ns) that was renewed for `ttl` seconds, sent at
    `sent_ns`."""
    return sent_ns + int(ttl * NS_PER_S)


class Lease:
    """How long this worker may still act as its user's only owner (invariant *one-owner*).

    A lease is a right that ends by itself unless it is renewed in time. (Broker connections and job
    runners have leases of their own.) Both the supervisor's and the session's own renewals count. A
    lease runs from the instant *before* the renewal was sent, because the server counts the mark's
    time from a later moment; and it is checked in the thread that calls the broker.
    """

    def __init__(self, shared_state: SharedState) -> None:
        self._shared_state = shared_state

    def remaining_s(self) -> float:
        """Returns the seconds until the lease ends by the latest renewal; negative when it has."""
        end = max(self._shared_state.lease_supervisor, self._shared_state.lease_session)
        return (end - boot_ns()) / NS_PER_S

    def wait_limit(self) -> float:
        """Returns the seconds that the session may wait for Valkey. While a broker session is open
        that is at most the usable lease, so that a frozen Valkey does not keep the session from
        closing it in time."""
        return (
            max(_MIN_REPLY_TIMEOUT_S, self.usable()) if self._shared_state.broker_open else math.inf
        )

    def wait_limit_of_call(self, timeout_s: float) -> Callable[[], float]:
        """Returns a function that says how many of `timeout_s` seconds from now a call of the
        broker may still wait for room; 0 when the lease is not renewed."""
        until = time.monotonic() + timeout_s
        return lambda: until - time.monotonic() if self.usable() > 0 else 0.0

    def usable(self) -> float:
        """Returns the seconds that a broker call may take from now. If zero or less, no call may be
        made."""
        return (0.0 if self._shared_state.fenced else self.remaining_s()) - LEASE_MARGIN_S
