"""One round: a worker serves orders, something happens to it, its user is served again; then the
judge."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass

from infra.lab.processes import processes_of
from tests.support.chaos.faults import Fault
from tests.support.chaos.ledger_judge import violations
from tests.support.chaos.order_stream import OrderStream, wait_filled
from tests.support.chaos.system import MARK_TTL, ChaosSystem
from tests.support.systems.local import Trader, until

#: Seconds until the user must be served again, on a machine that does a dozen rounds at the same
#: time: the mark's time to live, the watcher's checks, the end of a stopped worker, and a new
#: login.
RECOVERY = 60.0


@dataclass(frozen=True)
class FencingRound:
    """What one round showed."""

    fault: str
    user_id: str
    #: Seconds from the fault to the first fill of an order that was sent after it, by a session
    #: that lasts.
    recovery: float
    orders: int
    violations: tuple[str, ...]


def run_round(chaos: ChaosSystem, fault: Fault, seed: int) -> FencingRound:
    """Raises AssertionError when the user is not served again, or an order gets no outcome."""
    system, chance = chaos.system, random.Random(seed)  # noqa: S311 - no secret
    trader = system.trader()
    worker_id = str(system.start_until_active(trader)["worker_id"])
    known = {session.session_id for session in system.sessions(trader)}
    processes = processes_of(worker_id)
    assert len(processes.all) == 3, f"{processes} of {worker_id}"
    stream = OrderStream(system.stack.api_url, trader)
    try:
        with stream:
            wait_filled(stream, 0.0)
            time.sleep(chance.uniform(0.0, 0.3))  # anywhere in the life of an order
            injected = time.monotonic()
            let_go = fault.inject(processes, chaos.lines, worker_id, trader.user_id)
            # Half of them early, in the middle of the change of owners; the rest when it is over.
            early = chance.random() < 0.5
            timer = threading.Timer(chance.uniform(0.5, 1.5 * MARK_TTL), let_go) if early else None
            if timer is not None:
                timer.start()
            try:
                served = _served_again(chaos, trader, fault, known, stream, injected, early=early)
            finally:
                if timer is not None:
                    timer.join(2 * MARK_TTL)
                let_go()
            wait_filled(stream, time.monotonic())  # with the old one let go
        answers = {answer.order_id: answer for answer in stream.settle().values()}
        judged = violations(system.sessions(trader), system.ledger(trader), answers)
    finally:
        stream.close()
    system.call("POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key, json={})
    done = FencingRound(fault.name, trader.user_id, served - injected, len(answers), tuple(judged))
    logging.getLogger(__name__).info("%s", done)
    return done


def _served_again(
    chaos: ChaosSystem,
    trader: Trader,
    fault: Fault,
    known: set[str],
    stream: OrderStream,
    injected: float,
    *,
    early: bool,
) -> float:
    """When the first order was filled that was sent after the fault, by a fresh login if it needs
    one."""
    after = injected
    if fault.relogin and not early:  # one that is let go early may go on as if nothing had been

        def fresh() -> bool:
            opened = chaos.system.open_sessions(trader)
            return any(session.session_id not in known for session in opened)

        until(fresh, f"new login of {trader.user_id} after '{fault.name}'", RECOVERY)
        after = time.monotonic() - 0.1
    return wait_filled(stream, after, RECOVERY)
