"""How a worker's processes end: the exit codes that the zygote, the launcher and an operator see."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """0 is a graceful end. The rest start at 64, clear of Python's own 1 and 2 and of 128 + signal."""

    OK = 0
    #: The configuration on standard input cannot be read.
    BAD_CONFIG = 64
    #: A process ended by an error that nobody caught.
    INTERNAL = 65
    #: A later epoch owns the user: this worker must not submit anything any more.
    FENCED = 66
    #: The claim was released, unknown or never completed.
    CLAIM_REFUSED = 67
    #: The session process died with the user's keys in it.
    SESSION_LOST = 68
    #: The session did not end within `shutdown_timeout` and was killed.
    SHUTDOWN_TIMEOUT = 69
    #: A process died again and again, or could not be forked.
    CRASH_LOOP = 70


class WorkerEnds(Exception):
    """Raised inside the session when its worker has to end; not an error by itself."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
