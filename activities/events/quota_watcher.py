"""Watches how much of Valkey each worker and each fleet of job runners uses, and cuts off one that
uses too much.

A worker's Valkey user limits which names it reaches, not how many it makes or how large they are.
One orchestrator watches at a time. It counts by itself and trusts no figure that a worker reports.

- *Names and bytes.* A walk over all names counts them by worker, in short steps, so that no order
  waits. One walk takes 2 s while there are no more names than `MAX_WALKED_NAMES_PER_S` allows.
  When memory or names grow fast, the watcher walks over all names at once. It cuts off a worker as
  soon as the walk has counted more than its quota: the more the worker holds, the sooner that is.
- *Connections and traffic.* The watcher reads the list of clients only while there are unusually
  many, much is sent, or memory changes. The list also shows what the server keeps for a client and
  does not account to it: its channels, the names that it waits for, and its own name.
- *Time.* Valkey does not say which user its processor time goes to. It notes commands of 1 ms and
  more. So while Valkey's thread is busy for more than half of the time, the watcher cuts off a
  worker whose slow commands fill half of the time, or which sends more than half of all commands
  and can have filled half of the time, in two checks in a row. (A machine that is short of
  processors makes commands slow, but does not make the thread busy.) A connection that has ended is
  in no list of clients. The key of its command says whose it was, since a worker reaches its own
  keys only. While there are such connections, Valkey notes all commands.

All runners of a fleet count as one. Services write under a fleet's names, too, and a busy fleet
sends much. So the watcher cuts off a fleet for other reasons: it sends far more than results need,
its slow commands fill half of the time, or what it has sent has made memory grow by a quarter of
the server's maximum.
"""

import asyncio
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.events.cut_off import Offender, WorkerCutOff
from activities.pool.launch import COLD_PREFIX, POOL_PREFIX
from infra.database.engine import DatabaseUnavailable
from infra.database.locks import MAX_SILENCE_S, lead, send_sign_of_life
from infra.process_metrics import LARGEST_SHARE
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.valkey.job_login import FLEET_PREFIX, user_of_jobs
from infra.valkey.job_users import JOB_COMMANDS, JobUsers
from infra.valkey.memory import MemoryUse
from worker_runtime.protocol import keys, scripts

#: Names the lock of this loop among PostgreSQL's advisory locks.
LOCK_ID: Final = 0x626572746A
#: The memory and the names that a worker may hold. A busy one has 50 names and 0.3 MB; with a
#: thousand failed jobs and results 5 MB.
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_NAMES: Final = 20_000
#: Connections that a worker may have; it needs four.
MAX_CONNECTIONS: Final = 64
#: Channels that a worker may have subscribed to; it needs one for each answer that a job waits for.
#: Each takes 200 bytes, of which the server accounts a sixteenth to the client.
MAX_SUBSCRIPTIONS: Final = 1_000
#: Bytes of the commands that a worker's connections wait in (`BLPOP`): a waiting one has three
#: names. The server keeps up to 30 times as many bytes for them, and does not account for these.
MAX_BLOCKED_BYTES: Final = 65_536
#: Bytes a second that a worker may send and get over `RATE_SPAN_S` seconds. At 100 orders a second
#: it is 0.5 MB.
MAX_BYTES_PER_S: Final = 16 * 1024 * 1024
RATE_SPAN_S: Final = 0.75
#: Three limits: the share of the time for which Valkey's thread may work before the watcher looks
#: for the cause, the share that one worker's slow commands may take, and the share of all commands
#: that one worker may send. At 100 orders a second, Valkey's thread works for 4 % of the time.
BUSY_SHARE: Final = 0.5
#: Seconds from which on the server notes a command as slow (`slowlog-log-slower-than`): each of the
#: others takes less.
SLOW_COMMAND_S: Final = 0.001
#: Noted commands that are read at once: all that the server keeps (`slowlog-max-len`).
MAX_SLOW_COMMANDS_PER_READ: Final = 1_024
#: Connections that all runners of one fleet may have; a runner has about five. Bytes a second that
#: they may send over `RATE_SPAN_S` seconds; the results of thousands of jobs are 2 MB.
MAX_FLEET_CONNECTIONS: Final = 1_024
MAX_FLEET_BYTES_PER_S: Final = 32 * 1024 * 1024
MAX_FLEET_BLOCKED_BYTES: Final = 1024 * 1024
#: The share of `maxmemory` by which a fleet may make memory grow; in bytes for a server without a
#: maximum.
MAX_FLEET_GROWTH_SHARE: Final = 0.25
MAX_FLEET_BYTES: Final = 1024 * 1024 * 1024
#: Bytes of memory that are estimated for a sent byte and for a command. A short name takes about
#: 100 bytes more than it has, and a short member of a sorted set four times what was sent.
BYTES_PER_SENT_BYTE: Final = 2
BYTES_PER_COMMAND: Final = 150
#: Names, entries included, beyond which a fleet holds too much whatever its bytes: the bytes of
#: large keys are not counted exactly.
MAX_FLEET_NAMES: Final = 100_000
#: Change of memory, in bytes, from which on the watcher reads the list of clients.
MIN_MEMORY_CHANGE_BYTES: Final = 8 * 1024 * 1024
#: Seconds between two reads of the totals.
READ_INTERVAL_S: Final = 0.25
#: Seconds of one walk, and the names that it counts a second at most: more would cost over 4 % of
#: Valkey's time.
WALK_TIME_S: Final = 2.0
MAX_WALKED_NAMES_PER_S: Final = 8_000
#: Names of one step.
NAMES_PER_STEP: Final = 100
#: Growth since the last complete walk began, in bytes and names, from which on the watcher walks at
#: once.
HURRY_GROWTH_BYTES: Final = MAX_BYTES // 4
HURRY_GROWTH_NAMES: Final = MAX_NAMES // 4
#: New connections since the last look, and bytes a second of all clients, from which on the watcher
#: reads the list of clients.
MIN_NEW_CONNECTIONS: Final = 200
BUSY_BYTES_PER_S: Final = 8 * 1024 * 1024
#: Connections whose lines are read at once, and bytes of a line beyond which its connection has a
#: name that is too long: one of ours has none, and a line of 400 bytes.
CLIENTS_PER_PART: Final = 32
MAX_CLIENT_LINE_BYTES: Final = 2_048
#: Ids that the server may give to clients of its own between two reads.
MAX_CLIENTS_OF_SERVER: Final = 16
#: Bytes of the errors that wait for operators; a thousand of ours are 1 MB.
MAX_ERRORS_BYTES: Final = 16 * 1024 * 1024
#: Seconds until a process that lost the lock tries to get it again.
RETRY_INTERVAL_S: Final = 1.0

log = structlog.get_logger()


class Totals(NamedTuple):
    """Holds what the server says about itself in one round trip."""

    memory: MemoryUse
    names: int
    connections: int
    #: Bytes a second from and to all clients.
    traffic: float
    #: Seconds that the server's thread has worked.
    worked: float
    #: Connections that were made since the server's start.
    made: int = 0


class KeyspaceUse(NamedTuple):
    """Counts what one writer, or the whole server, holds in Valkey."""

    names: int = 0
    #: Bytes.
    size: int = 0


@dataclass(eq=False)
class NameWalk:
    """Counts all names by writer, without I/O, and decides when a walk has to hurry.

    | state | left by |
    |---|---|
    | at the start: nothing is counted | `begin`, then `add` after each step |
    | under way: `held` has the counts so far | `finish` after the last step, else `abandon` |

    `finish` keeps what later decisions need: the fleets' holdings, the largest share of a quota,
    and the totals that the server had when the walk began.
    """

    cursor: bytes = b"0"
    #: By writer, in the present walk.
    held: dict[str, KeyspaceUse] = field(default_factory=dict)
    #: The largest share of a quota that somebody held in the last complete walk.
    largest_share: float = 0.0
    #: By tag of the fleet, in the last complete walk.
    _fleets: dict[str, KeyspaceUse] = field(default_factory=dict)
    #: The server's totals when the present walk began, and the least of them since the last
    #: complete walk began; None before the first complete walk.
    _began_with: KeyspaceUse = field(default_factory=KeyspaceUse)
    _baseline: KeyspaceUse | None = None

    @property
    def is_at_start(self) -> bool:
        return self.cursor == b"0"

    def must_hurry(self, present: KeyspaceUse) -> bool:
        """Returns True before the first complete walk, and when the server holds far more than at
        the last one."""
        if self._baseline is None:
            return True
        names = min(self._baseline.names, present.names)
        size = min(self._baseline.size, present.size)
        self._baseline = KeyspaceUse(names, size)
        return (
            present.size - size > HURRY_GROWTH_BYTES or present.names - names > HURRY_GROWTH_NAMES
        )

    def begin(self, present: KeyspaceUse) -> None:
        self._began_with = present

    def add(self, reply: list[Any]) -> list[tuple[str, str]]:
        """Adds a reply of `measure_names.lua`. Returns the writers beyond their quota, with the
        reason; fleets have none (`held_by_fleet`)."""
        self.cursor, counts = bytes(reply[0]), reply[1:]
        offenders = []
        for word, names, size in zip(counts[::3], counts[1::3], counts[2::3], strict=True):
            writer = text_of(word)
            before = self.held.get(writer, KeyspaceUse())
            held = KeyspaceUse(before.names + int(names), before.size + int(size))
            self.held[writer] = held
            if not _tag_of(writer) and (held.names > MAX_NAMES or held.size > MAX_BYTES):
                offenders.append(
                    (writer, f"holds {held.names} names and {held.size} bytes or more")
                )
        return offenders

    def finish(self) -> None:
        self._fleets = {tag: held for writer, held in self.held.items() if (tag := _tag_of(writer))}
        shares = (
            max(held.names / MAX_NAMES, held.size / MAX_BYTES)
            for writer, held in self.held.items()
            if not _tag_of(writer)
        )
        self.largest_share = max(shares, default=0.0)
        self._baseline = self._began_with
        self.held = {}

    def abandon(self) -> None:
        """Forgets the present walk; the next one begins at the start."""
        self.cursor, self.held = b"0", {}

    def held_by_fleet(self, tag: str) -> KeyspaceUse:
        """Returns a fleet's holdings: of the last complete walk or of the present one, whichever
        counted more."""
        before = self._fleets.get(tag, KeyspaceUse())
        present = self.held.get(f"fleet {tag}", KeyspaceUse())
        return KeyspaceUse(max(before.names, present.names), max(before.size, present.size))


def _tag_of(writer: str) -> str:
    """Returns the tag of a fleet that `writer_lib.lua` names; empty for another writer."""
    return writer.removeprefix("fleet ") if writer.startswith("fleet ") else ""


#: The prefixes of the names of workers and of fleets; other users are somebody else's.
_WORKER_PREFIXES = tuple(prefix.encode() for prefix in (COLD_PREFIX, POOL_PREFIX))
_FLEET_PREFIX = FLEET_PREFIX.encode()
_CLIENT = re.compile(
    rb"^id=(\d+) addr=(\S+) (.*?) user=(\S+) "
    rb".*?\btot-net-in=(\d+) tot-net-out=(\d+) tot-cmds=(\d+)",
    re.MULTILINE,
)
#: Channels of a client, and bytes of the command that it waits in.
_SUBSCRIPTIONS = re.compile(rb" sub=(\d+)")
_BLOCKED = re.compile(rb" flags=\w*b\w* .* argv-mem=(\d+)")


class ClientTotals(NamedTuple):
    """Counts what one connection has done since it was made."""

    #: Bytes to and from the server.
    sent: int = 0
    received: int = 0
    commands: int = 0
    #: The channels that it has now, and the bytes of the names in the command that it waits in.
    subscriptions: int = 0
    blocked: int = 0

    @classmethod
    def of(cls, state: bytes, sent: bytes, received: bytes, commands: bytes) -> Self:
        """Reads fields of CLIENT LIST; `state`: those that stand before the user."""
        matches = _SUBSCRIPTIONS.search(state), _BLOCKED.search(state)
        held = (int(match[1]) if match else 0 for match in matches)
        return cls(int(sent), int(received), int(commands), *held)


class SlowTime(NamedTuple):
    """Counts a client's slow commands and the time that they took."""

    seconds: float = 0.0
    commands: int = 0

    def plus(self, seconds: float, commands: int = 1) -> Self:
        return self._replace(seconds=self.seconds + seconds, commands=self.commands + commands)


class NotedCommand(NamedTuple):
    """A command that the server noted because of the time that it took."""

    seconds: float
    #: The client's; empty if its connection ended first.
    address: bytes
    #: Its first key; empty if it has none.
    key: bytes

    @property
    def is_slow(self) -> bool:
        return self.seconds >= SLOW_COMMAND_S

    @classmethod
    def of(cls, entry: Sequence[Any]) -> Self:
        """Reads an entry of SLOWLOG GET. Only a word that the server has checked as a key against
        the user's rights is one."""
        _, _, microseconds, words, address, *_ = entry
        command = bytes(words[0]).lower()
        at = _FIRST_KEY.get(command, 0)
        if command == b"evalsha" and not _is_positive(words[2]):
            at = 0
        key = bytes(words[at]) if 0 < at < len(words) else b""
        return cls(int(microseconds) / 1e6, bytes(address), key)


#: Where the first key of a command stands that a worker or a fleet may call.
_FIRST_KEY: Final = {
    b"evalsha": 3,
    **{
        name.encode(): 1
        for name in JOB_COMMANDS
        if name not in ("ping", "time", "select", "info|server", "publish", "evalsha")
    },
}


def _is_positive(number: bytes) -> bool:
    return number.isdigit() and int(number) > 0


@dataclass
class UserActivity:
    """Counts what one Valkey user's connections did between two reads of the list of clients."""

    connections: int = 0
    #: Bytes to the server, and both ways.
    sent: int = 0
    traffic: int = 0
    commands: int = 0
    #: Seconds that commands of 1 ms and more took, and their number; of connections that have
    #: ended, all commands that the server noted.
    slow: float = 0.0
    slow_commands: int = 0
    #: The part of these seconds that is of connections that have ended.
    ended: float = 0.0
    #: As in `ClientTotals`.
    subscriptions: int = 0
    blocked: int = 0

    def longest(self, span: float, all_slow: float) -> float:
        """Returns the seconds of `span` that its commands can have taken at most.

        `all_slow`: seconds that everybody's slow commands took. While others' ran, none of this
        user's did.
        """
        quick = (self.commands - self.slow_commands) * SLOW_COMMAND_S
        return min(self.slow + quick, span - (all_slow - self.slow))

    def add(self, before: ClientTotals, now: ClientTotals, slow: SlowTime) -> None:
        """Adds what one connection did since the read before."""
        self.connections += 1
        self.subscriptions += now.subscriptions
        self.blocked += now.blocked
        self.sent += now.sent - before.sent
        self.traffic += now.sent + now.received - before.sent - before.received
        self.commands += now.commands - before.commands
        self.slow += slow.seconds
        self.slow_commands += slow.commands

    def add_ended(self, spent: SlowTime) -> None:
        """Adds what connections did that came and ended since the read before."""
        self.commands += spent.commands
        self.slow += spent.seconds
        self.slow_commands += spent.commands
        self.ended += spent.seconds

    def excess(self, span: float, *, is_fleet: bool) -> str:
        """Returns which quota this exceeds in `span` seconds; '' if none."""
        if self.connections > (MAX_FLEET_CONNECTIONS if is_fleet else MAX_CONNECTIONS):
            return f"has {self.connections} connections"
        if self.subscriptions > MAX_SUBSCRIPTIONS:
            return f"has subscribed to {self.subscriptions} channels"
        if self.blocked > (MAX_FLEET_BLOCKED_BYTES if is_fleet else MAX_BLOCKED_BYTES):
            return f"waits for {self.blocked} bytes of names"
        if not is_fleet and self.traffic > MAX_BYTES_PER_S * span:
            return f"sends and gets {self.traffic / span / 1e6:.0f} MB a second"
        return ""

    def flood(self, span: float) -> str:
        """Returns how much a fleet sends; '' if it may send that much. One burst is allowed: the
        caller acts on the second read in a row."""
        if self.sent > MAX_FLEET_BYTES_PER_S * span:
            return f"sends {self.sent / span / 1e6:.0f} MB a second"
        return ""

    def load(self, span: float, all_commands: int, all_slow: float, *, is_fleet: bool) -> str:
        """Returns how these commands keep a busy server busy; '' if they do not.

        A fleet with much to do sends most of all commands, so only its slow ones count.
        """
        if self.slow > BUSY_SHARE * span:
            where = (
                "from connections that it ends"
                if self.ended > self.slow / 2
                else "by slow commands"
            )
            return f"keeps Valkey busy for {self.slow / span:.0%} of the time {where}"
        sends_most = self.commands > BUSY_SHARE * all_commands
        can_be_the_cause = self.longest(span, all_slow) > BUSY_SHARE * span
        if not is_fleet and sends_most and can_be_the_cause:
            return f"keeps Valkey busy by {self.commands / span:.0f} commands a second"
        return ""


@dataclass
class ValkeyUserState:
    """Keeps what earlier reads of the list of clients have shown about one worker or one fleet."""

    is_fleet: bool
    #: The last read showed that it keeps a busy server busy, or that a fleet floods it. A second
    #: one in a row makes it an offender.
    is_suspect: bool = False
    #: The bytes by which a fleet's memory has grown, as far as what it sent can be the cause.
    grown: int = 0

    def note_load(self, load: str) -> bool:
        """Notes how it keeps the server busy or floods it, '' if it does not. Returns True the
        second time in a row."""
        was_suspect, self.is_suspect = self.is_suspect, bool(load)
        return was_suspect and self.is_suspect

    def note_growth(self, growth: int, activity: UserActivity) -> None:
        """Notes that memory has grown by `growth` bytes while the fleet did this."""
        caused = BYTES_PER_SENT_BYTE * activity.sent + BYTES_PER_COMMAND * activity.commands
        self.grown = max(0, self.grown + min(growth, caused))


@dataclass(eq=False)
class ClientCounts:
    """Finds users beyond a quota in lists of clients; without I/O."""

    #: By client id, at the last read; and when that was.
    _clients: dict[bytes, ClientTotals] = field(default_factory=dict)
    _read_at: float = -math.inf
    #: The user of each address, and the connections that are new, at the last read.
    _users: dict[bytes, bytes] = field(default_factory=dict)
    new_connections: int = 0
    #: Bytes that the server used then; None before the first read.
    _used: int | None = None
    #: Workers of the last read, and all fleets that were ever connected.
    _watched: dict[str, ValkeyUserState] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """Returns the ids of the connections at the last read."""
        return [int(client_id) for client_id in self._clients]

    @property
    def grown(self) -> dict[str, int]:
        """Returns by how many bytes each fleet's user has made memory grow."""
        return {name: user.grown for name, user in self._watched.items() if user.is_fleet}

    def forget_growth(self, fleet: str) -> None:
        if fleet in self._watched:
            self._watched[fleet].grown = 0

    def look(
        self,
        now: float,
        listing: bytes,
        *,
        is_busy: bool = False,
        slow: Mapping[bytes, SlowTime] | None = None,
        ended: Mapping[bytes, SlowTime] | None = None,
        used: int = 0,
    ) -> list[tuple[str, str]]:
        """Adds a reply of CLIENT LIST; returns the users beyond a quota, with the reason.

        `used`: bytes that the server uses. `is_busy`: its thread works for more than `BUSY_SHARE`
        of the time. `slow`: what slow commands took since the last read, by the client's address.
        `ended`: what noted commands took whose connections have ended, by user.
        """
        activities = self._add_clients(listing, slow or {})
        for login, spent in (ended or {}).items():
            activities.setdefault(login, UserActivity()).add_ended(spent)
        span, self._read_at = now - self._read_at, now
        if not RATE_SPAN_S <= span < 10 * RATE_SPAN_S:
            span = math.inf  # nothing is known of the time since
        all_commands = sum(activity.commands for activity in activities.values())
        all_slow = sum(spent.seconds for spent in (slow or {}).values())
        watched = {
            text_of(user): activity for user, activity in activities.items() if _is_ours(user)
        }
        self._watched = {
            name: user for name, user in self._watched.items() if user.is_fleet or name in watched
        }
        offenders = []
        for name, activity in watched.items():
            is_fleet = name.startswith(FLEET_PREFIX)
            user = self._watched.setdefault(name, ValkeyUserState(is_fleet))
            load = activity.flood(span) if is_fleet else ""
            if is_busy and not load:
                load = activity.load(span, all_commands, all_slow, is_fleet=is_fleet)
            keeps_on = user.note_load(load)
            reason = activity.excess(span, is_fleet=is_fleet) or (load if keeps_on else "")
            if reason:
                offenders.append((name, reason))
        if self._used is not None:
            for name, user in self._watched.items():
                if user.is_fleet:
                    user.note_growth(used - self._used, watched.get(name, UserActivity()))
        self._used = used
        return offenders

    def find_ended(
        self, listing: bytes, noted: Iterable[NotedCommand]
    ) -> tuple[dict[bytes, SlowTime], list[NotedCommand]]:
        """Returns what commands took whose connections have ended since the last read, by user; and
        those whose connections also began since then, so that nobody has seen their user.

        Of a fleet only slow ones count, as in `UserActivity.load`.
        """
        listed = _users_of(listing)
        by_user: dict[bytes, SlowTime] = {}
        unseen = []
        for command in noted:
            if command.address in listed:
                continue
            if user := self._users.get(command.address):
                if command.is_slow or not user.startswith(_FLEET_PREFIX):
                    by_user[user] = by_user.get(user, SlowTime()).plus(command.seconds)
            else:
                unseen.append(command)
        return by_user, unseen

    def _add_clients(
        self, listing: bytes, slow: Mapping[bytes, SlowTime]
    ) -> dict[bytes, UserActivity]:
        """Returns what each user did since the last read."""
        clients: dict[bytes, ClientTotals] = {}
        activities: dict[bytes, UserActivity] = {}
        self._users = _users_of(listing)
        for client_id, address, state, user, *counts in _CLIENT.findall(listing):
            totals = ClientTotals.of(state, *counts)
            before = self._clients.get(client_id, ClientTotals())
            clients[client_id] = totals
            activity = activities.setdefault(user, UserActivity())
            activity.add(before, totals, slow.get(address, SlowTime()))
        self.new_connections = len(clients.keys() - self._clients.keys())
        self._clients = clients
        return activities


def _users_of(listing: bytes) -> dict[bytes, bytes]:
    return {address: user for _, address, _, user, *_ in _CLIENT.findall(listing)}


def _is_ours(user: bytes) -> bool:
    """Returns True for a worker's and a fleet's Valkey user."""
    return user.startswith(_WORKER_PREFIXES) or user.startswith(_FLEET_PREFIX)


@dataclass(eq=False)
class ServerLoad:
    """Decides from the server's totals when the list of clients has to be read; without I/O."""

    #: The server's thread was busy in the last span of `RATE_SPAN_S`.
    is_busy: bool = False
    #: When the list was asked for.
    _listed_at: float = -math.inf
    #: Bytes that were used when it was read, and the least number of connections since then.
    _listed_used: int = 0
    _connections: int = 0
    #: Seconds that the thread had worked, and when that was read.
    _worked: float = 0.0
    _worked_at: float = -math.inf

    def needs_list(self, now: float, totals: Totals, busy_share: float) -> bool:
        """Notes the totals of now. Returns True if they are suspicious and the list was not read
        just before."""
        if now - self._worked_at >= RATE_SPAN_S:
            share = (totals.worked - self._worked) / (now - self._worked_at)
            self._worked, self._worked_at = totals.worked, now
            self.is_busy = share > busy_share
        self._connections = min(self._connections, totals.connections)
        is_suspicious = (
            totals.connections - self._connections > MIN_NEW_CONNECTIONS
            or abs(totals.memory.used - self._listed_used) > MIN_MEMORY_CHANGE_BYTES
            or self.is_busy
            or totals.traffic > BUSY_BYTES_PER_S
        )
        return is_suspicious and self.may_list(now)

    def may_list(self, now: float) -> bool:
        """Returns True if the last read is long enough ago to compute rates."""
        return now - self._listed_at >= RATE_SPAN_S

    def note_asked(self, now: float) -> None:
        """Notes that the list is asked for. If the read fails, it is repeated as soon as
        `may_list` allows it, because the totals stay suspicious."""
        self._listed_at = now

    def note_listed(self, totals: Totals) -> None:
        """Notes that the list was read and its users were checked."""
        self._listed_used, self._connections = totals.memory.used, totals.connections


@dataclass(eq=False, repr=False)
class QuotaWatcher:
    """Watches until `run` is cancelled. Use it only where workers have Valkey users: without them,
    nobody can tell whose a name is."""

    client: Redis
    database_url: str
    cutting: WorkerCutOff
    #: Cuts off fleets of job runners; None: they are not watched.
    job_users: JobUsers | None = None
    #: The share of the time from which on the server's thread is busy, as `BUSY_SHARE`.
    busy_share: float = BUSY_SHARE

    def __post_init__(self) -> None:
        self._walk = NameWalk()
        self._clients = ClientCounts()
        self._load = ServerLoad()
        #: The number of the last noted command that was read.
        self._last_noted: int | None = None
        #: Connections that the server had made at the last read of the list of clients.
        self._made = 0
        #: The id of the newest connection then, about; None before the first read.
        self._newest_id: int | None = None
        #: Seconds from which on the server notes a command; None before it was set.
        self._noted_from: float | None = None
        #: The last attempt to read Valkey failed, and the log says so.
        self._is_unreadable = False

    async def run(self) -> None:
        while True:
            try:
                await lead(self.database_url, LOCK_ID, self._watch)
            except DatabaseUnavailable as error:
                log.warning("quota_watcher_waits", reason=error.detail)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _watch(self, connection: AsyncConnection) -> None:
        shown_at = -math.inf
        while True:
            began = time.monotonic()
            if began - shown_at > MAX_SILENCE_S / 6:  # keeps the lock's connection
                await send_sign_of_life(connection)
                shown_at = began
            try:
                await self.look()
                self._is_unreadable = False
            except (RedisError, OSError) as error:
                if not self._is_unreadable:
                    log.warning(
                        "quotas_not_watched", error=type(error).__name__, reason=str(error)[:200]
                    )
                self._is_unreadable = True
            await asyncio.sleep(max(0.0, began + READ_INTERVAL_S - time.monotonic()))

    async def look(self) -> None:
        """Reads the totals, reads the list of clients if they are suspicious, and takes the next
        steps of the walk. Raises `RedisError`."""
        totals = await self._read_totals()
        now = time.monotonic()
        if not self._load.is_busy:
            await self._note_from(SLOW_COMMAND_S)
        if self._load.needs_list(now, totals, self.busy_share):
            await self._check_clients(now, totals)
        present = KeyspaceUse(totals.names, totals.memory.used)
        if self._walk.must_hurry(present):
            await self._walk_at_once(present)
        else:
            await self._walk_for_a_tick(present)

    async def _read_totals(self) -> Totals:
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.info("memory")
            pipe.dbsize()
            pipe.info("clients")
            pipe.info("stats")
            pipe.info("cpu")
            memory, names, clients, stats, processor = await pipe.execute()
        rate = float(stats["instantaneous_input_kbps"]) + float(stats["instantaneous_output_kbps"])
        # Of the thread that runs commands; others write to the disk.
        worked = float(processor["used_cpu_user_main_thread"]) + float(
            processor["used_cpu_sys_main_thread"]
        )
        return Totals(
            memory=MemoryUse.of(memory),
            names=int(names),
            connections=int(clients["connected_clients"]),
            traffic=rate * 1024,
            worked=worked,
            made=int(stats["total_connections_received"]),
        )

    # --- names ------------------------------------------------------------------------------------

    async def _walk_at_once(self, present: KeyspaceUse) -> None:
        """Walks over all names once, as fast as Valkey answers. Stops early if it finds an
        offender."""
        self._walk.abandon()
        while not await self._take_step(present):
            if self._load.may_list(time.monotonic()):
                totals = await self._read_totals()
                await self._check_clients(time.monotonic(), totals)

    async def _walk_for_a_tick(self, present: KeyspaceUse) -> None:
        """Takes the steps that a walk of `WALK_TIME_S` seconds needs in each tick."""
        names = min(present.names / WALK_TIME_S, MAX_WALKED_NAMES_PER_S) * READ_INTERVAL_S
        for _ in range(math.ceil(names / NAMES_PER_STEP)):
            if await self._take_step(present):
                break

    async def _take_step(self, present: KeyspaceUse) -> bool:
        """Takes one step of the walk; returns True after the last one.

        A walk that has found an offender ends there: the next one begins while the names of the
        offender are removed.
        """
        walk = self._walk
        if walk.is_at_start:
            walk.begin(present)
        reply = await valkey.run_script(
            self.client, scripts.MEASURE_NAMES, [], [walk.cursor, NAMES_PER_STEP, MAX_NAMES]
        )
        for writer, reason in walk.add(reply):
            if await self.cutting.cut_off_writer(writer, reason):
                walk.abandon()
                return True
        if not walk.is_at_start:
            return False
        walk.finish()
        LARGEST_SHARE.set(walk.largest_share)
        await self._bound_errors()
        return True

    async def _bound_errors(self) -> None:
        """Deletes the errors that wait for operators if they are too large: every fleet appends to
        them, and nobody can tell which one did."""
        size = await self.client.memory_usage(keys.ERRORS, samples=0)
        if size is not None and size > MAX_ERRORS_BYTES:
            await self.client.unlink(keys.ERRORS)
            log.error("error_reports_deleted", size=size, reason="a job runner has sent too many")

    # --- connections, traffic and time ------------------------------------------------------------

    async def _check_clients(self, now: float, totals: Totals) -> None:
        """Reads the list of clients and cuts off those beyond a quota."""
        self._load.note_asked(now)
        is_busy = self._load.is_busy
        noted, scale = await self._read_noted_commands() if is_busy else ([], 1.0)
        listing = await self._list_clients(totals.made)
        ended, unseen = self._clients.find_ended(listing, noted)
        for name, spent in (await self._name_users(unseen, scale)).items():
            ended[name] = ended.get(name, SlowTime()).plus(spent.seconds, spent.commands)
        slow: dict[bytes, SlowTime] = {}
        for command in noted:
            if command.is_slow:
                before = slow.get(command.address, SlowTime())
                slow[command.address] = before.plus(command.seconds)
        for user, reason in self._clients.look(
            now, listing, is_busy=is_busy, slow=slow, ended=ended, used=totals.memory.used
        ):
            await self._cut_off(user, reason)
        limit = totals.memory.limit * MAX_FLEET_GROWTH_SHARE or MAX_FLEET_BYTES
        for user, grown in self._clients.grown.items():
            names, size = self._walk.held_by_fleet(user.removeprefix(FLEET_PREFIX))
            if grown > limit and (size > limit / 2 or names > MAX_FLEET_NAMES):
                await self._cut_off_fleet(user, f"holds {names} names and {size} bytes or more")
        self._load.note_listed(totals)
        have_ended = totals.made - self._made > self._clients.new_connections
        self._made = totals.made
        await self._note_from(0.0 if is_busy and have_ended else SLOW_COMMAND_S)

    async def _list_clients(self, made: int) -> bytes:
        """Returns what CLIENT LIST does, read in parts.

        Anyone who has a login can give a connection a name of a megabyte (`HELLO`): a few hundred
        make a list that is hard to read. A part with such names is not, and their user is cut off
        before the next part is read.

        `made`: connections that the server has made. Each has the next number as its id.
        """
        newest = 0
        parts: list[list[object]] = [[]]
        if self._newest_id is not None and made >= self._made:
            newest = self._newest_id + made - self._made
            new = range(self._newest_id + 1, newest + 1 + MAX_CLIENTS_OF_SERVER)
            ids = [*self._clients.ids, *new]
            starts = range(0, len(ids), CLIENTS_PER_PART)
            parts = [["ID", *ids[start : start + CLIENTS_PER_PART]] for start in starts]
        lines: list[bytes] = []
        async with self.client.client() as reader:
            # A part with long names is large: the server would end this client first when all of
            # them together hold too much.
            await reply_of(reader.execute_command("CLIENT", "NO-EVICT", "ON"))  # type: ignore[no-untyped-call]
            for words in parts:
                reply = await reply_of(reader.execute_command("CLIENT", "LIST", *words))  # type: ignore[no-untyped-call]
                lines += await self._without_long_names(bytes(reply).splitlines())
        self._newest_id = max(newest, *(int(line[3:].partition(b" ")[0]) for line in lines))
        return b"\n".join(lines)

    async def _without_long_names(self, part: list[bytes]) -> list[bytes]:
        """Returns the lines of usual length; cuts off the users of the others."""
        for line in part:
            user = line.rpartition(b" user=")[2].partition(b" ")[0]
            if len(line) > MAX_CLIENT_LINE_BYTES and _is_ours(user):
                reason = f"gives a connection a name of {len(line)} bytes"
                await self._cut_off(text_of(user), reason)
        return [line for line in part if len(line) <= MAX_CLIENT_LINE_BYTES]

    async def _cut_off(self, user: str, reason: str) -> None:
        if user.startswith(FLEET_PREFIX):
            await self._cut_off_fleet(user, reason)
        else:
            await self.cutting.cut_off(Offender(worker_id=user), reason)

    async def _cut_off_fleet(self, user: str, reason: str) -> None:
        """Raises `RedisError`; then what the fleet has grown by still counts at the next look."""
        if self.job_users is not None:
            await self.job_users.cut_off(user.removeprefix(FLEET_PREFIX), reason)
        self._clients.forget_growth(user)

    async def _note_from(self, seconds: float) -> None:
        """Has the server note commands that take as long as this, or longer."""
        if seconds != self._noted_from:
            try:
                await self.client.config_set("slowlog-log-slower-than", round(seconds * 1e6))
            except ResponseError as error:  # the server notes what its own configuration says
                log.warning("slow_log_not_set", reason=str(error)[:200])
            self._noted_from = seconds

    async def _read_noted_commands(self) -> tuple[list[NotedCommand], float]:
        """Returns commands that the server has noted since the last call: the newest, and how many
        times as many there were."""
        entries = await reply_of(
            self.client.execute_command("SLOWLOG", "GET", MAX_SLOW_COMMANDS_PER_READ)  # type: ignore[no-untyped-call]
        )
        last = self._last_noted
        self._last_noted = max((int(entry[0]) for entry in entries), default=0)
        if last is None:
            return [], 1.0
        noted = [NotedCommand.of(entry) for entry in entries if int(entry[0]) > last]
        return noted, max(1.0, (self._last_noted - last) / len(noted)) if noted else 1.0

    async def _name_users(
        self, commands: Sequence[NotedCommand], scale: float
    ) -> dict[bytes, SlowTime]:
        """Returns what these commands took, `scale` times, by the user that reaches their keys.

        Only the slow commands of a fleet count, as in `UserActivity.load`. Every worker that shares
        a budget of linked users counts for it, as in `WorkerCutOff.cut_off_writer`.
        """
        keyed = [command for command in commands if command.key]
        if not keyed:
            return {}
        words = [command.key for command in keyed]
        logins = await valkey.run_script(self.client, scripts.NAME_USERS, [], words)
        spent_by: dict[tuple[str, str], SlowTime] = {}
        for login, command in zip(logins, keyed, strict=True):
            kind, _, name = text_of(login).partition(" ")
            if command.is_slow or kind != "fleet":
                spent = spent_by.get((kind, name), SlowTime())
                spent_by[kind, name] = spent.plus(command.seconds * scale)
        budgets = [name for kind, name in spent_by if kind == "budget"]
        sharers = (
            await self.cutting.users.workers_with_budgets(budgets)
            if budgets and self.cutting.users
            else {}
        )
        users: dict[bytes, SlowTime] = {}
        for (kind, name), spent in spent_by.items():
            for user in {
                "worker": [name],
                "fleet": [user_of_jobs(name)],
                "budget": sharers.get(name, []),
            }.get(kind, []):
                before = users.get(user.encode(), SlowTime())
                users[user.encode()] = before.plus(spent.seconds, round(spent.commands * scale))
        return users
