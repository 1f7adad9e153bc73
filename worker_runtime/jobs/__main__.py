"""Runs one runner of the fleet: `python -m worker_runtime.jobs`, configured on standard input."""

import sys

from worker_runtime.jobs.config import RunnerConfig, parse_config
from worker_runtime.jobs.protocol.messages import JobFailed
from worker_runtime.jobs.runner import JobRunner
from worker_runtime.jobs.types.job_registry import JobRegistry, build_registry
from worker_runtime.jobs.types.mail import check_login
from worker_runtime.process.config import BadConfig, read_document
from worker_runtime.process.log import Log
from worker_runtime.protocol.launch import ExitCode


def main(registry: JobRegistry | None = None) -> ExitCode:
    """Reads the configuration and runs jobs; returns the exit code. `registry`: other jobs than
    ours."""
    try:
        config = parse_config(read_document())
    except BadConfig as error:
        Log().error("bad_config", reason=error.detail)
        return ExitCode.BAD_CONFIG
    if "--check" in sys.argv:
        return _check(config)
    log = Log(config.log_level, runner=config.name, process="jobs")
    return JobRunner(config, _registry(config) if registry is None else registry, log).run()


def _registry(config: RunnerConfig) -> JobRegistry:
    if config.own is None:
        return build_registry(config)
    # Here, not above: other runners do not pay for it.
    from worker_runtime.jobs.own_types.pool import OwnTypeRegistry

    return OwnTypeRegistry()


def _check(config: RunnerConfig) -> ExitCode:
    """Tries the mail server; says on standard output what is wrong."""
    try:
        if config.mail is not None:
            check_login(config.mail)
    except JobFailed as error:
        sys.stdout.write(f"{error.code}: {error.detail}\n")
        return ExitCode.BAD_CONFIG
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
