"""Watches how much of Valkey each worker and each fleet of job runners uses, and cuts off one that
uses too much.

A worker's Valkey user limits which names it reaches, not how many it makes or how large they are.
One orchestrator watches at a time. It counts by itself and believes no figure of a worker's.

- *Names and bytes.* A walk over all names counts them by worker, in short steps, so that no order
  waits. One walk takes 2 s while there are no more names than `WALK_RATE` allows. When memory or
  names grow fast, the watcher walks over all names at once. It cuts off a worker as soon as the
  walk has counted more than its quota: the more the worker holds, the sooner that is.
- *Connections and traffic.* The watcher reads the list of clients only while there are unusually
  many, or much is sent.
- *Time.* Valkey does not say which user its processor time goes to. It notes commands of 1 ms and
  more. So while Valkey's thread is busy for more than half of the time, the watcher cuts off a
  worker whose slow commands fill half of the time, or which sends more than half of all commands
  and can have filled half of the time, in two checks in a row. (A machine that is short of
  processors makes commands slow, but does not make the thread busy.)

All runners of a fleet count as one. Services write under a fleet's names, too, and a busy fleet
sends much. So the watcher cuts off a fleet for other reasons: it sends far more than results need,
its slow commands fill half of the time, or what it has sent has made memory grow by a quarter of
the server's maximum.
"""

import asyncio
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.events.cut_off import Offender, WorkerCutOff
from activities.pool.launch import COLD_PREFIX, POOL_PREFIX
from infra.database.engine import DatabaseUnavailable
from infra.database.locks import MAX_SILENCE_S, lead, send_sign_of_life
from infra.process_metrics import LARGEST_SHARE
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.valkey.job_login import FLEET_PREFIX
from infra.valkey.job_users import JobUsers
from infra.valkey.memory import MemoryUse
from worker_runtime.protocol import scripts

#: Names the lock of this loop among PostgreSQL's advisory locks.
LOCK: Final = 0x626572746A
#: What a worker may hold. A busy one has 50 names and 0.3 MB; with a thousand failed jobs and
#: results 5 MB.
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_NAMES: Final = 20_000
#: Connections that a worker may have; it needs four.
MAX_CONNECTIONS: Final = 64
#: Bytes a second that a worker may send and get over `RATE_SPAN_S` seconds. At 100 orders a second
#: it is 0.5 MB.
MAX_RATE: Final = 16 * 1024 * 1024
RATE_SPAN_S: Final = 0.75
#: Three limits: the share of the time for which Valkey's thread may work before the watcher looks
#: for the cause, the share that one worker's slow commands may take, and the share of all commands
#: that one worker may send. At 100 orders a second, Valkey's thread works for 4 % of the time.
BUSY_SHARE: Final = 0.5
#: Seconds from which on the server notes a command as slow (`slowlog-log-slower-than`): each of the
#: others takes less.
SLOW_S: Final = 0.001
#: Slow commands that are read at once.
SLOW_COMMANDS: Final = 512
#: Connections that all runners of one fleet may have; a runner has about five. Bytes a second that
#: they may send over `RATE_SPAN_S` seconds; the results of thousands of jobs are 2 MB.
MAX_FLEET_CONNECTIONS: Final = 1_024
MAX_FLEET_RATE: Final = 32 * 1024 * 1024
#: The share of `maxmemory` by which a fleet may make memory grow; in bytes for a server without a
#: maximum.
MAX_FLEET_GROWTH: Final = 0.25
MAX_FLEET_BYTES: Final = 1024 * 1024 * 1024
#: Bytes of memory that are estimated for a sent byte and for a command. A short name takes about
#: 100 bytes more than it has, and a short member of a sorted set four times what was sent.
BYTES_PER_SENT: Final = 2
BYTES_PER_COMMAND: Final = 150
#: Names, entries included, beyond which a fleet holds too much whatever its bytes: the bytes of
#: large keys are not counted exactly.
MANY_NAMES: Final = 100_000
#: Change of memory, in bytes, from which on the watcher reads the list of clients.
CHANGED_BYTES: Final = 8 * 1024 * 1024
#: Seconds between two reads of the totals.
TICK_S: Final = 0.25
#: Seconds of one walk, and the names that it counts a second at most: more would cost over 4 % of
#: Valkey's time.
WALK_S: Final = 2.0
WALK_RATE: Final = 8_000
#: Names of one step.
STEP: Final = 100
#: Growth since the last complete walk began, in bytes and names, from which on the watcher walks at
#: once.
HURRY_BYTES: Final = MAX_BYTES // 4
HURRY_NAMES: Final = MAX_NAMES // 4
#: New connections since the last look, and bytes a second of all clients, from which on the watcher
#: reads the list of clients.
MORE_CONNECTIONS: Final = 200
BUSY_RATE: Final = 8 * 1024 * 1024
#: Seconds until a process that lost the lock tries to get it again.
RETRY_INTERVAL_S: Final = 1.0

log = structlog.get_logger()


class Totals(NamedTuple):
    """What the server says about itself in one round trip."""

    memory: MemoryUse
    names: int
    connections: int
    #: Bytes a second from and to all clients.
    traffic: float
    #: Seconds that the server's thread has worked.
    worked: float


@dataclass(eq=False)
class NameCounts:
    """The walk over all names: what each writer holds, as far as it has come."""

    cursor: bytes = b"0"
    #: Names and bytes by writer.
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: The largest share of a quota that somebody held in the last whole walk.
    largest: float = 0.0
    #: Names and bytes of fleets in the last whole walk, by tag.
    fleets: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, reply: list[Any]) -> list[tuple[str, str]]:
        """Adds a reply of `measure_names.lua`; returns those beyond their quota, with the
        reason."""
        self.cursor, counts = bytes(reply[0]), reply[1:]
        offenders = []
        for writer, names, size in zip(counts[::3], counts[1::3], counts[2::3], strict=True):
            held = self.held.get(text_of(writer), (0, 0))
            held = self.held[text_of(writer)] = (held[0] + int(names), held[1] + int(size))
            if _tag_of(text_of(writer)):
                continue
            if held[0] > MAX_NAMES or held[1] > MAX_BYTES:
                offenders.append(
                    (text_of(writer), f"holds {held[0]} names and {held[1]} bytes or more")
                )
        return offenders

    def end_walk(self) -> None:
        self.fleets = {tag: held for name, held in self.held.items() if (tag := _tag_of(name))}
        shares = (
            max(names / MAX_NAMES, size / MAX_BYTES)
            for name, (names, size) in self.held.items()
            if not _tag_of(name)
        )
        self.largest = max(shares, default=0.0)
        self.held = {}

    def held_by_fleet(self, tag: str) -> tuple[int, int]:
        """Return names and bytes of a fleet: of the last whole walk, or what this one has found."""
        before, present = self.fleets.get(tag, (0, 0)), self.held.get(f"fleet {tag}", (0, 0))
        return max(before[0], present[0]), max(before[1], present[1])


def _tag_of(writer: str) -> str:
    """Return the tag of a fleet that `writer_lib.lua` names; empty for another writer."""
    return writer.removeprefix("fleet ") if writer.startswith("fleet ") else ""


#: What names of workers and of fleets begin with; other users are somebody else's.
_WORKERS = tuple(prefix.encode() for prefix in (COLD_PREFIX, POOL_PREFIX))
_FLEETS = FLEET_PREFIX.encode()
_CLIENT = re.compile(
    rb"^id=(\d+) addr=(\S+) .*? user=(\S+) .*?\btot-net-in=(\d+) tot-net-out=(\d+) tot-cmds=(\d+)",
    re.MULTILINE,
)


class SlowTime(NamedTuple):
    """What a client's slow commands took."""

    seconds: float = 0.0
    commands: int = 0


@dataclass
class UserActivity:
    """What one Valkey user's clients have done since the last look."""

    connections: int = 0
    #: Bytes, both ways.
    traffic: int = 0
    #: Bytes that it sent.
    sent: int = 0
    commands: int = 0
    #: Seconds that commands of 1 ms and more took, and their number.
    slow: float = 0.0
    slow_commands: int = 0

    @property
    def longest(self) -> float:
        """Return the seconds that its commands can have taken at most."""
        return self.slow + (self.commands - self.slow_commands) * SLOW_S


@dataclass(eq=False)
class ClientCounts:
    """What each Valkey user does, from lists of clients; without I/O."""

    #: By user of a fleet: bytes by which memory has grown, as far as what it sent can be the cause.
    grown: dict[str, int] = field(default_factory=dict)
    #: Bytes from and to each client, and its commands, at the last look; and when that was.
    _seen: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    #: Bytes that the server used then; None before the first look.
    _used: int | None = None
    _looked_at: float = -math.inf
    #: Users who kept a busy server busy at the last look.
    _suspects: set[bytes] = field(default_factory=set)

    def look(
        self,
        now: float,
        listing: bytes,
        *,
        is_busy: bool = False,
        slow: Mapping[bytes, SlowTime] | None = None,
        used: int = 0,
    ) -> list[tuple[str, str]]:
        """Adds a reply of CLIENT LIST; returns the users beyond a quota, with the reason.

        `used`: bytes that the server uses. `is_busy`: its thread works for more than `BUSY_SHARE`
        of the time. `slow`: what slow commands took since the last look, by the client's address.
        """
        seen: dict[bytes, tuple[int, int, int]] = {}
        users: dict[bytes, UserActivity] = {}
        for client_id, address, user, sent, got, commands in _CLIENT.findall(listing):
            seen[client_id] = int(sent), int(got), int(commands)
            before = self._seen.get(client_id, (0, 0, 0))
            activity = users.setdefault(user, UserActivity())
            activity.connections += 1
            activity.sent += int(sent) - before[0]
            activity.traffic += int(sent) + int(got) - before[0] - before[1]
            activity.commands += int(commands) - before[2]
            slow_time = (slow or {}).get(address, SlowTime())
            activity.slow += slow_time.seconds
            activity.slow_commands += slow_time.commands
        if self._used is not None:
            self._attribute_growth(used - self._used, users)
        self._used = used
        span = now - self._looked_at
        self._seen, self._looked_at = seen, now
        if not RATE_SPAN_S <= span < 10 * RATE_SPAN_S:
            span = math.inf  # nothing is known of the time since
        offenders = list(self._beyond_quota(users, span))
        suspects = self._busy_users(users, span) if is_busy else {}
        offenders += [(text_of(user), suspects[user]) for user in suspects.keys() & self._suspects]
        self._suspects = set(suspects)
        return offenders

    def _attribute_growth(self, growth: int, users: Mapping[bytes, UserActivity]) -> None:
        """Adds the memory's growth since the last look to the fleets that may have caused it."""
        for user in (*self.grown, *map(text_of, users)):
            if user.startswith(FLEET_PREFIX):
                self.grown.setdefault(user, 0)
        for user, before in self.grown.items():
            activity = users.get(user.encode(), UserActivity())
            caused = BYTES_PER_SENT * activity.sent + BYTES_PER_COMMAND * activity.commands
            self.grown[user] = max(0, before + min(growth, caused))

    def _beyond_quota(
        self, users: Mapping[bytes, UserActivity], span: float
    ) -> Iterator[tuple[str, str]]:
        for user, activity in users.items():
            is_fleet = user.startswith(_FLEETS)
            if not is_fleet and not user.startswith(_WORKERS):
                continue
            if activity.connections > (MAX_FLEET_CONNECTIONS if is_fleet else MAX_CONNECTIONS):
                yield text_of(user), f"has {activity.connections} connections"
            elif is_fleet:
                if activity.sent > MAX_FLEET_RATE * span:
                    yield text_of(user), f"sends {activity.sent / span / 1e6:.0f} MB a second"
            elif activity.traffic > MAX_RATE * span:
                yield (
                    text_of(user),
                    f"sends and gets {activity.traffic / span / 1e6:.0f} MB a second",
                )

    def _busy_users(self, users: Mapping[bytes, UserActivity], span: float) -> dict[bytes, str]:
        """Returns the workers and fleets whose commands a busy server works on, with the reason.

        A fleet with much to do sends most of all commands: only slow ones count.
        """
        total = sum(activity.commands for activity in users.values())
        reasons: dict[bytes, str] = {}
        for user, activity in users.items():
            is_fleet = user.startswith(_FLEETS)
            if not is_fleet and not user.startswith(_WORKERS):
                continue
            if activity.slow > BUSY_SHARE * span:
                share = activity.slow / span
                reasons[user] = f"keeps Valkey busy for {share:.0%} of the time by slow commands"
            elif (
                not is_fleet
                and activity.commands > BUSY_SHARE * total
                and activity.longest > BUSY_SHARE * span
            ):
                reasons[user] = (
                    f"keeps Valkey busy by {activity.commands / span:.0f} commands a second"
                )
        return reasons


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
        self.counts = NameCounts()
        self._clients = ClientCounts()
        #: Memory and names when the last whole walk began, and when this one did.
        self._known: tuple[int, int] | None = None
        self._began: tuple[int, int] = (0, 0)
        self._connections = 0
        #: Bytes that were used at the last look at the clients.
        self._used = 0
        self._clients_at = -math.inf
        #: When the thread's time was read, and what it was; whether it was busy in the span before.
        self._worked: tuple[float, float] = (-math.inf, 0.0)
        self._is_busy = False
        #: The number of the last slow command that was read.
        self._last_slow: int | None = None
        self._unreadable = False

    async def run(self) -> None:
        while True:
            try:
                await lead(self.database_url, LOCK, self._watch)
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
                self._unreadable = False
            except (RedisError, OSError) as error:
                if not self._unreadable:
                    log.warning(
                        "quotas_not_watched", error=type(error).__name__, reason=str(error)[:200]
                    )
                self._unreadable = True
            await asyncio.sleep(max(0.0, began + TICK_S - time.monotonic()))

    async def look(self) -> None:
        """Reads the totals, reads the clients if the totals are suspicious, and walks on over the
        names. Raises `RedisError`."""
        totals = await self.read_totals()
        now = time.monotonic()
        has_more_connections = totals.connections - self._connections > MORE_CONNECTIONS
        if now - self._worked[0] >= RATE_SPAN_S:
            share = (totals.worked - self._worked[1]) / (now - self._worked[0])
            self._worked, self._is_busy = (now, totals.worked), share > self.busy_share
        memory_changed = abs(totals.memory.used - self._used) > CHANGED_BYTES
        suspicious = (
            has_more_connections or memory_changed or self._is_busy or totals.traffic > BUSY_RATE
        )
        if suspicious and now - self._clients_at >= RATE_SPAN_S:
            await self._look_at_clients(now, totals.memory)
        self._connections = (
            totals.connections
            if has_more_connections
            else min(self._connections, totals.connections)
        )
        present = (totals.memory.used, totals.names)
        if self._known is None:  # the first walk is a whole one
            self._known = (-HURRY_BYTES - 1, 0)
        known = self._known = (min(self._known[0], present[0]), min(self._known[1], present[1]))
        if present[0] - known[0] > HURRY_BYTES or present[1] - known[1] > HURRY_NAMES:
            await self.walk(present)
            return
        names = min(totals.names / WALK_S, WALK_RATE) * TICK_S
        for _ in range(math.ceil(names / STEP)):
            if await self._step(present):
                break

    async def read_totals(self) -> Totals:
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
        connections = int(clients["connected_clients"])
        return Totals(MemoryUse.of(memory), int(names), connections, rate * 1024, worked)

    async def walk(self, present: tuple[int, int]) -> None:
        """Walks over all names once, as fast as Valkey answers. Stops early if it finds an
        offender."""
        self.counts.cursor, self.counts.held = b"0", {}
        while not await self._step(present):
            if time.monotonic() - self._clients_at >= RATE_SPAN_S:
                totals = await self.read_totals()
                await self._look_at_clients(time.monotonic(), totals.memory)

    async def _step(self, present: tuple[int, int]) -> bool:
        """Takes one step of the walk; returns True after the last one.

        A walk that has found an offender ends there: the next one begins while the names of the
        offender are removed.
        """
        counts = self.counts
        if counts.cursor == b"0":
            self._began = present
        reply = await valkey.run_script(
            self.client, scripts.MEASURE_NAMES, [], [counts.cursor, STEP, MAX_NAMES]
        )
        for writer, reason in counts.add(reply):
            if await self.cutting.cut_off_writer(writer, reason):
                counts.cursor, counts.held = b"0", {}
                return True
        if counts.cursor != b"0":
            return False
        counts.end_walk()
        LARGEST_SHARE.set(counts.largest)
        self._known = self._began
        return True

    async def _look_at_clients(self, now: float, memory: MemoryUse) -> None:
        self._clients_at, self._used = now, memory.used
        slow = await self._read_slow_commands() if self._is_busy else None
        listing = await reply_of(self.client.execute_command("CLIENT", "LIST"))  # type: ignore[no-untyped-call]
        for user, reason in self._clients.look(
            now, listing, is_busy=self._is_busy, slow=slow, used=memory.used
        ):
            if user.startswith(FLEET_PREFIX):
                await self._cut_off_fleet(user, reason)
            else:
                await self.cutting.cut_off(Offender(worker_id=user), reason)
        limit = memory.limit * MAX_FLEET_GROWTH or MAX_FLEET_BYTES
        for user, grown in list(self._clients.grown.items()):
            names, size = self.counts.held_by_fleet(user.removeprefix(FLEET_PREFIX))
            if grown > limit and (size > limit / 2 or names > MANY_NAMES):
                await self._cut_off_fleet(user, f"holds {names} names and {size} bytes or more")

    async def _cut_off_fleet(self, user: str, reason: str) -> None:
        """Raises `RedisError`; then what the fleet has grown by still counts at the next look."""
        if self.job_users is not None:
            await self.job_users.cut_off(user.removeprefix(FLEET_PREFIX), reason)
        self._clients.grown.pop(user, None)

    async def _read_slow_commands(self) -> dict[bytes, SlowTime]:
        """Returns what slow commands took since the last call, by the client's address."""
        entries = await self.client.slowlog_get(SLOW_COMMANDS)
        last, self._last_slow = (
            self._last_slow,
            max((int(entry["id"]) for entry in entries), default=0),
        )
        slow: dict[bytes, SlowTime] = {}
        for entry in entries:
            if last is not None and int(entry["id"]) > last:
                address = bytes(entry["client_address"])
                before = slow.get(address, SlowTime())
                slow[address] = SlowTime(
                    before.seconds + int(entry["duration"]) / 1e6, before.commands + 1
                )
        return slow
