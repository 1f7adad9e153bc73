"""Runs one runner of the fleet: `python -m worker_runtime.jobs`, configured on standard input."""

from __future__ import annotations

import sys

from worker_runtime.jobs.config import parse_config
from worker_runtime.jobs.runner import JobRunner
from worker_runtime.jobs.types.job_registry import JobRegistry, build_registry
from worker_runtime.process.config import BadConfig, read_document
from worker_runtime.process.log import Log
from worker_runtime.protocol.launch import ExitCode


def main(registry: JobRegistry | None = None) -> ExitCode:
    """Reads the configuration and runs jobs; returns the exit code. `registry`: other jobs than ours."""
    try:
        config = parse_config(read_document())
    except BadConfig as error:
        Log().error("bad_config", reason=error.detail)
        return ExitCode.BAD_CONFIG
    log = Log(config.log_level, runner=config.name, process="jobs")
    return JobRunner(config, build_registry(config) if registry is None else registry, log).run()


if __name__ == "__main__":
    sys.exit(main())
