"""The end of a worker, raised where it is decided."""

from __future__ import annotations

from worker_runtime.protocol.exit_codes import ExitCode


class WorkerEnds(Exception):
    """Raised inside the session when its process has to end; not an error by itself."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
