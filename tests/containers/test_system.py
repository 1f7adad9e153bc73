"""Workers in real containers, in the whole system: one that dies takes nobody with it, and is
replaced."""

from __future__ import annotations

import json
import threading
import time

from infra.lab.figures import percentile
from tests.support.systems.docker import DockerEnvironment
from tests.support.systems.local import RunningSystem, Trader, until
from tests.support.systems.trading import find_task_id
from tests.support.workers.hungry_program import SYMBOL


def trades(system: RunningSystem, trader: Trader) -> bool:
    return bool(system.order(trader).status_code == 201)


def test_a_worker_that_eats_memory_dies_alone_while_its_neighbours_trade_and_is_replaced(
    system: RunningSystem, docker_environment: DockerEnvironment
) -> None:
    hungry, *neighbours = [system.trader() for _ in range(3)]
    worker = system.start_until_active(hungry)
    before = [system.start_until_active(neighbour) for neighbour in neighbours]
    group = docker_environment.memory_group(find_task_id(system, worker["worker_id"]))
    over, refused, taken = threading.Event(), [], list[float]()

    def trade(trader: Trader) -> None:
        while not over.is_set():
            began = time.monotonic()
            answer = system.order(trader)
            taken.append(time.monotonic() - began)
            if answer.status_code != 201:
                refused.append(answer.text)

    threads = [threading.Thread(target=trade, args=(neighbour,)) for neighbour in neighbours]
    for thread in threads:
        thread.start()
    try:
        order = system.threads.submit(system.order, hungry, symbol=SYMBOL)
        until(lambda: group.oom_kills() > 0, "kill by the kernel")
        assert order.result(60).status_code in {200, 201, 202}
        until(lambda: trades(system, hungry), "trading of the user whose worker was killed")
        until(lambda: len(taken) > 10, "orders of the neighbours")
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert refused == []
    assert len(taken) > 10
    # Answered in time; `berth bench density` measures how quickly.
    assert percentile(taken, 0.99) < 30
    after = [system.start_until_active(neighbour) for neighbour in neighbours]
    assert [(worker["worker_id"], worker["epoch"]) for worker in after] == [
        (worker["worker_id"], worker["epoch"]) for worker in before
    ]
    assert [order.symbol for order in system.ledger(hungry) if order.symbol == SYMBOL] == []


def test_a_container_that_is_killed_is_replaced_by_another_one(system: RunningSystem) -> None:
    trader = system.trader()
    before = system.start_until_active(trader)
    task_id = find_task_id(system, before["worker_id"])
    system.kill_worker(before["worker_id"])
    until(
        lambda: task_id not in {task.task_id for task in system.stack.tasks()},
        "end of the container",
    )
    after = until(
        lambda: (
            worker
            if (worker := system.start_until_active(trader))["epoch"] > before["epoch"]
            else None
        ),
        "another worker",
    )
    assert after["worker_id"] != before["worker_id"]
    assert trades(system, trader)
    [session] = until(
        lambda: sessions if len(sessions := system.open_sessions(trader)) == 1 else None,
        "single session",
    )
    assert after["worker_id"] in session.client


def test_an_orchestrator_that_starts_anew_adopts_the_containers_and_hears_of_those_that_ended(
    system: RunningSystem,
) -> None:
    traders = [system.trader() for _ in range(2)]
    workers = [system.start_until_active(trader) for trader in traders]
    system.stack.wait_pool(2)
    tasks = {task.worker_id: task.task_id for task in system.stack.tasks()}
    system.stack.orchestrator.kill()
    assert trades(system, traders[0])
    system.kill_worker(workers[1]["worker_id"])
    gone = tasks.pop(workers[1]["worker_id"])
    until(
        lambda: gone not in {task.task_id for task in system.stack.tasks()}, "end of the container"
    )
    system.stack.orchestrator.start()
    until(
        lambda: system.start_until_active(traders[1])["epoch"] > workers[1]["epoch"],
        "replacement of the dead",
    )
    assert system.start_until_active(traders[0])["worker_id"] == workers[0]["worker_id"]
    assert trades(system, traders[0])
    now = {task.worker_id: task.task_id for task in system.stack.tasks()}
    assert now[workers[0]["worker_id"]] == tasks[workers[0]["worker_id"]]


def test_no_key_and_no_password_is_in_what_docker_shows_of_a_worker(
    system: RunningSystem, docker_environment: DockerEnvironment
) -> None:
    trader = system.trader(api_key="canary-api-key", secret_key="canary-secret-key")
    worker = system.start_until_active(trader)
    task_id = find_task_id(system, worker["worker_id"])
    shown = json.dumps(docker_environment.inspect(task_id)) + docker_environment.logs(task_id)
    assert worker["worker_id"] in shown
    assert "canary" not in shown
    assert "redis://" not in shown
