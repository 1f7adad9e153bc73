"""`python -m worker_runtime.jobs`: one runner of the fleet, configured on standard input."""

from __future__ import annotations

import sys

from worker_runtime.config import BadConfig
from worker_runtime.jobs import known
from worker_runtime.jobs.config import read
from worker_runtime.jobs.registry import Registry
from worker_runtime.jobs.runner import Runner
from worker_runtime.log import Log
from worker_runtime.protocol.exit_codes import ExitCode


def main(registry: Registry | None = None) -> ExitCode:
    """Reads the configuration and runs jobs; returns the exit code. `registry`: other jobs than ours."""
    try:
        config = read()
    except BadConfig as error:
        Log().error("bad_config", reason=error.detail)
        return ExitCode.BAD_CONFIG
    log = Log(config.log_level, runner=config.name, process="jobs")
    return Runner(config, known.registry(config) if registry is None else registry, log).run()


if __name__ == "__main__":
    sys.exit(main())
