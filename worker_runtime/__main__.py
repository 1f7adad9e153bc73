"""`python -m worker_runtime`: one user worker, configured by a JSON document on standard input."""

import sys
from collections.abc import Callable
from functools import partial

from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.process.config import BadConfig, read_config
from worker_runtime.process.log import Log
from worker_runtime.protocol.broker_record import BrokerRecordRefused
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.zygote import Zygote


def load_brokers(config: WorkerConfig) -> BrokerFactory:
    """The real adapters. Called in the session only: no broker SDK may be loaded before the fork.

    An adapter is imported at its first connection, by the path in its broker's record.
    """
    from worker_runtime.brokers.registry import create_broker

    return partial(create_broker, config)


def main(load: Callable[[WorkerConfig], BrokerFactory] = load_brokers) -> ExitCode:
    """Reads the configuration and becomes the zygote; returns the worker's exit code."""
    try:
        config = read_config()
        installed_brokers()  # here, so that all children share what was read
    except (BadConfig, BrokerRecordRefused) as error:
        Log().error("bad_config", reason=error.detail)
        return ExitCode.BAD_CONFIG
    log = Log(config.log_level, worker_id=config.worker_id, process="zygote")
    return Zygote(config, lambda: load(config), log).run()


if __name__ == "__main__":
    sys.exit(main())
