"""All brokers by their name. An adapter is imported when its first connection is made."""

from worker_runtime.brokers.port import Broker, ConnectionKey, OnOrderChanged
from worker_runtime.protocol.errors import BrokerError
from worker_runtime.protocol.launch import WorkerConfig


def create_broker(config: WorkerConfig, key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker:
    """An unconnected broker session for `key`.

    `client` names this worker in the exchange's ledger; `on_order` is called from any thread. Raises
    `BrokerError` for a broker that this release does not know.
    """
    if key.broker == "paper":
        from worker_runtime.brokers.paper.broker import PaperBroker

        if not config.paper_exchange:
            raise BrokerError("this worker does not know where the paper exchange is")
        return PaperBroker(config.paper_exchange, key.at_broker, client, on_order)
    if key.broker == "shioaji":
        from worker_runtime.brokers.shioaji.broker import ShioajiBroker
        from worker_runtime.process.log import silence_libraries

        silence_libraries()
        return ShioajiBroker(key, on_order)
    raise BrokerError(f"unknown broker {key.broker!r}; known: paper, shioaji")
