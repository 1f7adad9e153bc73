"""Parts that are away for a while: who trades continues to trade, who crashed is replaced when they
are back.

The short form is away for `AWAY` seconds (BERTH_OUTAGE_SECONDS). Nothing in the mechanism knows how
long it was: ends of workers wait in the node's log until an orchestrator asks for what came after
its last position, events of workers wait in Valkey's stream until the relay's group has
acknowledged them, and workflows wait in Temporal. So ten minutes differ from five seconds in one
thing: orders that were accepted meanwhile for a worker that had crashed end as expired, because an
order is never sent late. No time limit of the system lies between five seconds and twenty: a mark
lives 30 s, and an order has 30 s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from infra.local.process import Server
from tests.support.chaos.ledger_judge import violations
from tests.support.chaos.order_stream import OrderStream, wait_filled
from tests.support.systems.local import RunningSystem, Trader, until

AWAY = float(os.environ.get("BERTH_OUTAGE_SECONDS", "5"))
#: Users that trade on, and users whose workers are killed meanwhile.
STEADY, CRASHED = 3, 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200 + 2 * AWAY)]


def _judge(system: RunningSystem, streams: list[OrderStream]) -> None:
    for stream in streams:
        answers = {answer.order_id: answer for answer in stream.settle().values()}
        assert (
            violations(system.sessions(stream.trader), system.ledger(stream.trader), answers) == []
        )
        stream.close()


@contextlib.contextmanager
def _flowing(system: RunningSystem, traders: list[Trader]) -> Iterator[list[OrderStream]]:
    """An order stream for each of them; nobody is left without a fill before it begins."""
    streams = [OrderStream(system.stack.api_url, trader, pause=0.2) for trader in traders]
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(stream)
        for stream in streams:
            wait_filled(stream, 0.0)
        yield streams


@pytest.mark.parametrize("part", ["orchestrator", "temporal"])
def test_workers_that_crash_while_a_part_is_away_are_replaced_when_it_returns(
    system: RunningSystem, part: str
) -> None:
    traders = [system.trader() for _ in range(STEADY + CRASHED)]
    workers = {trader.user_id: system.start_until_active(trader)["worker_id"] for trader in traders}
    steady, crashed = traders[:STEADY], traders[STEADY:]
    server: Server = getattr(system.stack, part)
    with _flowing(system, traders) as streams:
        server.stop()
        try:
            for trader in crashed:
                system.kill_worker(workers[trader.user_id])
            threading.Event().wait(AWAY)
            before = [len(stream.fills) for stream in streams[:STEADY]]
            until(
                lambda: all(
                    len(s.fills) > n for s, n in zip(streams[:STEADY], before, strict=True)
                ),
                "orders that are filled while the part is away",
            )
        finally:
            server.start()
        for trader in crashed:
            until(
                lambda trader=trader: len(system.open_sessions(trader)) == 1,  # type: ignore[misc]
                f"new login of {trader.user_id}",
                90,
            )
    for trader in steady:  # no-healthy-kill
        assert len(system.sessions(trader)) == 1
    for trader in crashed:
        assert system.start_until_active(trader)["worker_id"] != workers[trader.user_id]
    for stream in streams:
        until(lambda stream=stream: stream.place(), "order after the outage")  # type: ignore[misc]
    _judge(system, streams)


class Load:
    """Commands of other users, one after the other in threads, until it is left. Counts what was
    done."""

    def __init__(self, system: RunningSystem) -> None:
        self.system = system
        self.done = {"starts": 0, "stops": 0, "reloads": 0}
        self.wrong: list[str] = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(act,)) for act in (self._life, self._reload)
        ]
        self._keys = itertools.count(1)

    def __enter__(self) -> Load:
        self._reloading = self.system.trader()
        self.system.start_until_active(self._reloading)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()

    def goes_on(self) -> None:
        """Returns when one more command of each kind has been carried out, or one has failed."""
        before = dict(self.done)
        until(
            lambda: self.wrong or all(self.done[name] > count for name, count in before.items()),
            "commands that are carried out",
            90,
        )

    def _repeat(self, act: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                act()
            except (AssertionError, httpx.HTTPError) as error:
                self.wrong.append(f"{act.__name__}: {error!r}")

    def _life(self) -> None:
        """A claim, an order, a stop: none of them may be lost."""
        system = self.system
        trader = system.trader()
        answer = system.begin(trader).result(60)
        assert answer.status_code == 200, answer.text
        self.done["starts"] += 1
        order = system.order(trader)
        assert order.status_code == 201, order.text
        stopped = system.call(
            "POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key, json={}
        )
        assert stopped.status_code == 202, stopped.text
        until(lambda: not system.open_sessions(trader), "end of the stopped worker")
        self.done["stops"] += 1

    def _reload(self) -> None:
        """New credentials; the session that was opened with them must appear."""
        system, trader = self.system, self._reloading
        before = {session.session_id for session in system.sessions(trader)}
        key = f"key-{next(self._keys)}"
        system.exchange(lambda admin: admin.register(trader.account_id, key, key, trader.user_id))
        path = f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/credentials"
        body = {"broker": "paper", "api_key": key, "secret_key": key}
        stored = system.call("PUT", path, trader.api_key, json=body)
        assert stored.json()["reload_signalled"], stored.text

        def reloaded() -> bool:
            now = {session.session_id for session in system.open_sessions(trader)}
            return bool(now - before) and not now & before

        until(reloaded, "session with the new credentials")
        self.done["reloads"] += 1


@pytest.mark.drill
def test_orchestrators_restarted_in_turn_under_load_lose_no_command(system: RunningSystem) -> None:
    second = system.stack.add_orchestrator()
    second.start()
    traders = [system.trader() for _ in range(STEADY)]
    try:
        with Load(system) as load, _flowing(system, traders) as streams:
            for orchestrator in (system.stack.orchestrator, second):
                orchestrator.stop()
                load.goes_on()
                orchestrator.start()
                load.goes_on()
    finally:
        second.stop()
        system.stack.orchestrators.remove(second)
    assert load.wrong == []
    for trader in traders:  # no-healthy-kill
        assert len(system.sessions(trader)) == 1
        assert system.start_until_active(trader)["state"] == "Active"
    _judge(system, streams)
