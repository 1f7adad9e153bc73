"""Says in words what a failed command of Valkey means: it is unreachable, or what it answered.

A Valkey that is full, or cannot write to its disk, answers. "It cannot be reached" would send
people to the network. An error's own text is not shown: it may quote addresses, keys and values.
"""

import re

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    ExecAbortError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from worker_runtime.protocol.errors import BerthError

UNREACHABLE = "Valkey cannot be reached."


class ValkeyUnavailable(BerthError, code="VALKEY_UNAVAILABLE", retryable=True):
    """Valkey cannot be used at the moment; the detail says why."""


#: The code that Valkey's error reply begins with → what it means and what to do.
_MEANINGS = {
    "OOM": "Valkey refuses to write: its memory is full (OOM). Ask an operator to raise its "
    "maxmemory, or to find what fills it: `berth doctor valkey-memory`.",
    "MISCONF": "Valkey refuses to write: it cannot save to its disk (MISCONF). Ask an operator to "
    "free space there, or to give it the right to write: `berth doctor valkey-persistence`; "
    "Valkey's own log names the cause.",
    "LOADING": "Valkey is starting and still reads its data (LOADING). Try again in a moment.",
    "READONLY": "Valkey refuses to write: it is a replica (READONLY). Ask an operator to let "
    "BERTH_VALKEY_URL lead to the primary.",
    "MASTERDOWN": "Valkey is a replica that has lost its primary (MASTERDOWN). Ask an operator to "
    "look at the failover, and whether BERTH_VALKEY_URL leads to the primary.",
    "NOREPLICAS": "Valkey refuses to write: too few replicas follow it (NOREPLICAS). Ask an "
    "operator to start them, or to lower its min-replicas-to-write.",
    "NOAUTH": "Valkey refuses the login. Ask an operator to look at the password in "
    "BERTH_VALKEY_URL.",
    "NOPERM": "Valkey does not let its user do this (NOPERM). Ask an operator to look at the "
    "rights of the user in BERTH_VALKEY_URL.",
    "CLIENTS": "Valkey takes no more connections. Ask an operator to raise its maxclients, or to "
    "find who opens so many.",
}
#: By redis-py, whose errors have lost the code.
_CODES: tuple[tuple[type[RedisError], str], ...] = (
    (OutOfMemoryError, "OOM"),
    (BusyLoadingError, "LOADING"),
    (ReadOnlyError, "READONLY"),
    (MasterDownError, "MASTERDOWN"),
    (NoPermissionError, "NOPERM"),
    (AuthenticationError, "NOAUTH"),
)
#: The code at the beginning of a reply;
#: redis-py puts words about the command before that of a pipeline.
_CODE = re.compile(r"(?:\A|caused error: )([A-Z]{3,16})\b")
#: The codes of servers that answer, and take no write.
_REFUSALS = frozenset({"OOM", "MISCONF", "READONLY", "NOREPLICAS"})


def code_of(error: BaseException) -> str:
    """Returns the code of Valkey's error reply; empty if there was no reply."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    text = str(error)
    if isinstance(error, ConnectionError):
        # The connection that orders use ends with its server's last reply.
        code = match.group(1) if (match := _CODE.search(text)) else ""
        return "CLIENTS" if "max number of clients" in text else code if code in _MEANINGS else ""
    if isinstance(error, ExecAbortError):
        return "EXECABORT"
    if not isinstance(error, ResponseError):
        return ""
    match = _CODE.search(text)
    return match.group(1) if match else "ERR"


def explain_failure(error: BaseException) -> str:
    """Returns a sentence on what happened and what to do."""
    code = code_of(error)
    if not code:
        return UNREACHABLE
    return _MEANINGS.get(code, f"Valkey answered with an error ({code}). Its text is in the log.")


def refuses_writes(error: BaseException) -> bool:
    """Returns True if the server answered that it takes no writes now."""
    return code_of(error) in _REFUSALS
