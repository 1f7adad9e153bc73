"""The orchestrator's log: one JSON object a line, a constant event name and fields, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from temporalio import workflow


def configure(level: str) -> None:
    """Once, at start. Temporal's own log goes the same way."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.INFO), force=True)
    # The event's name stays constant; which workflow it was stands in the fields.
    workflow.logger.workflow_info_on_message = False
