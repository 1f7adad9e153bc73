"""A wire to Valkey that a test can cut: it forwards every command and may swallow replies."""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import Self


class ValkeyWire:
    """Listens on a free port and forwards to `target` (host, port)."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: Cuts the connection in place of the next reply, this many times; of one that contains
        #: `about`.
        self.lose = 0
        self.about = b""
        #: Seconds that every reply is held back.
        self.hold = 0.0
        self._links: list[socket.socket] = []
        self._over = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        # Closing a socket does not wake a thread that waits on it; shutting it down does.
        for link in (self._listener, *self._links):
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                link.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._links += [near, far]
            if self._over:  # it came while the others were closed
                near.close()
                far.close()
                return
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        try:
            while data := source.recv(65536):
                if replies and self.lose and self.about in data:
                    self.lose -= 1
                    break
                if replies and self.hold:
                    time.sleep(self.hold)
                sink.sendall(data)
        except OSError:
            return
        finally:
            for link in (source, sink):
                try:
                    link.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
