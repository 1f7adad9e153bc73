"""The race of an order with the idle timeout: the order wins or starts a new worker; it is never
dropped."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.local.stack import LocalStack
from tests.support.chaos.ledger_judge import AnsweredOrder, violations
from tests.support.chaos.order_stream import OrderStream
from tests.support.systems.local import RunningSystem, run_system

#: Seconds without an order after which a worker ends.
IDLE = 0.8
USERS = 6
ORDERS = 20


@pytest.fixture(scope="module")
def restless_system() -> Iterator[RunningSystem]:
    """Workers end after less than a second of rest."""
    with run_system(
        lambda folder: LocalStack(
            folder,
            pool_target=USERS,
            connect_timeout=5.0,
            idle_timeout=IDLE,
            durable=False,
            api_processes=1,
        )
    ) as system:
        yield system


def _trade(system: RunningSystem, seed: int) -> tuple[int, list[str], list[AnsweredOrder]]:
    """Trades as one user around the timeout; returns the sessions it took, what is wrong, and the
    answers."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    trader = system.trader()
    stream = OrderStream(system.stack.api_url, trader)
    pause = threading.Event()
    for _ in range(ORDERS):
        stream.place()
        pause.wait(IDLE * chance.uniform(0.8, 1.3))
    answers = {answer.order_id: answer for answer in stream.settle().values()}
    stream.close()
    sessions = system.sessions(trader)
    return (
        len(sessions),
        violations(sessions, system.ledger(trader), answers),
        list(answers.values()),
    )


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_orders_around_the_idle_timeout_are_all_executed_once(
    restless_system: RunningSystem,
) -> None:
    with ThreadPoolExecutor(max_workers=USERS) as threads:
        results = list(threads.map(lambda seed: _trade(restless_system, seed), range(USERS)))
    answers = [
        stream_answer for _, _, stream_answers in results for stream_answer in stream_answers
    ]
    assert [
        violation for _, violations_of_one, _ in results for violation in violations_of_one
    ] == []
    assert len(answers) == USERS * ORDERS
    assert {answer.state for answer in answers} == {"filled"}, [
        answer for answer in answers if answer.state != "filled"
    ]
    # The race was run: the timeout came first for some of them, and the order for others.
    sessions = sum(count for count, _, _ in results)
    assert USERS < sessions < USERS * ORDERS
