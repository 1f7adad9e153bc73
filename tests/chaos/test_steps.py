"""A process is killed at every single step of an order's way, and the exchange's ledger is the
judge."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from activities.orders.sweeper import LEASE_S
from infra.database.engine import Database
from infra.database.orders import acceptance
from infra.exchange.behaviour import Behaviour, FillMode
from infra.lab.chaos.orders import books
from infra.lab.chaos.orders.client import ClientOrder
from infra.lab.chaos.orders.judge import OrderVerdict, judge_orders
from infra.local.process import HOST, ServerFailed
from infra.local.servers import PostgresServer
from infra.local.stack import DATABASE, LocalStack
from infra.market.calendar import HOME_ZONE
from tests.support.chaos.kill_steps import BRIEF, STEPS, KillStep, Mine, Way
from tests.support.proxies.kill_points import KillPoint, KillPointProxies, ServerLine
from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.protocol import keys

#: The first test pays for all of it: the steps of this run are kill_run at the same time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

T = TypeVar("T")

log = logging.getLogger(__name__)

TRADERS = 11
#: Seconds, of which everything has some on a slow machine.
SETTLE = 120.0
#: Seconds in which a process reaches the kill point once its order is on its way. Sweepers are
#: killed, too, and the next one waits for the lease to end.
REACH_TIMEOUT_S = {
    Way.PLACED: 5.0,
    Way.FILLED_LATER: 15.0,
    Way.LEFT: 15.0 + LEASE_S,
    Way.LATE: 20.0 + LEASE_S,
    Way.JOURNALED: 20.0 + LEASE_S,
    Way.CANCELLED: 5.0,
    Way.REPLACED: 5.0,
}
#: Of an order that works at the broker until it is taken back, and what its client changes it to.
RESTS = {"price_type": "LMT", "price": "100", "time_in_force": "ROD"}
NEW_PRICE = "101"
ATTEMPTS = 10
SHORT: dict[str, Any] = {
    "mark_ttl": 10.0,
    "mark_period": 1.0,
    "connect_timeout": 5.0,
    "order_deadline": 60.0,
    "sweep_period": 0.2,
    "absent_after": 2.0,
}


@dataclass(frozen=True)
class StepOutcome:
    """What happened when the kill point of one step was set."""

    reached: bool
    order_id: str
    placed: ClientOrder | None


@dataclass(frozen=True)
class KillRunResult:
    scenarios: dict[str, StepOutcome]
    books: books.Books
    verdict: OrderVerdict


class KillRun:
    """The chosen steps on one system: each trader goes through some, one after the other."""

    def __init__(
        self, stack: LocalStack, proxies: KillPointProxies, chosen: Sequence[KillStep]
    ) -> None:
        self._chosen = chosen
        self._system = RunningSystem(stack)
        self._stack = stack
        self._proxies = proxies
        self._over = threading.Event()

    def run(self) -> KillRunResult:
        keeper = threading.Thread(target=self._keep, name="keeper")
        keeper.start()
        try:
            traders = [self._system.trader() for _ in range(TRADERS)]
            with ThreadPoolExecutor(max_workers=TRADERS) as threads:
                list(threads.map(self._make_ready, traders))  # all of them, before the first kill
                shares = threads.map(self._share, traders, range(TRADERS))
                scenarios = {name: scenario for share in shares for name, scenario in share.items()}
            settled = self._settled()
        finally:
            self._over.set()
            keeper.join()
            self._system.threads.shutdown()
        placed = [scenario.placed for scenario in scenarios.values() if scenario.placed is not None]
        return KillRunResult(scenarios, settled, judge_orders(settled, placed))

    def _keep(self) -> None:
        """Starts killed orchestrators again, as a supervisor of services does."""
        while not self._over.wait(0.05):
            for orchestrator in self._stack.orchestrators:
                with contextlib.suppress(ServerFailed):  # the next check starts it
                    if not orchestrator.running:
                        orchestrator.start()

    def _make_ready(self, trader: Trader) -> None:
        self._system.start_until_active(trader)
        self._until_answered(trader, "WARMUP", 1)  # from now on Valkey knows all scripts

    def _share(self, trader: Trader, number: int) -> dict[str, StepOutcome]:
        return {step.name: self._scenario(trader, step) for step in self._chosen[number::TRADERS]}

    def _scenario(self, trader: Trader, step: KillStep) -> StepOutcome:
        """Tries another order if the first one went another way: other kill points end the same
        processes at the same time, and then a sweeper may queue what the API would have queued."""
        for attempt in range(ATTEMPTS):
            mine = Mine(trader.user_id, f"STEP{STEPS.index(step):02}T{attempt}")
            kill_point, order_id, placed = self._begin(trader, step, mine)
            scenario = StepOutcome(
                kill_point.reached.wait(REACH_TIMEOUT_S[step.way]), order_id, placed
            )
            self._proxies.disarm(kill_point)
            if scenario.reached:
                break
        log.info("%s: attempt %d, reached: %s", step.name, attempt + 1, scenario.reached)
        return scenario

    def _begin(
        self, trader: Trader, step: KillStep, mine: Mine
    ) -> tuple[KillPoint, str, ClientOrder | None]:
        if step.way is Way.PLACED:
            kill_point = self._proxies.arm(step.kill_point(mine))
            placed = self._until_answered(trader, mine.symbol, step.quantity)
            return kill_point, placed.order_id, placed
        if step.way is Way.FILLED_LATER:
            return self._filled_later(trader, mine, step)
        if step.way in (Way.CANCELLED, Way.REPLACED):
            return self._changed(trader, mine, step)
        kill_point, order_id = asyncio.run(self._left(trader, mine, step))
        return kill_point, str(order_id), None

    def _filled_later(
        self, trader: Trader, mine: Mine, step: KillStep
    ) -> tuple[KillPoint, str, ClientOrder]:
        """Fills the order by hand once its kill point is set, which needs the order's id, and once
        what came before is written: another order's fill would be taken for its own."""
        by_hand = Behaviour(fill=FillMode.MANUAL)
        self._system.exchange(lambda admin: admin.set_behaviour(trader.account_id, by_hand))
        placed = self._until_answered(trader, mine.symbol, step.quantity)
        until(
            lambda: (self._shown(trader, placed) or {}).get("state") == "submitted",
            "order that works",
        )
        [listed] = [
            entry for entry in self._system.ledger(trader) if entry.client_note == placed.order_id
        ]
        kill_point = self._proxies.arm(
            step.kill_point(replace(mine, order_id=uuid.UUID(placed.order_id)))
        )
        self._system.exchange(lambda admin: admin.fill(listed.broker_order_id))
        return kill_point, placed.order_id, placed

    def _changed(
        self, trader: Trader, mine: Mine, step: KillStep
    ) -> tuple[KillPoint, str, ClientOrder]:
        """Sets the kill point once the order works. Its client cancels it in the end."""
        never = Behaviour(fill=FillMode.NEVER)
        self._system.exchange(lambda admin: admin.set_behaviour(trader.account_id, never))
        placed = self._until_answered(trader, mine.symbol, step.quantity, **RESTS)
        until(
            lambda: (self._shown(trader, placed) or {}).get("state") == "submitted",
            "order that works",
        )
        [listed] = [
            entry for entry in self._system.ledger(trader) if entry.client_note == placed.order_id
        ]
        mine = replace(
            mine, order_id=uuid.UUID(placed.order_id), broker_order_id=listed.broker_order_id
        )
        kill_point = self._proxies.arm(step.kill_point(mine))
        if step.way is Way.REPLACED:
            shown = self._until_done(trader, placed, "replace", price=NEW_PRICE)
            [listed] = [
                entry
                for entry in self._system.ledger(trader)
                if entry.client_note == placed.order_id
            ]
            assert listed.price == Decimal(shown["price"])
        self._until_done(trader, placed, "cancel")
        return kill_point, placed.order_id, placed

    def _until_done(
        self, trader: Trader, placed: ClientOrder, verb: str, **body: str
    ) -> dict[str, Any]:
        """The order as the answer shows it at last; the same request until it is done, or came to
        nothing."""
        body = {"request_id": verb, **body}
        return until(
            lambda: self._shown(trader, placed, f"/{verb}", json=body),
            f"{verb} of {placed.order_id}",
            150.0,
        )

    def _shown(
        self, trader: Trader, placed: ClientOrder, verb: str = "", **how: Any
    ) -> dict[str, Any] | None:
        """The order as the API shows it; None if it does not, or not yet."""
        path = f"/v1/orders/{placed.order_id}{verb}"
        try:
            answer = self._system.call("POST" if verb else "GET", path, trader.api_key, **how)
            shown: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError):
            return None
        if shown.get("code") == "CHANGE_UNCONFIRMED":
            told: dict[str, Any] = shown["order"]
            return told
        return shown if answer.status_code == 200 else None

    def _until_answered(
        self, trader: Trader, symbol: str, quantity: int, **shape: str
    ) -> ClientOrder:
        """As a careful client does it: the same order under the same id until an answer tells of
        it."""
        placed = ClientOrder(
            client_order_id=uuid.uuid4().hex,
            user_id=trader.user_id,
            account_id=trader.account_id,
            quantity=quantity,
        )

        def answered() -> bool:
            try:
                answer = self._system.order(
                    trader, placed.client_order_id, symbol=symbol, quantity=quantity, **shape
                ).json()
            except (httpx.HTTPError, ValueError):
                return False
            view = answer if "state" in answer else answer.get("order")
            if view:
                placed.record_answer(view)
            return bool(view)

        until(answered, f"answer to the order of {symbol}", 150.0)
        return placed

    async def _left(
        self, trader: Trader, mine: Mine, step: KillStep
    ) -> tuple[KillPoint, uuid.UUID]:
        """A row of an order, as an API process leaves it that dies right after; no sweeper sees it
        before the kill point is set."""
        with self._system.valkey() as client:
            generation = client.get("berth:generation")
        assert isinstance(generation, bytes)
        now = datetime.now(UTC)
        new = acceptance.NewOrder(
            user_id=trader.user_id,
            account_id=trader.account_id,
            client_order_id=uuid.uuid4().hex,
            fingerprint="f",
            symbol=mine.symbol,
            side="buy",
            quantity=1,
            price_type="MKT",
            price=None,
            time_in_force="IOC",
            generation=generation.decode(),
            lifetime_s=90.0 if step.way is Way.LEFT else 0.01,
            trading_day=now.astimezone(HOME_ZONE).date(),
        )

        async def accepted(database: Database) -> tuple[KillPoint, uuid.UUID]:
            async with database.session() as session:
                order_id = (await acceptance.accept_order(session, new)).order.id
                if step.way is Way.JOURNALED:
                    with self._system.valkey() as client:
                        client.set(keys.journal(trader.user_id, str(order_id)), "1")
                return self._proxies.arm(
                    step.kill_point(replace(mine, order_id=order_id))
                ), order_id

        return await self._ask(accepted)

    def _settled(self) -> books.Books:
        """Both sides' books when no order is open any more, or when the time for that is over."""
        asyncio.run(self._ask(self._until_settled))
        url = self._stack.settings.exchange_admin_url
        return asyncio.run(self._ask(lambda database: books.read_books(database, url)))

    async def _until_settled(self, database: Database) -> None:
        end = time.monotonic() + SETTLE
        while await books.count_unsettled(database) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    async def _ask(self, question: Callable[[Database], Awaitable[T]]) -> T:
        database = Database(self._stack.settings.database_url, pool_size=1)
        try:
            return await question(database)
        finally:
            await database.close()


@pytest.fixture(scope="module")
def kill_run(request: pytest.FixtureRequest) -> Iterator[KillRunResult]:
    """What became of the steps that this run asks for."""
    chosen: list[Any] = [
        item.callspec.params["step"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    ]
    folder = Path(tempfile.mkdtemp(prefix="berth-steps-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    try:
        with KillPointProxies() as proxies, _stack(folder, proxies) as stack:
            yield KillRun(stack, proxies, chosen).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stack(folder: Path, proxies: KillPointProxies) -> LocalStack:
    """All of ours reach the servers over the proxies."""
    near = {line: f"{HOST}:{port}" for line, port in proxies.ports.items()}
    stack = LocalStack(
        folder,
        pool_target=4,
        orchestrators=2,
        valkey_url=f"redis://{near[ServerLine.VALKEY]}/0",
        temporal_address=near[ServerLine.TEMPORAL],
        exchange_address=near[ServerLine.EXCHANGE],
        database_url=f"postgresql+asyncpg://{PostgresServer.user}@{near[ServerLine.POSTGRES]}/{DATABASE}",
        **SHORT,
    )
    listens = {"exchange_address": f"{HOST}:{stack.exchange.port}"}
    stack.exchange.settings = stack.exchange.settings.model_copy(update=listens)
    servers = {
        ServerLine.VALKEY: stack.valkey,
        ServerLine.POSTGRES: stack.postgres,
        ServerLine.TEMPORAL: stack.temporal,
        ServerLine.EXCHANGE: stack.exchange,
    }
    proxies.targets = {line: server.port for line, server in servers.items()}
    return stack


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in BRIEF else pytest.mark.drill, id=step.name)
        for step in STEPS
    ],
)
def test_an_order_survives_a_kill_at_this_step(kill_run: KillRunResult, step: KillStep) -> None:
    scenario = kill_run.scenarios[step.name]
    assert scenario.reached, f"nobody came to: {step.name}"
    assert scenario.order_id
    [row] = [order for order in kill_run.books.ours if order.order_id == scenario.order_id]
    assert row.attention or row.state in {"filled", "cancelled", "rejected", "expired"}, row
    harms = [
        finding for finding in kill_run.verdict.findings if finding.order_id == scenario.order_id
    ]
    assert harms == [], row


def test_no_step_harmed_any_order(kill_run: KillRunResult) -> None:
    assert kill_run.verdict.findings == ()
    assert kill_run.verdict.unsettled == 0
    assert kill_run.verdict.attention == 0
