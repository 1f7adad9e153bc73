"""Makes broker sessions of the adapters that the records name. Runs in session processes only."""

from functools import cache
from importlib import import_module

from worker_runtime.brokers.port import AdapterFactory, Broker, ConnectionKey, OnOrderChanged
from worker_runtime.process.log import silence_libraries
from worker_runtime.protocol.errors import BrokerError
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.launch import WorkerConfig


def create_broker(
    config: WorkerConfig, key: ConnectionKey, client: str, on_order: OnOrderChanged
) -> Broker:
    """Returns an unconnected broker session for `key`.

    `client` names this worker in an exchange's ledger; `on_order` is called from any
    thread. Raises `BrokerError` for a broker that this worker does not have, and for an
    adapter that cannot be imported.
    """
    plugin = installed_brokers().get(key.broker)
    if plugin is None:
        known = ", ".join(sorted(installed_brokers()))
        raise BrokerError(f"This worker has no broker {key.broker!r}; it has {known}.")
    options = {"paper_exchange": config.paper_exchange, **config.broker_options.get(key.broker, {})}
    if plugin.record.adapter_prints:
        silence_libraries()
    return load_adapter(plugin.record.adapter)(key, client, on_order, options)


@cache
def load_adapter(path: str) -> AdapterFactory:
    """Imports an adapter, once a process, by its path `package.module:name`. Raises
    `BrokerError`."""
    module, _, name = path.partition(":")
    try:
        factory: AdapterFactory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BrokerError(
            f"The adapter {path} cannot be imported where this worker runs: "
            f"{type(error).__name__}. Install its distribution there."
        ) from None
    return factory
