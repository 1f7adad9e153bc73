"""`python -m worker_runtime`: one user worker, configured by a JSON document on standard input."""

import sys
from collections.abc import Callable
from functools import partial

from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.process.config import BadConfig, read_config
from worker_runtime.process.log import Log
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.zygote import Zygote


def load_brokers(config: WorkerConfig) -> BrokerFactory:
    """The real adapters. Called in the session only: no broker SDK may be loaded before the fork.

    A vendor's SDK is loaded by its adapter, at the first connection; the paper adapter is small and ours.
    """
    from worker_runtime.brokers.registry import create_broker

    if config.paper_exchange:
        import worker_runtime.brokers.paper.broker  # noqa: F401

    return partial(create_broker, config)


def main(load: Callable[[WorkerConfig], BrokerFactory] = load_brokers) -> ExitCode:
    """Reads the configuration and becomes the zygote; returns the worker's exit code."""
    try:
        config = read_config()
    except BadConfig as error:
        Log().error("bad_config", reason=error.detail)
        return ExitCode.BAD_CONFIG
    log = Log(config.log_level, worker_id=config.worker_id, process="zygote")
    return Zygote(config, lambda: load(config), log).run()


if __name__ == "__main__":
    sys.exit(main())
