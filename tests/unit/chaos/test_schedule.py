"""A seed decides which faults come when, and what is ordered."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

from infra.lab.chaos.orders import schedule, shapes
from infra.lab.chaos.orders.schedule import FaultKind, FaultTarget
from infra.lab.chaos.orders.shapes import FollowUp
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce

OWN = {
    FaultTarget.WORKER,
    FaultTarget.SESSION,
    FaultTarget.SUPERVISOR,
    FaultTarget.NODE,
    FaultTarget.API_PROCESS,
    FaultTarget.API,
    FaultTarget.ORCHESTRATOR,
    FaultTarget.BROKER_SESSION,
}


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert schedule.plan_faults(7, 300.0) == schedule.plan_faults(7, 300.0)
    assert schedule.plan_faults(7, 300.0) != schedule.plan_faults(8, 300.0)


def test_one_of_our_own_processes_has_a_fault_every_second_and_a_server_every_twenty() -> None:
    plan = schedule.plan_faults(1, 600.0)
    own = [fault.at for fault in plan if fault.target in OWN]
    assert own == [float(second) for second in range(1, 600)]
    servers = [fault.at for fault in plan if fault.target not in OWN]
    assert servers == [10.0 + 20.0 * number for number in range(30)]
    assert [fault.at for fault in plan] == sorted(fault.at for fault in plan)


def test_everything_has_every_kind_of_fault_in_ten_minutes() -> None:
    hit = {(fault.target, fault.kind) for fault in schedule.plan_faults(1, 600.0)}
    for target in OWN - {FaultTarget.BROKER_SESSION}:
        assert {(target, FaultKind.KILL), (target, FaultKind.STOP)} <= hit
    for target in (
        FaultTarget.TEMPORAL,
        FaultTarget.VALKEY,
        FaultTarget.POSTGRES,
        FaultTarget.EXCHANGE,
    ):
        assert (target, FaultKind.KILL) in hit
    forgets = {FaultKind.FLUSH, FaultKind.LAG, FaultKind.REWIND, FaultKind.FLUSH_CANCELS}
    assert {(FaultTarget.VALKEY, kind) for kind in forgets} <= hit
    assert {(FaultTarget.HOST, FaultKind.KILL), (FaultTarget.HOST, FaultKind.STOP)} <= hit
    assert (FaultTarget.API_CLOCK, FaultKind.SKEW) in hit
    assert (FaultTarget.ACCOUNT, FaultKind.REJECT) in hit


def test_the_harder_faults_come_in_every_other_round() -> None:
    plan = schedule.plan_faults(1, 24 * schedule.SERVER_FAULT_INTERVAL_S)
    rounds = [fault.kind for fault in plan if fault.target is FaultTarget.VALKEY]
    assert set(rounds[:3]) == {FaultKind.KILL, FaultKind.FLUSH_CANCELS, FaultKind.REWIND}
    assert set(rounds[3:]) == {FaultKind.KILL, FaultKind.FLUSH, FaultKind.LAG}


def test_a_lot_always_chooses_somebody() -> None:
    lots = [fault.lot for seed in range(50) for fault in schedule.plan_faults(seed, 100.0)]
    assert all(0.0 <= lot < 1.0 for lot in lots)
    assert max(lots) > 0.99


def test_orders_flow_steadily_and_repeat_with_the_seed() -> None:
    orders = list(shapes.plan_orders(3, 5.0, 60.0))
    assert orders == list(shapes.plan_orders(3, 5.0, 60.0))
    assert len(orders) == 300
    assert [order.at for order in orders] == [number / 5.0 for number in range(300)]


def test_orders_have_all_shapes() -> None:
    orders = list(shapes.plan_orders(3, 5.0, 200.0))
    kinds = Counter((order.price_type, order.time_in_force) for order in orders)
    assert set(kinds) == {
        (PriceType.MARKET, TimeInForce.IOC),
        (PriceType.LIMIT, TimeInForce.IOC),
        (PriceType.LIMIT, TimeInForce.ROD),
    }
    assert 0.5 < kinds[PriceType.MARKET, TimeInForce.IOC] / len(orders) < 0.7
    resting = {order.then for order in orders if order.time_in_force is TimeInForce.ROD}
    assert resting == {FollowUp.NOTHING, FollowUp.CANCEL, FollowUp.REPLACE}
    filling = {order.then for order in orders if order.time_in_force is TimeInForce.IOC}
    assert filling == set(FollowUp) - {FollowUp.CANCEL, FollowUp.REPLACE}


def test_an_order_that_rests_is_priced_away_from_the_market() -> None:
    market = Decimal(100)
    for order in shapes.plan_orders(3, 5.0, 60.0):
        price = order.price(market)
        if order.price_type is PriceType.MARKET:
            assert price is None
            continue
        assert price is not None
        crosses = price > market if order.side is Side.BUY else price < market
        assert crosses is (order.time_in_force is TimeInForce.IOC)
