"""How a worker's processes end: the exit codes that the zygote, the launcher and the workflows see."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """0 is a graceful end. The rest start at 64, clear of Python's own 1 and 2 and of 128 + signal.

    A worker that was killed itself has no such code: the launcher then tells of a signal.
    """

    OK = 0
    #: The configuration on standard input cannot be read. The same launch would fail again.
    BAD_CONFIG = 64
    #: A process ended by an error that nobody caught.
    INTERNAL = 65
    #: A later epoch owns the user: this worker must not submit anything any more.
    FENCED = 66
    #: The claim was released, unknown or never completed.
    CLAIM_REFUSED = 67
    #: The session process died before its user was connected, or too often to be replaced once more.
    SESSION_LOST = 68
    #: The session did not end within `shutdown_timeout` and was killed.
    SHUTDOWN_TIMEOUT = 69
    #: A process died again and again, or could not be forked.
    CRASH_LOOP = 70
    #: No broker session can be had, also not by a fresh session process; the event FAILED says why.
    BROKER_FAILED = 71
    #: Of a session process only, never of a worker: it asks for a fresh one in its place, because its
    #: broker's SDK does not come back.
    SESSION_REPLACE = 72
