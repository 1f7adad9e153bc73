"""`python -m activities`: the orchestrator."""

import asyncio
import gc
import logging
import sys

import structlog
from temporalio import workflow

from activities.orchestrator import process as orchestrator
from infra.environment import forget_library_variables
from infra.log import configure_log
from infra.process_metrics import serving_metrics
from infra.processes import forbid_core_files
from infra.setting_names import log_unread_variables
from infra.settings import Settings, read_settings
from worker_runtime.protocol.errors import BerthError


def main() -> int:
    forbid_core_files()
    forget_library_variables()
    settings = read_settings(Settings)
    configure_log(settings.log_level, libraries=logging.INFO)
    log_unread_variables()
    # The event's name stays constant; fields say which workflow it was.
    workflow.logger.workflow_info_on_message = False
    gc.collect()
    gc.freeze()  # modules stay for good: no collection has to look at them again
    try:
        with serving_metrics(settings.metrics_address):
            asyncio.run(orchestrator.run(settings))
    except BerthError as error:
        structlog.get_logger().error("start_failed", code=error.code, reason=error.detail)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
