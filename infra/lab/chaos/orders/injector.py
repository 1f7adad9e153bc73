"""Injects the faults of a schedule into a running stack, and brings everything back.

One of them is a replica of Valkey that lagged: the server comes back as it was, from its
append-only file.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from infra import tasks
from infra.exchange.behaviour import Behaviour
from infra.exchange.client import ExchangeAdmin, ExchangeUnreachable
from infra.lab.chaos.orders.api_clock import ApiClock
from infra.lab.chaos.orders.schedule import FaultKind, FaultTarget, PlannedFault
from infra.lab.processes import WorkerProcesses, processes_of, send_signal
from infra.lab.target import BenchUser
from infra.local.process import Server, ServerFailed
from infra.local.servers import ValkeyServer
from infra.local.stack import LocalStack
from worker_runtime.protocol import keys

_LOG, _COPY = "appendonlydir", "lagging"


def copy_valkey_log(valkey: ValkeyServer) -> Path | None:
    """Copies what the server knows now. Returns None if that failed."""
    made = valkey.directory / _COPY
    shutil.rmtree(made, ignore_errors=True)
    try:
        shutil.copytree(valkey.directory / _LOG, made)
    except (OSError, shutil.Error):  # it was being rewritten
        return None
    return made


def promote_copy(valkey: ValkeyServer, made: Path) -> None:
    """Kills the server and puts the copy in the place of its data. The caller starts it.

    The generation stays the same.
    """
    log = valkey.directory / _LOG
    valkey.kill()
    shutil.rmtree(log)
    made.rename(log)


#: Seconds for which the broker's lists still lag after a rewind: longer than a new worker needs
#: to log in.
LISTS_LAG_S = 4.0
#: The number of users of whom one loses the worker in a rewind, and with a host.
_USERS_PER_LOST_WORKER = 3
#: A host that is stopped comes back this many times a fault's `seconds` after marks have run out;
#: keys of an account are rejected for as long.
_AWAY_FACTOR = 4.0
#: The flush comes this share of a fault's `seconds` (up to 3)
#: after the cancels, which take some 30 ms.
_CANCELS_SHARE = 0.02
#: Attempts of a start: a server that it needs may be down for a while.
_MAX_START_ATTEMPTS = 10
#: Seconds between two attempts of a start.
_START_RETRY_INTERVAL_S = 1.0

T = TypeVar("T")


class FaultInjector:
    """Carries out the faults of a plan.

    `kills` counts the faults by name; `missed` those whose target was down or busy. `injected` has
    a line for each fault, with the time at which it was over.
    """

    def __init__(
        self,
        stack: LocalStack,
        users: Sequence[BenchUser],
        cancel_all: Callable[[], Awaitable[None]],
        clock: ApiClock,
    ) -> None:
        """Takes `cancel_all`, which cancels every order that works, all at once, and returns when
        that is answered."""
        self._clock = clock
        self.kills: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.injected: list[str] = []
        self._stack = stack
        self._users = users
        self._cancel_all = cancel_all
        self._busy: set[str] = set()
        #: The worker that each user was last seen with, for the time in which Valkey cannot tell.
        self._workers: dict[str, str] = {}
        self._valkey = Redis.from_url(
            stack.settings.valkey_url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=5.0,
            decode_responses=True,
        )

    def close(self) -> None:
        self._valkey.close()

    async def run(self, plan: Sequence[PlannedFault], began: float) -> None:
        """Injects each fault at its time after `began` (the loop's clock);
        returns when all is brought back.

        Raises `ServerFailed` if something could not be started again.
        """
        loop = asyncio.get_running_loop()
        under_way: list[asyncio.Task[None]] = []
        try:
            for fault in plan:
                await asyncio.sleep(began + fault.at - loop.time())
                under_way.append(asyncio.create_task(self._inject(fault, began)))
                for task in [task for task in under_way if task.done()]:
                    under_way.remove(task)
                    task.result()
            await asyncio.gather(*under_way)
        finally:
            await tasks.cancel_tasks(*under_way)

    async def _inject(self, fault: PlannedFault, began: float) -> None:
        done = await self._apply_fault(fault)
        (self.kills if done else self.missed)[f"{fault.kind} {fault.target}"] += 1
        over = asyncio.get_running_loop().time() - began
        self.injected.append(f"{fault}: {f'over at {over:.1f} s' if done else 'found no target'}")

    async def _apply_fault(self, fault: PlannedFault) -> bool:
        stack = self._stack
        match fault.target:
            case FaultTarget.WORKER | FaultTarget.SESSION | FaultTarget.SUPERVISOR:
                return await self._worker(fault)
            case FaultTarget.HOST:
                return await self._host(fault)
            case FaultTarget.BROKER_SESSION:
                return await self._broker_session(fault)
            case FaultTarget.ACCOUNT:
                return await self._reject_logins(_pick(self._users, fault.lot), fault.seconds)
            case FaultTarget.API_CLOCK:
                return self._clock.skew(_api_pids(stack.api), fault.lot)
            case FaultTarget.API_PROCESS:
                return await self._api_process(fault)
            case FaultTarget.ORCHESTRATOR:
                return await self._server(_pick(stack.orchestrators, fault.lot), fault)
            case FaultTarget.NODE:
                return await self._server(stack.node, fault)
            case FaultTarget.API:
                return await self._server(stack.api, fault)
            case FaultTarget.TEMPORAL:
                return await self._server(stack.temporal, fault)
            case FaultTarget.VALKEY:
                return await self._server(stack.valkey, fault)
            case FaultTarget.POSTGRES:
                return await self._server(stack.postgres, fault)
            case FaultTarget.EXCHANGE:
                return await self._server(stack.exchange, fault)

    # --- workers and sessions ---------------------------------------------------------------------

    async def _worker(self, fault: PlannedFault) -> bool:
        user = _pick(self._users, fault.lot)
        processes = await self._processes_of(user)
        pids: tuple[int, ...] = {
            FaultTarget.SESSION: (processes.session,),
            FaultTarget.SUPERVISOR: (processes.supervisor,),
        }.get(fault.target, processes.all)
        if not any(pids):
            return False
        if fault.kind is FaultKind.KILL:
            send_signal(signal.SIGKILL, *pids)
        else:
            await self._freeze(pids, fault.seconds)
        return True

    def _lost_with_host(self, lot: float) -> Sequence[BenchUser]:
        return self._users[int(lot * _USERS_PER_LOST_WORKER) :: _USERS_PER_LOST_WORKER]

    async def _host(self, fault: PlannedFault) -> bool:
        pids: list[int] = []
        for user in self._lost_with_host(fault.lot):
            pids += (await self._processes_of(user)).all
        if fault.kind is FaultKind.KILL:
            send_signal(signal.SIGKILL, *pids)
        else:
            await self._freeze(pids, self._stack.settings.mark_ttl + _AWAY_FACTOR * fault.seconds)
        return any(pids)

    async def _processes_of(self, user: BenchUser) -> WorkerProcesses:
        worker_id = await asyncio.to_thread(self._worker_of, user.user_id)
        return (
            await asyncio.to_thread(processes_of, worker_id)
            if worker_id
            else WorkerProcesses(0, 0, 0)
        )

    def _worker_of(self, user_id: str) -> str:
        with contextlib.suppress(RedisError):
            if mark := self._valkey.get(keys.mark(user_id)):
                self._workers[user_id] = str(mark).partition(":")[2]
        return self._workers.get(user_id, "")

    async def _broker_session(self, fault: PlannedFault) -> bool:
        user = _pick(self._users, fault.lot)
        async with ExchangeAdmin(self._stack.settings.exchange_admin_url) as exchange:
            try:
                return bool(
                    await exchange.end_sessions(
                        user.account_id, abrupt=fault.kind is FaultKind.KILL
                    )
                )
            except ExchangeUnreachable:
                return False

    async def _reject_logins(self, user: BenchUser, seconds: float) -> bool:
        """Rejects a user's logins. The clients ask for a retry when they hear of it
        (`TradingClients`)."""
        async with ExchangeAdmin(self._stack.settings.exchange_admin_url) as exchange:
            try:
                await exchange.register(
                    user.account_id, "another key", "another secret", user.user_id
                )
                await exchange.end_sessions(user.account_id)
                await asyncio.sleep(_AWAY_FACTOR * seconds)
            except ExchangeUnreachable:
                return False
            finally:
                await _retry_exchange_call(
                    partial(exchange.register, user.account_id, *user.broker_keys, user.user_id)
                )
        return True

    @staticmethod
    async def _freeze(pids: Sequence[int], seconds: float) -> None:
        send_signal(signal.SIGSTOP, *pids)
        try:
            await asyncio.sleep(seconds)
        finally:
            send_signal(signal.SIGCONT, *pids)

    # --- servers and our own processes ------------------------------------------------------------

    async def _api_process(self, fault: PlannedFault) -> bool:
        pids = _api_pids(self._stack.api)
        if not pids:
            return False
        pid = _pick(pids, fault.lot)
        if fault.kind is FaultKind.KILL:
            send_signal(signal.SIGKILL, pid)
        else:
            await self._freeze((pid,), fault.seconds)
        return True

    async def _server(self, server: Server, fault: PlannedFault) -> bool:
        if fault.kind is FaultKind.FLUSH:
            return await asyncio.to_thread(self._flush)
        if fault.kind is FaultKind.FLUSH_CANCELS:
            return await self._flush_amid_cancels(fault.seconds)
        async with self._alone(server) as free:
            if not free or not server.running:
                return False
            if fault.kind is FaultKind.LAG:
                return await self._lag(fault.seconds)
            if fault.kind is FaultKind.REWIND:
                return await self._rewind(fault)
            if fault.kind is FaultKind.STOP:
                await self._freeze((server.pid,), fault.seconds)
            else:
                how = signal.SIGKILL if fault.kind is FaultKind.KILL else signal.SIGTERM
                try:
                    await asyncio.to_thread(server.restart, how, fault.seconds)
                except ServerFailed:
                    await start_server(server)
        return True

    async def _lag(self, seconds: float) -> bool:
        """Makes Valkey forget the writes of the last `seconds`; its generation stays the same."""
        valkey = self._stack.valkey
        copy = await asyncio.to_thread(copy_valkey_log, valkey)
        if copy is None:
            return False
        await asyncio.sleep(seconds)
        await asyncio.to_thread(promote_copy, valkey, copy)
        await start_server(valkey)
        return True

    async def _rewind(self, fault: PlannedFault) -> bool:
        """Leaves the last `seconds` known to the exchange alone, whose lists show them late."""
        valkey = self._stack.valkey
        async with self._lists_lag(fault.seconds + LISTS_LAG_S) as lagging:
            copy = await asyncio.to_thread(copy_valkey_log, valkey) if lagging else None
            if copy is None:
                return False
            async with self._recorders_stopped():
                await asyncio.sleep(fault.seconds)
                for user in self._lost_with_host(fault.lot):
                    send_signal(signal.SIGKILL, *(await self._processes_of(user)).all)
                await asyncio.to_thread(promote_copy, valkey, copy)
                await start_server(valkey)
            await asyncio.sleep(LISTS_LAG_S)
        return True

    @contextlib.asynccontextmanager
    async def _lists_lag(self, seconds: float) -> AsyncIterator[bool]:
        """Makes all accounts' lists lag at least `seconds` in the block.
        False if the exchange is away."""
        async with ExchangeAdmin(self._stack.settings.exchange_admin_url) as exchange:
            before: dict[str, Behaviour] = {}
            try:
                for user in self._users:
                    behaviour = before[user.account_id] = await exchange.behaviour(user.account_id)
                    lag = max(behaviour.listing_lag_ms, int(seconds * 1000))
                    await exchange.set_behaviour(
                        user.account_id, behaviour.model_copy(update={"listing_lag_ms": lag})
                    )
                there = True
            except ExchangeUnreachable:
                there = False
            try:
                yield there
            finally:
                for account_id, behaviour in before.items():
                    await _retry_exchange_call(
                        partial(exchange.set_behaviour, account_id, behaviour)
                    )

    @contextlib.asynccontextmanager
    async def _recorders_stopped(self) -> AsyncIterator[None]:
        """Stops all orchestrators in the block: none reads what workers report."""
        async with contextlib.AsyncExitStack() as held:
            for orchestrator in self._stack.orchestrators:
                if (
                    await held.enter_async_context(self._alone(orchestrator))
                    and orchestrator.running
                ):
                    send_signal(signal.SIGSTOP, orchestrator.pid)
                    held.callback(send_signal, signal.SIGCONT, orchestrator.pid)
            yield

    async def _flush_amid_cancels(self, seconds: float) -> bool:
        """Sends all cancels at once, and flushes Valkey while they are under way."""
        cancels = asyncio.ensure_future(self._cancel_all())
        try:
            await asyncio.sleep(seconds * _CANCELS_SHARE)
            flushed = await asyncio.to_thread(self._flush)
            await cancels
        finally:
            await tasks.cancel_tasks(cancels)
        return flushed

    @contextlib.asynccontextmanager
    async def _alone(self, server: Server) -> AsyncIterator[bool]:
        """Reserves a server for the block. False if another fault has it."""
        if server.name in self._busy:
            yield False
            return
        self._busy.add(server.name)
        try:
            yield True
        finally:
            self._busy.discard(server.name)

    def _flush(self) -> bool:
        try:
            self._valkey.flushall()
        except RedisError:
            return False
        return True


async def _retry_exchange_call(call: Callable[[], Awaitable[None]]) -> None:
    """Calls the exchange, again while it is away. Raises `ExchangeUnreachable` in the end."""
    for tries_left in reversed(range(_MAX_START_ATTEMPTS)):
        try:
            await call()
        except ExchangeUnreachable:
            if not tries_left:
                raise
            await asyncio.sleep(_START_RETRY_INTERVAL_S)
        else:
            return


async def start_server(server: Server) -> None:
    """Starts a server unless it runs; again if what it needs is down.
    Raises `ServerFailed` in the end."""
    for tries_left in reversed(range(_MAX_START_ATTEMPTS)):
        try:
            if not server.running:
                await asyncio.to_thread(server.start)
        except ServerFailed:
            if not tries_left:
                raise
            await asyncio.sleep(_START_RETRY_INTERVAL_S)
        else:
            return


def _api_pids(api: Server) -> list[int]:
    """Returns the pids of the API's processes, the oldest first; none while it is down."""
    workers = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(api.pid).children() if api.running else []:
            with contextlib.suppress(psutil.Error):  # one that was killed and is not reaped yet
                if "api.processes.server" in child.cmdline():
                    workers.append((child.create_time(), child.pid))
    return [pid for _, pid in sorted(workers)]


def _pick(choices: Sequence[T], lot: float) -> T:
    return choices[int(lot * len(choices))]
