"""What Prometheus reads of the running system: each thing that is done moves its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from infra.exchange.behaviour import Behaviour
from tests.support.systems.local import RunningSystem, Trader, until

Sample = tuple[str, frozenset[tuple[str, str]]]
#: A sample and some of its labels.
Wanted = tuple[str, dict[str, str]]

ORDERS = "/users/{user_id}/orders"


def read(text: str) -> dict[Sample, int]:
    return {
        (sample.name, frozenset(sample.labels.items())): round(sample.value * 1e6)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(system: RunningSystem) -> Counter[Sample]:
    """The sums over the API, the orchestrator and its Temporal SDK."""
    address = system.stack.settings.metrics_address
    host, port = address.split(":")

    def page() -> str | None:  # as Prometheus would: without a server it is asked for again
        answer = system.call("GET", "/v1/metrics", system.stack.admin_key)
        assert answer.is_success or answer.json()["code"] == "VALKEY_UNAVAILABLE", answer.text
        return answer.text if answer.is_success else None

    samples = Counter(read(until(page, "page of metrics")))
    for place in (address, f"{host}:{int(port) + 1}"):
        samples.update(read(httpx.get(f"http://{place}/metrics", trust_env=False).text))
    return samples


def value(samples: Counter[Sample], metric: Wanted) -> float:
    name, labels = metric
    return 1e-6 * sum(
        number
        for (sample_name, its), number in samples.items()
        if sample_name == name and labels.items() <= set(its)
    )


def moved_by(system: RunningSystem, act: Callable[[], object], *metrics: Wanted) -> None:
    before = scrape(system)
    act()
    unmoved = list(metrics)

    def all_moved() -> bool:
        now = scrape(system)
        unmoved[:] = [metric for metric in unmoved if value(now, metric) <= value(before, metric)]
        return not unmoved

    try:
        until(all_moved, "metric that moves", patience=10.0)
    except AssertionError:
        raise AssertionError(f"did not move: {unmoved}") from None


def test_an_order_of_a_user_without_a_worker_moves_its_metrics(system: RunningSystem) -> None:
    trader = system.trader()
    moved_by(
        system,
        lambda: system.order(trader),
        ("berth_http_requests_total", {"method": "POST", "route": ORDERS, "status": "201"}),
        ("berth_http_request_seconds_count", {"route": ORDERS}),
        ("berth_orders_answered_total", {"state": "filled", "code": ""}),
        *(
            ("berth_order_stage_seconds_count", {"stage": stage})
            for stage in ("accepted", "queued", "submitted")
        ),
        ("berth_order_stage_seconds_sum", {"stage": "submitted"}),
        ("berth_broker_call_seconds_count", {"call": "place"}),
        ("berth_broker_limit_used_ratio_count", {}),
        ("berth_database_pool_wait_seconds_count", {}),
        ("berth_valkey_pool_wait_seconds_count", {}),
        ("berth_claim_seconds_count", {"pool": "default", "kind": "warm"}),
        ("berth_launch_seconds_count", {"outcome": "launched"}),  # the pool is filled again
        ("berth_events_total", {"group": "recorder", "kind": "filled"}),
        ("berth_events_total", {"group": "relay", "kind": "connected"}),
        ("berth_marks", {"state": "present"}),
        ("berth_users", {"state": "Active"}),
        ("berth_workers_in_use", {"pool": "default"}),
        # Temporal's SDK
        ("temporal_local_activity_execution_latency_count", {"activity_type": "claim_worker"}),
        ("temporal_request_total", {}),
    )
    positions = f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/positions"
    moved_by(
        system,
        lambda: system.call("GET", positions, trader.api_key),
        ("berth_broker_call_seconds_count", {"call": "query"}),
    )
    now = scrape(system)
    assert value(now, ("berth_pool_wanted", {"pool": "default"})) == 3
    for queue in ("lifecycle", "launch", "orders", "bulk"):
        assert value(now, ("temporal_num_pollers", {"task_queue": f"berth-{queue}"})) > 0
    for server in ("postgresql", "valkey", "temporal"):
        assert value(now, ("berth_server_up", {"server": server})) == 1
    for group in ("recorder", "relay"):
        assert ("berth_event_stream_lag_seconds", frozenset({("group", group)})) in now
    named = {label for _, labels in now for _, label in labels}
    assert not {trader.user_id, trader.account_id} & named


def test_what_is_refused_moves_its_metrics(system: RunningSystem) -> None:
    refused, rejected = system.trader(wrong_key=True), system.trader()
    moved_by(
        system,
        lambda: system.order(refused),
        ("berth_claims_failed_total", {"code": "LOGIN_REJECTED"}),
        ("berth_http_requests_total", {"route": ORDERS}),
    )
    assert system.order(rejected).is_success
    rejecting = Behaviour(reject_next=1)
    system.exchange(lambda admin: admin.set_behaviour(rejected.account_id, rejecting))
    moved_by(
        system,
        lambda: _order_halt_and_order(system, rejected),
        ("berth_orders_answered_total", {"state": "rejected", "code": "ORDER_REJECTED"}),
        ("berth_broker_errors_total", {"call": "place", "code": "ORDER_REJECTED"}),
        ("berth_switches_closed", {"scope": "user", "state": "halted"}),
        ("berth_http_problems_total", {"code": "TRADING_HALTED"}),
    )
    moved_by(
        system,
        lambda: [system.call("GET", f"/v1/made-up-{number}", "no key") for number in range(3)],
        ("berth_http_requests_total", {"method": "", "route": "", "status": "404"}),
    )


def _order_halt_and_order(system: RunningSystem, trader: Trader) -> None:
    system.order(trader)
    body = {"scope": "user", "user_id": trader.user_id, "state": "halted", "reason": "a test"}
    assert system.call("PUT", "/v1/switches", system.stack.admin_key, json=body).is_success
    system.order(trader)
