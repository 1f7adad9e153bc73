"""A bounded copy of what a job writes: the beginning and the end, with what lies between left out."""

from __future__ import annotations

import os

_HALF = 8192
#: It is read after each job, mostly in vain: the memory for 64 KiB cost more than the call (measured).
_CHUNK = 16384


class Capture:
    """Reads one pipe without ever waiting; what is too much is read and dropped, so no job is held up."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._head = b""
        self._tail = b""
        self._size = 0

    def read(self) -> bool:
        """Takes what is there; false at the pipe's end."""
        while True:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._add(data)

    def text(self) -> str:
        """All of it since the last call."""
        left_out = self._size - len(self._head) - len(self._tail)
        between = f"\n… {left_out} bytes left out …\n".encode() if left_out else b""
        text = (self._head + between + self._tail).decode("utf-8", "replace")
        self._head = self._tail = b""
        self._size = 0
        return text

    def close(self) -> None:
        os.close(self.descriptor)

    def _add(self, data: bytes) -> None:
        self._size += len(data)
        room = _HALF - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-_HALF:]
