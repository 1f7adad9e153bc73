"""A client on the wire sees all that admin calls can set."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import httpx
import pytest

from infra.exchange.behaviour import Behaviour, FaultPlan, FaultPoint
from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.exchange.hours import ExchangeMaintenance
from infra.exchange.limits import ExchangeLimits
from infra.exchange.market import PriceWalk
from infra.exchange.records import IncidentKind, LimitOwnerKind
from tests.support.brokers.exchange_wire import PLACE, ExchangeWire, log_in, register
from worker_runtime.protocol.errors import UnknownAccount

LIMIT = {**PLACE, "symbol": "9904", "price_type": "LMT", "price": "90", "time_in_force": "ROD"}


async def _behave(server: ExchangeServer, account: str, *faults: FaultPoint) -> None:
    async with ExchangeAdmin(server.admin_url) as admin:
        await admin.set_behaviour(account, Behaviour(faults=dict.fromkeys(faults, 1)))


async def _resting(server: ExchangeServer, wire: ExchangeWire) -> str:
    async with ExchangeAdmin(server.admin_url) as admin:
        await admin.set_price("9904", Decimal(100))
    return str(wire.ask(**{**LIMIT, "id": 2})["order"]["broker_order_id"])


@pytest.mark.parametrize("op", ["cancel", "replace"])
async def test_a_change_may_get_lost_before_or_after_it_is_done(
    server: ExchangeServer, op: str
) -> None:
    await register(server, op)
    with ExchangeWire(server) as wire:
        log_in(wire, op)
        order = await _resting(server, wire)
        change = {
            "op": op,
            "broker_order_id": order,
            **({"price": "80"} if op == "replace" else {}),
        }
        await _behave(server, op, FaultPoint.LOST_CHANGE)
        wire.send_one(**change, id=3)
        assert wire.ask(op="ping", id=4)["id"] == 4
        assert _shown(wire) == ("submitted", "90")
        await _behave(server, op, FaultPoint.LOST_CHANGE_ACK)
        wire.send_one(**change, id=6)
        assert wire.receive()["kind"] == "order_changed"
        assert wire.ask(op="ping", id=7)["id"] == 7
        assert _shown(wire) == (("cancelled", "90") if op == "cancel" else ("submitted", "80"))


def _shown(wire: ExchangeWire) -> tuple[str, str]:
    [order] = wire.ask(op="list_orders", id=5)["orders"]
    return order["state"], order["price"]


async def test_the_line_may_break_in_a_change_that_is_done(server: ExchangeServer) -> None:
    await register(server, "breaks")
    with ExchangeWire(server) as wire:
        log_in(wire, "breaks")
        order = await _resting(server, wire)
        await _behave(server, "breaks", FaultPoint.DROP_IN_CHANGE)
        wire.send_one(op="cancel", id=3, broker_order_id=order)
        while not wire.closed():
            continue
    async with ExchangeAdmin(server.admin_url) as admin:
        assert [kept.state for kept in await admin.ledger("breaks")] == ["cancelled"]


@pytest.mark.parametrize("op", ["list_orders", "list_positions", "get_balance"])
async def test_a_question_may_stay_without_answer_or_break_the_line(
    server: ExchangeServer, op: str
) -> None:
    await register(server, op)
    with ExchangeWire(server) as wire:
        log_in(wire, op)
        await _behave(server, op, FaultPoint.LOST_QUERY)
        wire.send_one(op=op, id=2)
        assert wire.ask(op="ping", id=3)["id"] == 3
        assert wire.ask(op=op, id=4)["error"] is None
        await _behave(server, op, FaultPoint.DROP_IN_QUERY)
        wire.send_one(op=op, id=5)
        assert wire.closed()


async def test_a_ban_has_a_code_and_is_in_the_ledger(server: ExchangeServer) -> None:
    await register(server, "busy")
    async with ExchangeAdmin(server.admin_url) as admin:
        await admin.set_limits(ExchangeLimits(orders=2, suspend_after=1))
        with ExchangeWire(server, source="127.0.0.2") as wire:
            log_in(wire, "busy")
            codes = [wire.ask_reply(**{**PLACE, "id": number})["error"] for number in (2, 3, 4)]
            assert codes == [None, None, "RATE_LIMITED"]
            assert wire.receive() == {"kind": "session_ended", "reason": "the person is suspended"}
        with ExchangeWire(server) as wire:
            reply = wire.ask(
                op="login", id=1, account="busy", api_key="key", secret_key="canary-secret-key"
            )
            assert reply["error"] == "LOGIN_REJECTED"
        bans = await admin.incidents(IncidentKind.BANNED)
        assert [(ban.owner_kind, ban.owner, ban.cause) for ban in bans] == [
            (LimitOwnerKind.PERSON, "busy", "orders")
        ]
        suspended = await admin.incidents(IncidentKind.SUSPENDED)
        assert {incident.owner for incident in suspended} == {"busy", "127.0.0.2"}
        assert await admin.incidents(since_ms=suspended[-1].at_ms + 60_000) == []
        for incident in suspended:
            await admin.lift(incident.owner_kind, incident.owner)
        await admin.set_limits(ExchangeLimits())
        assert await admin.limits() == ExchangeLimits()
        assert len(await admin.ledger("busy")) == 2
        [session] = await admin.sessions("busy")
        assert session.address == "127.0.0.2"
    with ExchangeWire(server, source="127.0.0.2") as wire:
        log_in(wire, "busy")


async def test_maintenance_has_a_code_of_its_own(server: ExchangeServer) -> None:
    await register(server, "early")
    async with ExchangeAdmin(server.admin_url) as admin:
        with ExchangeWire(server) as wire, ExchangeWire(server) as late:
            log_in(wire, "early")
            await admin.begin_maintenance(60, ends_sessions=False)
            for request in ({**PLACE, "id": 2}, {"op": "list_orders", "id": 3}):
                assert wire.ask(**request)["error"] == "BROKER_MAINTENANCE"
            assert wire.ask(op="ping", id=4)["error"] is None
            login = {"op": "login", "id": 1, "account": "early", "api_key": "key"}
            assert (
                late.ask(**login, secret_key="canary-secret-key")["error"] == "BROKER_MAINTENANCE"
            )
            await admin.end_maintenance()
            assert wire.ask_reply(**{**PLACE, "id": 5})["error"] is None
            await admin.announce_maintenance(ExchangeMaintenance(begin_ms=1, end_ms=2**60))
            assert wire.last()["reason"] == "maintenance begins"
            await admin.end_maintenance()


async def test_a_fault_plan_repeats_itself(server: ExchangeServer) -> None:
    await register(server, "planned")
    plan = FaultPlan(seed=5, rates={FaultPoint.LOST_PONG: 0.5})
    courses = []
    async with ExchangeAdmin(server.admin_url) as admin:
        for _ in range(2):
            await admin.set_fault_plan(plan, "planned")
            with ExchangeWire(server) as wire:
                log_in(wire, "planned")
                for number in range(2, 42):
                    wire.send_one(op="ping", id=number)
                wire.send_one(op="logout", id=42)
                answered: list[int] = []
                while not answered or answered[-1] != 42:
                    answered.append(wire.receive()["id"])
                courses.append(answered)
        assert courses[0] == courses[1]
        assert 10 < len(courses[0]) < 31
        await admin.set_fault_plan(FaultPlan())
        with pytest.raises(UnknownAccount):
            await admin.set_fault_plan(plan, "nobody")


async def test_the_market_walks_and_the_day_ends_by_admin_calls(server: ExchangeServer) -> None:
    await register(server, "rests")
    with ExchangeWire(server) as wire:
        log_in(wire, "rests")
        order = await _resting(server, wire)
        async with ExchangeAdmin(server.admin_url) as admin:
            assert await admin.close_day() >= 1
            assert wire.receive()["order"]["state"] == "expired"
            [kept] = [row for row in await admin.ledger("rests") if row.broker_order_id == order]
            assert kept.state == "expired"
            before = await admin.price("9904")
            await admin.set_walk(PriceWalk(every_ms=5, step=0.01))
            while await admin.price("9904") == before:
                continue
            await admin.set_walk(PriceWalk())


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/limits", {"orders": -1}),
        ("PUT", "/limits", {"order": 1}),
        ("PUT", "/fault-plan", {"rates": {"lost_ack": 2}}),
        ("PUT", "/market/walk", {"step": 7}),
        ("POST", "/maintenance", {}),
        ("POST", "/incidents/lift", {"owner_kind": "dog", "owner": "x"}),
    ],
)
async def test_a_mistyped_admin_call_is_refused(
    server: ExchangeServer, method: str, path: str, body: dict[str, object]
) -> None:
    async with httpx.AsyncClient(base_url=server.admin_url, trust_env=False) as http:
        assert (await http.request(method, path, json=body)).status_code == 422


async def test_limits_are_options_of_the_command_line(tmp_path: Path) -> None:
    request_limits = ("--orders-per-10s", "7", "--queries-per-5s", "6", "--logins-per-day", "5")
    session_limits = (
        "--connections-per-person",
        "4",
        "--session-life",
        "3",
        "--day-closes",
        "13:30",
        "--walk-ms",
        "50",
    )
    with ExchangeServer(tmp_path, options=(*request_limits, *session_limits)) as server:
        async with ExchangeAdmin(server.admin_url) as admin:
            assert await admin.limits() == ExchangeLimits(
                orders=7, queries=6, logins_per_day=5, connections_per_person=4, session_life_s=3
            )


@pytest.mark.parametrize(
    "wrong", [["--orders-per-10s", "-1"], ["--walk-step", "7"], ["--day-closes", "noon"]]
)
def test_a_wrong_option_is_a_clear_error(tmp_path: Path, wrong: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infra.exchange", "--ledger", str(tmp_path / "l.db"), *wrong],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
