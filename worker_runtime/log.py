"""Structured log: one JSON line an event on standard error. The standard `logging` is not loaded at all.

An event has a constant name; what varies stands in fields beside it. Never a secret, never a payload.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgspec

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Log:
    """Writes events with the fields it was bound to."""

    def __init__(self, level: str = "INFO", *, output: int | None = None, **fields: Any) -> None:
        self._threshold = _LEVELS.get(level.upper(), 20)
        self._output = sys.stderr.fileno() if output is None else output
        self._fields = fields

    def bind(self, **fields: Any) -> Log:
        """A log with further fields in every line."""
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
        """An error that nobody caught: its type and where it came from.

        Not its text: an exception of a broker SDK may quote what it was given.
        """
        frames = []
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            frames.append(f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} {code.co_name}")
            trace = trace.tb_next
        self.error(event, error=type(error).__name__, trace=frames)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if _LEVELS[level] < self._threshold:
            return
        line = _encode(
            {"at": round(time.time(), 6), "level": level, "event": event, **self._fields, **fields}
        )
        try:
            os.write(self._output, line + b"\n")  # one write: lines of several processes do not mix
        except OSError:
            return  # nobody reads any more; a worker does not die of its log
