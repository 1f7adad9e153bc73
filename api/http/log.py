"""JSON lines on standard error: a constant event name, fields beside it. Never a body, never a key."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import structlog

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


_encoder = json.JSONEncoder(default=str, separators=(",", ":"))  # `json.dumps` would make one for each line


def _as_json(values: dict[str, Any], **options: Any) -> str:
    return _encoder.encode(values)


def configure(level: str) -> None:
    """Our own lines and those of the libraries, in one format. Call once a process."""
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    structlog.configure(
        processors=[*_SHARED, structlog.processors.JSONRenderer(serializer=_as_json)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, structlog.stdlib.add_logger_name],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(serializer=_as_json),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("uvicorn").setLevel(number)
    logging.getLogger("uvicorn.access").disabled = True  # one structured line of ours instead


def logger() -> Any:
    return structlog.get_logger()
