"""The structured log: one JSON line for each event
on standard error, without the standard `logging`.

An event has a constant name; what varies is in fields. Never log a secret or a payload.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

import msgspec

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
#: Descriptor of the log; `silence_libraries` moves it away from standard error.
_target = [2]
#: The last errors of this process: event and fields.
recent_errors: deque[tuple[str, dict[str, Any]]] = deque(maxlen=50)
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Log:
    """Writes events with the fields it was bound to."""

    def __init__(self, level: str = "INFO", *, output: int | None = None, **fields: Any) -> None:
        self._threshold = _LEVELS.get(level.upper(), 20)
        self._output = output
        self._fields = fields

    def bind(self, **fields: Any) -> Log:
        """Returns a log with further fields in every line."""
        bound = Log(output=self._output, **{**self._fields, **fields})
        bound._threshold = self._threshold
        return bound

    def debug(self, event: str, **fields: Any) -> None:
        self._write("DEBUG", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("INFO", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("WARNING", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("ERROR", event, fields)

    def crash(self, event: str, error: BaseException) -> None:
        """Logs an unexpected error: its type and trace, without its text, which may quote what a
        broker SDK was given."""
        frames = []
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            frames.append(f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} {code.co_name}")
            trace = trace.tb_next
        self.error(event, error=type(error).__name__, trace=frames)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if level == "ERROR":
            recent_errors.append((event, fields))
        if _LEVELS[level] < self._threshold:
            return
        line = _encode(
            {"at": round(time.time(), 6), "level": level, "event": event, **self._fields, **fields}
        )
        output = _target[0] if self._output is None else self._output
        try:
            os.write(output, line + b"\n")  # one write: lines of several processes do not mix
        except OSError:
            return  # nobody reads any more; a worker does not die of its log


def silence_libraries() -> None:
    """Points standard output and error at /dev/null; the log keeps its descriptor. Safe to call
    again.

    Shioaji 1.7.9 writes the first characters of an API
    key to standard error when a connection fails.
    """
    if _target[0] != 2:
        return
    _target[0] = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
