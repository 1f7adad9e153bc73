"""The log of a server process: JSON lines on standard error, a constant event name with fields.

Never a body, never a key. Modules log by `structlog.get_logger()`;
a process calls `configure_log` once.
"""

import atexit
import json
import logging
import os
import threading
import time
from typing import Any, Final

import structlog

from infra.alerts.errors import ERRORS, collector

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]
# Made once: `json.dumps` would make one for each line.
_encoder = json.JSONEncoder(default=str, separators=(",", ":"))


def collect_errors(_logger: Any, method: str, values: Any) -> Any:
    """Passes errors on to the operators' alerts; a processor of structlog."""
    if method in ERRORS:
        collector.collect(values)
    return values


def _without_color(_logger: Any, _method: str, values: Any) -> Any:
    """Removes the text that uvicorn adds a second time, with the codes of colours."""
    values.pop("color_message", None)
    return values


def _as_json(values: dict[str, Any], **options: Any) -> str:
    return _encoder.encode(values)


#: Bytes of lines that wait for a reader who does not read; further lines are dropped and counted.
MAX_WAITING_BYTES: Final = 1 << 20
#: Seconds in which lines are gathered into one write.
GATHER_S: Final = 0.01
#: Seconds that the end of the process waits for the last lines.
LAST_LINES_TIMEOUT_S: Final = 1.0


class LogWriter:
    """Writes to standard error in a thread of its own,
    so that a pipe that nobody reads holds up no order.

    A full disk or a reader that went away is no error.
    A killed process loses the lines of `GATHER_S`.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()  # never held while something is written
        self._lines: list[bytes] = []
        #: Bytes that are not written yet.
        self._waiting = 0
        self._dropped = 0
        self._has_lines = threading.Event()
        threading.Thread(target=self._write_lines, daemon=True, name="log").start()
        atexit.register(self.drain)

    def write(self, text: str) -> None:
        line = text.encode(errors="backslashreplace")
        with self._lock:
            if self._waiting + len(line) > MAX_WAITING_BYTES:
                self._dropped += 1
            else:
                self._waiting += len(line)
                self._lines.append(line)
        if not self._has_lines.is_set():
            self._has_lines.set()

    def flush(self) -> None:
        """Does nothing: the thread writes all lines within moments."""

    def drain(self, timeout: float = LAST_LINES_TIMEOUT_S) -> None:
        """Waits until all lines are written, `timeout` seconds at most."""
        end = time.monotonic() + timeout
        while (self._waiting or self._dropped) and time.monotonic() < end:
            time.sleep(GATHER_S / 10)

    def _write_lines(self) -> None:
        while True:
            self._has_lines.wait()
            time.sleep(GATHER_S)
            self._has_lines.clear()
            with self._lock:
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
            text = b"".join(lines)
            if dropped:
                note = {"event": "log_lines_dropped", "level": "warning", "count": dropped}
                self._write_all(text + _as_json(note).encode() + b"\n")
            else:
                self._write_all(text)
            with self._lock:
                self._waiting -= len(text)

    def _write_all(self, text: bytes) -> None:
        unwritten = memoryview(text)
        while unwritten:
            try:
                unwritten = unwritten[os.write(self._descriptor, unwritten) :]
            except BlockingIOError:  # somebody else made the pipe non-blocking
                time.sleep(GATHER_S)
            except OSError:
                return


#: The writers of this process, once its log is configured.
_writers: list[LogWriter] = []


def drain_log() -> None:
    """Writes the last lines. Call it before an end
    that runs no clean-up: `os._exit`, or by a signal."""
    for writer in _writers:
        writer.drain()


def configure_log(level: str, *, libraries: int = logging.WARNING) -> None:
    """Has our own lines from `level` on, and those of libraries that also reach `libraries`,
    written in one format."""
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    writer = LogWriter()
    _writers[:] = [writer]
    render = structlog.processors.JSONRenderer(serializer=_as_json)
    structlog.configure(
        processors=[collect_errors, *_SHARED, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(writer),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    add_name, add_extras = structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()
    handler = logging.StreamHandler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, add_name, add_extras, collect_errors, _without_color],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, libraries), force=True)
    logging.getLogger("uvicorn").setLevel(number)
    logging.getLogger("uvicorn.access").disabled = True  # one structured line of ours instead
