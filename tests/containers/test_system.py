"""Workers in real containers, in the whole system: one that dies takes nobody with it, and is
replaced."""

from __future__ import annotations

import json
import threading
import time

from infra.lab.figures import percentile
from tests.support.systems.docker import DockerHouse
from tests.support.systems.local import House, Trader, until
from tests.support.workers.hungry_program import SYMBOL


def task_of(house: House, worker_id: str) -> str:
    [found] = [task.task_id for task in house.stack.tasks() if task.worker_id == worker_id]
    return found


def trades(house: House, trader: Trader) -> bool:
    return bool(house.order(trader).status_code == 201)


def test_a_worker_that_eats_memory_dies_alone_while_its_neighbours_trade_and_is_replaced(
    house: House, docker_house: DockerHouse
) -> None:
    hungry, *neighbours = [house.trader() for _ in range(3)]
    worker = house.start_until_active(hungry)
    before = [house.start_until_active(one) for one in neighbours]
    group = docker_house.memory_group(task_of(house, worker["worker_id"]))
    over, refused, taken = threading.Event(), [], list[float]()

    def trade(trader: Trader) -> None:
        while not over.is_set():
            began = time.monotonic()
            answer = house.order(trader)
            taken.append(time.monotonic() - began)
            if answer.status_code != 201:
                refused.append(answer.text)

    threads = [threading.Thread(target=trade, args=(one,)) for one in neighbours]
    for thread in threads:
        thread.start()
    try:
        order = house.threads.submit(house.order, hungry, symbol=SYMBOL)
        until(lambda: group.oom_kills() > 0, "kill by the kernel")
        assert order.result(60).status_code in {200, 201, 202}
        until(lambda: trades(house, hungry), "trading of the user whose worker was killed")
        until(lambda: len(taken) > 10, "orders of the neighbours")
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert refused == []
    assert len(taken) > 10
    # Answered in time; `berth bench density` measures how quickly.
    assert percentile(taken, 0.99) < 30
    after = [house.start_until_active(one) for one in neighbours]
    assert [(one["worker_id"], one["epoch"]) for one in after] == [
        (one["worker_id"], one["epoch"]) for one in before
    ]
    assert [one.symbol for one in house.ledger(hungry) if one.symbol == SYMBOL] == []


def test_a_container_that_is_killed_is_replaced_by_another_one(house: House) -> None:
    trader = house.trader()
    before = house.start_until_active(trader)
    task_id = task_of(house, before["worker_id"])
    house.kill_worker(before["worker_id"])
    until(
        lambda: task_id not in {task.task_id for task in house.stack.tasks()},
        "end of the container",
    )
    after = until(
        lambda: (
            worker
            if (worker := house.start_until_active(trader))["epoch"] > before["epoch"]
            else None
        ),
        "another worker",
    )
    assert after["worker_id"] != before["worker_id"]
    assert trades(house, trader)
    [session] = until(
        lambda: sessions if len(sessions := house.open_sessions(trader)) == 1 else None,
        "single session",
    )
    assert after["worker_id"] in session.client


def test_an_orchestrator_that_starts_anew_adopts_the_containers_and_hears_of_those_that_ended(
    house: House,
) -> None:
    traders = [house.trader() for _ in range(2)]
    workers = [house.start_until_active(one) for one in traders]
    house.stack.wait_pool(2)
    tasks = {task.worker_id: task.task_id for task in house.stack.tasks()}
    house.stack.orchestrator.kill()
    assert trades(house, traders[0])
    house.kill_worker(workers[1]["worker_id"])
    gone = tasks.pop(workers[1]["worker_id"])
    until(
        lambda: gone not in {task.task_id for task in house.stack.tasks()}, "end of the container"
    )
    house.stack.orchestrator.start()
    until(
        lambda: house.start_until_active(traders[1])["epoch"] > workers[1]["epoch"],
        "replacement of the dead",
    )
    assert house.start_until_active(traders[0])["worker_id"] == workers[0]["worker_id"]
    assert trades(house, traders[0])
    now = {task.worker_id: task.task_id for task in house.stack.tasks()}
    assert now[workers[0]["worker_id"]] == tasks[workers[0]["worker_id"]]


def test_no_key_and_no_password_is_in_what_docker_shows_of_a_worker(
    house: House, docker_house: DockerHouse
) -> None:
    trader = house.trader(api_key="canary-api-key", secret_key="canary-secret-key")
    worker = house.start_until_active(trader)
    task_id = task_of(house, worker["worker_id"])
    shown = json.dumps(docker_house.inspect(task_id)) + docker_house.logs(task_id)
    assert worker["worker_id"] in shown
    assert "canary" not in shown
    assert "redis://" not in shown
