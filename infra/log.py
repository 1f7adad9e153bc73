"""The log of a server process: JSON lines on standard error, a constant event name and fields beside it.

Never a body, never a key. Modules log by `structlog.get_logger()`; a process calls `configure_log` once.
"""

import contextlib
import json
import logging
import sys
from typing import Any

import structlog

from infra.alerts.errors import ERRORS, collector

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]
_encoder = json.JSONEncoder(default=str, separators=(",", ":"))  # `json.dumps` would make one for each line


def collect_errors(_logger: Any, method: str, values: Any) -> Any:
    """A processor: what is an error is told to operators."""
    if method in ERRORS:
        collector.collect(values)
    return values


def _without_color(_logger: Any, _method: str, values: Any) -> Any:
    """uvicorn adds its text a second time, with the codes of colours."""
    values.pop("color_message", None)
    return values


def _as_json(values: dict[str, Any], **options: Any) -> str:
    return _encoder.encode(values)


class _StandardError:
    """Standard error. A reader that went away is no error."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_log(level: str, *, libraries: int = logging.WARNING) -> None:
    """Our own lines from `level` on, and those of libraries that also reach `libraries`, in one format."""
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    render = structlog.processors.JSONRenderer(serializer=_as_json)
    structlog.configure(
        processors=[collect_errors, *_SHARED, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(_StandardError()),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    add_name, add_extras = structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, add_name, add_extras, collect_errors, _without_color],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, libraries), force=True)
    logging.getLogger("uvicorn").setLevel(number)
    logging.getLogger("uvicorn.access").disabled = True  # one structured line of ours instead
