"""The chaos run on orders: clients trade while faults are injected; then everything settles."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from infra.database.engine import Database
from infra.exchange.behaviour import Behaviour, FaultPlan, FaultPoint, FillMode
from infra.exchange.client import ExchangeAdmin
from infra.exchange.market import PriceWalk
from infra.lab.chaos.orders import books
from infra.lab.chaos.orders.api_clock import ApiClock
from infra.lab.chaos.orders.books import Books
from infra.lab.chaos.orders.client import ClientOrder, TradingClients, open_http_client
from infra.lab.chaos.orders.followups import SignalHook
from infra.lab.chaos.orders.injector import FaultInjector, start_server
from infra.lab.chaos.orders.schedule import PlannedFault
from infra.lab.chaos.orders.shapes import SYMBOLS, OrderShape
from infra.lab.figures import Say
from infra.lab.rest import RequestFailed, RestConnection
from infra.lab.target import BenchUser, Target
from infra.local.process import ServerFailed

#: Share of the exchange's calls that have a fault.
#: Logins have fewer: each lost one costs a whole connect.
FAULT_RATE = 0.02
_FAULT_RATES = {
    FaultPoint.LOST_LOGIN: 0.005,
    FaultPoint.LOST_PONG: 0.01,
    FaultPoint.EVENT_GAP: 0.005,
}
#: Workers that are started at the same time, before the first fault.
_MAX_CONCURRENT_STARTS = 6
#: Seconds between two counts of the orders that are not settled.
_POLL_INTERVAL_S = 0.5
#: A fault takes a thread while it starts a server.
_MAX_THREADS = 24


@dataclass(frozen=True, kw_only=True)
class OrderChaosRun:
    """Says what a run does.

    `patience`: seconds in which a client tries to get an answer to one order. `settle`: seconds in
    which everything settles at the end. `broker` shioaji: its stand-in, which changes orders a
    while after it has answered.
    """

    seed: int
    plan: Sequence[PlannedFault]
    shapes: Sequence[OrderShape]
    patience: float
    settle: float
    broker: str = "paper"


@dataclass(frozen=True, kw_only=True)
class ChaosOutcome:
    """Holds what a run left behind."""

    books: Books
    placed: Sequence[ClientOrder]
    kills: dict[str, int]
    missed: dict[str, int]
    injected: Sequence[str]
    counts: dict[str, int]
    settle_s: float


def start_workers(target: Target, users: Sequence[BenchUser]) -> None:
    """Starts every user's worker. Raises `ServerFailed` when one does not become Active."""

    def one(user: BenchUser) -> None:
        until = time.monotonic() + 60.0
        while True:
            connection = RestConnection(target.api_url, user.api_key)
            try:
                connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
                return
            except RequestFailed as error:
                if time.monotonic() > until:
                    raise ServerFailed(
                        f"the worker of {user.user_id} did not start: {error}"
                    ) from error
            finally:
                connection.close()

    with ThreadPoolExecutor(max_workers=_MAX_CONCURRENT_STARTS) as threads:
        list(threads.map(one, users))


def make_hooks(target: Target, users: Sequence[BenchUser]) -> dict[str, SignalHook]:
    """Makes a webhook for each user's signals; returns them by user id."""
    hooks = {}
    for user in users:
        connection = RestConnection(target.api_url, user.api_key)
        try:
            body = {
                "account_id": user.account_id,
                "quantity_unit": "lots",
                "entry_mode": "delta",
                "window_s": 3600,
            }
            made = connection.call("POST", f"/v1/users/{user.user_id}/webhooks", body)
            hooks[user.user_id] = SignalHook(made["path"], made["secret"])
        finally:
            connection.close()
    return hooks


async def run_chaos(
    target: Target,
    users: Sequence[BenchUser],
    chaos: OrderChaosRun,
    clock: ApiClock,
    say: Say,
    hooks: Mapping[str, SignalHook] | None = None,
) -> ChaosOutcome:
    """Trades and injects faults, then waits until all is settled.

    Raises `ServerFailed` when something that was killed cannot be started again.
    """
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(max_workers=_MAX_THREADS))
    exchange_url = target.settings.exchange_admin_url
    async with ExchangeAdmin(exchange_url) as exchange:
        prices = {symbol: await exchange.price(symbol) for symbol in SYMBOLS}
        await _inject_exchange_faults(exchange, users, chaos)
    async with open_http_client(target.api_url) as http:
        clients = TradingClients(
            http,
            chaos.seed,
            users,
            prices,
            operator_key=target.stack.admin_key,
            patience=chaos.patience,
            hooks=hooks,
        )
        injector = FaultInjector(target.stack, users, clients.cancel_working, clock)
        try:
            say("chaos: orders flow, faults are injected")
            began = loop.time()
            async with asyncio.TaskGroup() as group:
                group.create_task(injector.run(chaos.plan, began))
                group.create_task(clients.run(chaos.shapes, began))
            say("chaos: over; everything is started again")
            await _restore(target, users, clients)
            settled = await _wait_until_settled(target, chaos.settle, say)
            database = Database(target.settings.database_url, pool_size=1)
            try:
                read = await books.read_books(
                    database, exchange_url, tags_only=chaos.broker != "paper"
                )
            finally:
                await database.close()
            return ChaosOutcome(
                books=read,
                placed=clients.placed,
                kills=dict(injector.kills),
                missed=dict(injector.missed),
                injected=injector.injected,
                counts=dict(clients.counts),
                settle_s=settled,
            )
        finally:
            injector.close()


async def _inject_exchange_faults(
    exchange: ExchangeAdmin, users: Sequence[BenchUser], chaos: OrderChaosRun
) -> None:
    """Switches on all faults of the exchange, prices that move, and accounts of different kinds."""
    seed = chaos.seed
    chance = random.Random(f"accounts {seed}")  # noqa: S311 - how an account behaves is no secret
    rates = {point: _FAULT_RATES.get(point, FAULT_RATE) for point in FaultPoint}
    await exchange.set_fault_plan(FaultPlan(seed=seed, rates=rates))
    await exchange.set_walk(PriceWalk(seed=seed, every_ms=500, step=0.01))
    modes = (FillMode.IMMEDIATE, FillMode.IMMEDIATE, FillMode.DELAYED, FillMode.GRADUAL)
    for user in users:
        behaviour = Behaviour(
            fill=chance.choice(modes),
            fill_delay_ms=chance.randint(20, 300),
            latency_ms=chance.randint(0, 20),
            reject_rate=0.01,
            late_ack_ms=chance.randint(200, 8000),
            events_without_tag=chance.random() < 0.3,
            listing_lag_ms=chance.choice((0, 0, 500, 2000)),
            change_delay_ms=chance.randint(300, 1400) if chaos.broker == "shioaji" else 0,
        )
        await exchange.set_behaviour(user.account_id, behaviour)


async def _restore(target: Target, users: Sequence[BenchUser], clients: TradingClients) -> None:
    """Starts everything, ends all faults and the trading day,
    and takes every user out of parking."""
    for server in target.stack.servers:
        await start_server(server)
    async with ExchangeAdmin(target.settings.exchange_admin_url) as exchange:
        await exchange.set_fault_plan(FaultPlan())
        await exchange.set_walk(PriceWalk())
        for user in users:
            await exchange.set_behaviour(user.account_id, Behaviour())
        await exchange.close_day()
    for user in users:
        await clients.resume(user)
        await clients.retry_login(user)


async def _wait_until_settled(target: Target, patience: float, say: Say) -> float:
    """Waits at most `patience` seconds until every order is final or on a person's list.

    Returns how long it took.
    """
    began = time.monotonic()
    database = Database(target.settings.database_url, pool_size=1)
    try:
        while (
            unsettled := await books.count_unsettled(database)
        ) and time.monotonic() - began < patience:
            say(f"chaos: over; {unsettled} orders are not settled yet")
            await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        await database.close()
    return time.monotonic() - began
