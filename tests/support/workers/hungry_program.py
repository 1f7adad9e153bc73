"""The real worker, whose paper broker eats memory at an order for one symbol: in its session
process.

The entry point of a test image that is made of the worker's (`docker_environment.py`).
"""

from __future__ import annotations

import sys

from worker_runtime.__main__ import load_brokers, main
from worker_runtime.brokers.port import (
    Broker,
    BrokerFactory,
    BrokerOrderTerms,
    ConnectionKey,
    OnOrderChanged,
)
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.launch import WorkerConfig

#: Nobody hits it by mistake: no exchange has this one.
SYMBOL = "9999"


def _eat() -> None:
    """Takes memory until the kernel objects."""
    taken = []
    while True:
        taken.append(b"x" * (4 * 1024 * 1024))


def hungry(config: WorkerConfig) -> BrokerFactory:
    create = load_brokers(config)

    def made(key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker:
        broker = create(key, client, on_order)
        place = broker.place

        def place_or_eat(order: BrokerOrderTerms, timeout: float) -> BrokerOrder:
            if order.symbol == SYMBOL:
                _eat()
            return place(order, timeout)

        broker.place = place_or_eat  # type: ignore[method-assign]
        return broker

    return made


if __name__ == "__main__":
    sys.exit(main(hungry))
