"""The board: shared memory of a worker's processes, made by the zygote before it forks.

Each number is one aligned 8-byte word with a single writer, so a reader sees the old or the new value and
never a mixture, and no lock can be held by a process that was killed or stopped. Texts are written once,
before the number that announces them.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from worker_runtime.boottime import SECOND
from worker_runtime.protocol.errors import BerthError
from worker_runtime.submissions import Submissions

_SIZE = 4096
_KEY = 1024
_USER = 1088
_CLAIM = 1376
#: Bytes of a user or claim id.
_MAX_TEXT = 256


class BoardOverflow(BerthError):
    """An id is too long for the board."""

    code = "BOARD_OVERFLOW"


class State(IntEnum):
    """What the worker is doing (requirement W2), as the metadata shows it."""

    PoolIdle = 0
    Claimed = 1
    Connecting = 2
    Active = 3
    Processing = 4
    HealthCheck = 5
    Reconnecting = 6
    Parked = 7
    Draining = 8


#: Slots of the words that are read at once.
_LEASE_SESSION, _LEASE_SUPERVISOR, _FENCED = 12, 15, 16


class _Number:
    """One 8-byte word of the board."""

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __get__(self, board: Board, owner: type[Board]) -> int:
        return board.numbers[self._slot]

    def __set__(self, board: Board, value: int) -> None:
        board.numbers[self._slot] = value  # CPython stores a "q" item with one 8-byte move


class Board:
    """The words, with their writer in the comment. Times on CLOCK_MONOTONIC or CLOCK_BOOTTIME, in ns."""

    session_pid = _Number(0)  # zygote; 0 while there is none
    session_number = _Number(1)  # zygote; grows with every fork of a session
    session_lost = _Number(2)  # zygote; 1 when a claimed session died
    launched_at_ms = _Number(3)  # zygote; Unix ms
    key_session = _Number(4)  # session; number of the session whose public key stands here
    pulse = _Number(5)  # session; monotonic ns of its last sign of life
    state = _Number(6)  # session; a `State`
    last_activity_ms = _Number(7)  # session, supervisor; Unix ms of the last order, control message, job
    assigned = _Number(8)  # session; 1 from the moment a claim was confirmed
    claiming = _Number(9)  # session; 1 from the moment it acts on a claim
    epoch = _Number(10)  # session
    broker_open = _Number(11)  # session; 1 while a broker session may be open
    lease_session = _Number(_LEASE_SESSION)  # session; boot ns, end of the lease by its own renewals
    pop_number = _Number(13)  # session; outlives it
    session_events = _Number(14)  # session; last sequence it used (even)
    lease_supervisor = _Number(_LEASE_SUPERVISOR)  # supervisor; boot ns, end of the lease by its renewals
    fenced = _Number(_FENCED)  # supervisor, session; 1 for good
    supervisor_events = _Number(17)  # supervisor; last sequence it used (odd)
    busy_until = _Number(18)  # session; monotonic ns until which a broker call may keep it from pulsing
    connected = _Number(19)  # session; 1 from the first time that all accounts were connected
    session_end = _Number(20)  # zygote; how the last session ended: exit code, or minus the signal
    killed_for = _Number(21)  # supervisor; session number * 16 + `KillReason`
    condition = _Number(22)  # session; a `Condition` of `health.py`
    trouble = _Number(23)  # session; number of an error code in `health.py`
    accounts = _Number(24)  # session; how many there are
    accounts_connected = _Number(25)  # session; how many of them have a broker session
    claimed_session = _Number(27)  # session; number of the session that was claimed
    owner_missing = _Number(26)  # supervisor; how often it found the owner key missing: Valkey lost its data

    assigned_ns = _Number(31)  # session; monotonic ns of the claim: whoever served the user before had ended

    jobs_pid = _Number(28)  # zygote; the job runner, 0 while there is none
    jobs_number = _Number(29)  # zygote; grows with every fork of a job runner
    jobs_not_before = _Number(30)  # zygote; monotonic ns before which there is no other job runner

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self.numbers = memoryview(self._memory).cast("q")
        self.submissions = Submissions()
        self._user_id = ""

    def lease_end(self) -> int:
        """Boot ns: the later of both ends of the lease; 0 once fenced. Asked twenty times an order, so it
        reads the words themselves."""
        numbers = self.numbers
        return 0 if numbers[_FENCED] else max(numbers[_LEASE_SESSION], numbers[_LEASE_SUPERVISOR])

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Around a broker call that may take `seconds`: so long, a missing pulse says nothing."""
        self.busy_until = time.monotonic_ns() + int(seconds * SECOND)
        try:
            yield
        finally:
            self.pulse = time.monotonic_ns()
            self.busy_until = 0

    def publish_key(self, public_key: bytes) -> None:
        """Puts up the public key (32 bytes) of the present session."""
        self._memory[_KEY : _KEY + 32] = public_key
        self.key_session = self.session_number

    def public_key(self) -> bytes:
        """The present session's public key; empty while it has not made one."""
        session = self.session_number
        if session == 0 or self.key_session != session:
            return b""
        key = self._memory[_KEY : _KEY + 32]
        return (
            key if self.session_number == session else b""
        )  # a fresh one may have written over it meanwhile

    def assign(self, user_id: str, claim_id: str, epoch: int) -> None:
        """Notes whose worker this is; readers see nothing of it before all of it is there."""
        self._write_text(_USER, user_id)
        self._write_text(_CLAIM, claim_id)
        self.epoch = epoch
        self.claimed_session = self.session_number
        self.assigned_ns = time.monotonic_ns()
        self.assigned = 1

    @property
    def user_id(self) -> str:
        if not self._user_id and self.assigned:  # from here on it stays
            self._user_id = self._read_text(_USER)
        return self._user_id or self._read_text(_USER)

    @property
    def claim_id(self) -> str:
        return self._read_text(_CLAIM)

    def next_session_event(self) -> int:
        """A sequence for an event of the session: even, and later than any this process has seen."""
        following = max(self.session_events, self.supervisor_events) + 1
        self.session_events = following + following % 2
        return self.session_events

    def next_supervisor_event(self) -> int:
        """A sequence for an event of the supervisor: odd, so that the two never meet without a lock."""
        following = max(self.session_events, self.supervisor_events) + 1
        self.supervisor_events = following + 1 - following % 2
        return self.supervisor_events

    def _write_text(self, offset: int, text: str) -> None:
        data = text.encode()
        if len(data) > _MAX_TEXT:
            raise BoardOverflow(f"{len(data)} bytes are more than {_MAX_TEXT}")
        self._memory[offset : offset + 2] = len(data).to_bytes(2, "big")
        self._memory[offset + 2 : offset + 2 + len(data)] = data

    def _read_text(self, offset: int) -> str:
        size = int.from_bytes(self._memory[offset : offset + 2], "big")
        return self._memory[offset + 2 : offset + 2 + size].decode()
