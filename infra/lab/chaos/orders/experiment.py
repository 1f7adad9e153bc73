"""`berth chaos orders`: users trade while everything is broken, and no order may be lost or
doubled.

It runs a local stack with short waits. A seed decides what is ordered, how the exchange misbehaves
and which fault comes when: every second one of our own processes is killed or stopped for a while,
every 20 s a server. Afterwards everything is started again, and when all has settled, the
exchange's ledger is compared with our books.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.database.engine import Database
from infra.database.trading.quantity_changes import SeenQuantityChange, store_confirmation
from infra.exchange.hours import time_half_a_day_away
from infra.lab import figures
from infra.lab.chaos.orders import books, chaos_run, client, schedule, shapes
from infra.lab.chaos.orders.api_clock import ApiClock
from infra.lab.chaos.orders.chaos_run import ChaosOutcome, OrderChaosRun
from infra.lab.chaos.orders.judge import OrderFinding, OrderHarm, OrderVerdict, judge_orders
from infra.lab.figures import Say, silent
from infra.lab.shioaji import keys as shioaji
from infra.lab.target import Target, own_folder
from infra.local.stack import LocalStack
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import QuantityMeaning

#: Seconds for everything to settle: verification waits a minute before it takes an order for
#: absent, and checks a followed one at least once a minute.
SETTLE_TIMEOUT_S = 300.0
#: Share of the orders that the broker must settle. Without this limit and the next, to park every
#: order would pass: it loses nothing.
MIN_SETTLED_BY_BROKER_SHARE = 0.9
#: Share of the orders that may need a person.
MAX_NEEDS_ATTENTION_SHARE = 0.01
_POOL_SIZE = 6
_ORCHESTRATORS = 2
#: Seconds for an orchestrator to say that it is ready, on a host that is busy with all the rest: it
#: works from the first second on, and one that is ended for its slowness begins from nothing.
_ORCHESTRATOR_START_TIMEOUT_S = 300.0
#: Findings whose orders are shown in full.
_MAX_TRACED_FINDINGS = 20


def run(
    minutes: float,
    seed: int,
    users: int = 24,
    rate: float = 5.0,
    *,
    server_every: float = schedule.SERVER_FAULT_INTERVAL_S,
    patience: float = client.ORDER_TIMEOUT_S,
    settle: float = SETTLE_TIMEOUT_S,
    folder: Path | None = None,
    say: Say = silent,
    broker: str = "paper",
    **overrides: Any,
) -> dict[str, Any]:
    """Places `rate` orders a second for `users` users; a server has a fault every `server_every`
    seconds.

    A client tries for `patience` seconds to get an answer, and at the end everything gets `settle`
    seconds. `folder` keeps data and logs; `broker` shioaji has workers trade at its stand-in
    (`infra/lab/shioaji`); `overrides` are settings of the stack. Raises `BerthError` when the stack
    could not be run.
    """
    seconds = minutes * 60
    plan = OrderChaosRun(
        seed=seed,
        plan=schedule.plan_faults(seed, seconds, server_every),
        shapes=list(shapes.plan_orders(seed, rate, seconds)),
        patience=patience,
        settle=settle,
        broker=broker,
    )
    # Runs at any time of the day, with accounts that the system takes for real ones.
    if broker == "shioaji":
        overrides |= {"live_accounts": True, "check_market_open": "off"}
        overrides |= {"check_symbols": "off", "check_prices": "off"}
    # No midnight in the run: fills from before it are on no list after it, and a person would have
    # to decide.
    overrides.setdefault("exchange_day_begins", time_half_a_day_away(time.time_ns() // 1_000_000))
    # Equal orders are no mistake here, nor are equal entries, which cannot say so themselves.
    overrides.setdefault("check_duplicate_window", 0.0)
    say("chaos: the stack starts")
    with ExitStack() as contexts:
        if folder is None:
            folder = contexts.enter_context(own_folder())
        clock = contexts.enter_context(ApiClock.installed())
        stack = LocalStack(
            folder, pool_target=_POOL_SIZE, orchestrators=_ORCHESTRATORS, **overrides
        )
        if broker == "shioaji":
            packages = contexts.enter_context(own_folder())
            contexts.enter_context(shioaji.on_python_path(packages))
            shioaji.write_package(packages, stack.settings.exchange_address)
        contexts.enter_context(stack)
        for orchestrator in stack.orchestrators:
            orchestrator.start_timeout = _ORCHESTRATOR_START_TIMEOUT_S
        target = Target(stack)
        traders = target.make_users("chaos", users, broker=broker)
        if broker == "shioaji":
            asyncio.run(_confirm_quantity_changes(target))
        hooks = chaos_run.make_hooks(target, traders)
        chaos_run.start_workers(target, traders)
        aftermath = asyncio.run(chaos_run.run_chaos(target, traders, plan, clock, say, hooks))
        verdict = judge_orders(aftermath.books, aftermath.placed)
        traces = asyncio.run(_traces(target, aftermath, verdict))
        faults = _faults(stack.exchange.log_path)
    return {
        "seed": seed,
        "broker": broker,
        "minutes": minutes,
        "users": users,
        "rate": rate,
        **_figures(aftermath, verdict),
        "findings": [
            {"harm": finding.harm.value, "order": finding.order_id, "what": finding.what}
            for finding in verdict.findings
        ],
        "traces": traces,
        "faults_by_point": faults,
        "schedule": [str(fault) for fault in plan.plan],
        "injected": list(aftermath.injected),
    }


async def _confirm_quantity_changes(target: Target) -> None:
    """Stores what the stand-in does with a changed quantity, as `berth broker check` would."""
    seen = SeenQuantityChange(
        broker="shioaji",
        sdk_version=metadata.version("shioaji"),
        lot=OrderLot.COMMON,
        futures=False,
        simulation=False,
        meaning=QuantityMeaning.REDUCE_BY,
        evidence={},
    )
    async with (
        Database(target.settings.database_url, pool_size=1) as database,
        database.session() as session,
    ):
        await store_confirmation(session, seen, actor="chaos")


def _figures(aftermath: ChaosOutcome, verdict: OrderVerdict) -> dict[str, Any]:
    accepted = max(1, verdict.orders)
    result: dict[str, Any] = {
        "orders": verdict.orders,
        "kills": sum(aftermath.kills.values()),
        "kills_by_kind": dict(sorted(aftermath.kills.items())),
        "missed_by_kind": dict(sorted(aftermath.missed.items())),
        "lost": verdict.count(OrderHarm.LOST),
        "doubled": verdict.count(OrderHarm.DOUBLED),
        "mismatched": verdict.count(OrderHarm.MISMATCHED),
        "out_of_turn": verdict.count(OrderHarm.OUT_OF_TURN),
        "two_owners": verdict.count(OrderHarm.TWO_OWNERS),
        "settled_by_broker": round(verdict.settled_by_broker / accepted, 4),
        "attention": round(verdict.attention / accepted, 4),
        "attention_orders": verdict.attention,
        "unsettled": verdict.unsettled,
        "settle_s": round(aftermath.settle_s, 1),
        "bans": len(aftermath.books.bans),
        "differences": aftermath.books.differences,
        "signals": len(aftermath.books.signals),
        "states": dict(Counter(order.state for order in aftermath.books.ours)),
        "clients": dict(sorted(aftermath.counts.items())),
    }
    result["broken"] = broken(result)
    return result


def broken(result: dict[str, Any]) -> list[str]:
    """Lists in sentences which promises did not hold; none if the run passed."""
    rules = (
        (not result["orders"], "no order was accepted"),
        (result["lost"], "orders were lost"),
        (result["doubled"], "orders were doubled"),
        (result["mismatched"], "books and ledger differ"),
        (
            result["out_of_turn"],
            "a reversal opened before its close was filled, or signals changed places",
        ),
        (result["two_owners"], "two workers served one account"),
        (result["unsettled"], "orders are neither final nor on a person's list"),
        (result["bans"], "the exchange banned somebody"),
        (
            result["settled_by_broker"] < MIN_SETTLED_BY_BROKER_SHARE,
            "too few orders were settled by the broker",
        ),
        (result["attention"] > MAX_NEEDS_ATTENTION_SHARE, "too many orders need a person"),
    )
    return [sentence for holds_not, sentence in rules if holds_not]


def _faults(log: Path) -> dict[str, int]:
    """Counts the exchange's faults in its log, by fault point."""
    counted: Counter[str] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        if '"exchange.fault"' in line:
            counted[str(json.loads(line)["point"])] += 1
    return dict(sorted(counted.items()))


async def _traces(
    target: Target, aftermath: ChaosOutcome, verdict: OrderVerdict
) -> dict[str, list[str]]:
    """Returns what happened to the orders of the first findings, by our id."""
    known = {order.order_id for order in aftermath.books.ours}
    heard = {order.order_id: order for order in aftermath.placed if order.order_id}
    database = Database(target.settings.database_url, pool_size=1)
    traces: dict[str, list[str]] = {}
    try:
        for order_id in _first_orders(verdict.findings):
            placed = heard.get(order_id)
            traces[order_id] = (
                [f"client: {placed.client_order_id} {placed.heard}"] if placed else []
            )
            if order_id in known:
                traces[order_id] += await books.trace_order(database, order_id)
    finally:
        await database.close()
    return traces


def _first_orders(findings: tuple[OrderFinding, ...]) -> list[str]:
    return list(dict.fromkeys(finding.order_id for finding in findings if finding.order_id))[
        :_MAX_TRACED_FINDINGS
    ]


def table(result: dict[str, Any]) -> None:
    """Prints the figures."""
    accepted = result["orders"]
    figures.print_table(
        f"chaos: orders at {result['broker']}, seed {result['seed']}, {result['minutes']:g} min, "
        f"{result['users']} users",
        [
            ("orders accepted", str(accepted)),
            (
                "lost   doubled   mismatched",
                "   ".join(str(result[n]) for n in ("lost", "doubled", "mismatched")),
            ),
            (
                "out of turn   two owners   bans",
                "   ".join(str(result[n]) for n in ("out_of_turn", "two_owners", "bans")),
            ),
            ("signals, in pairs", str(result["signals"])),
            ("settled by the broker", f"{result['settled_by_broker']:.1%}"),
            ("need a person", f"{result['attention_orders']} ({result['attention']:.1%})"),
            ("neither settled nor on a person's list", str(result["unsettled"])),
            ("differences that the system still shows", str(result["differences"])),
            ("time to settle", f"{result['settle_s']} s"),
            ("states", _counts(result["states"])),
            ("faults of the exchange", _counts(result["faults_by_point"])),
            ("faults injected", _counts(result["kills_by_kind"])),
            ("faults that found no target", _counts(result["missed_by_kind"]) or "none"),
            ("what clients met", _counts(result["clients"])),
            ("verdict", "; ".join(result["broken"]) or "every promise held"),
        ],
    )


def _counts(counts: dict[str, int]) -> str:
    return "   ".join(f"{name} {count}" for name, count in sorted(counts.items()))
