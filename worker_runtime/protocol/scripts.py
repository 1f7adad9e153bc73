"""The Lua scripts. Each is loaded once and begins with its table of KEYS and ARGV."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its source, and the SHA-1 under which a server knows it (EVALSHA)."""

    name: str
    source: str
    sha: str

    @classmethod
    def of(cls, name: str, *files: Path) -> Script:
        """The script of these files, one after the other."""
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        return cls(name, source, sha1(source.encode(), usedforsecurity=False).hexdigest())


_FOLDER = Path(__file__).parent / "lua"


def _load(name: str) -> Script:
    return Script.of(name, _FOLDER / f"{name}.lua")


ENQUEUE = _load("enqueue")
WITHDRAW = _load("withdraw")
RESOLVE_OVERDUE = _load("resolve_overdue")
RING_DOORBELL = _load("ring_doorbell")
SEND_CONTROL = _load("send_control")
POP = _load("pop")
PUT_BACK = _load("put_back")
ANSWER = _load("answer")
RENEW_MARK = _load("renew_mark")
REMOVE_MARK = _load("remove_mark")
SET_OWNER = _load("set_owner")
WRITE_SWITCH = _load("write_switch")
ANNOUNCE_WORKER = _load("announce_worker")
CLAIM = _load("claim")
SETTLE_CLAIM = _load("settle_claim")
JOIN_WAIT_QUEUE = _load("join_wait_queue")
RETIRE_WORKER = _load("retire_worker")
SPEND_BUDGET = _load("spend_budget")
TAKE_CONNECTION = _load("take_connection")
RENEW_CONNECTIONS = _load("renew_connections")
TAKE_LAUNCH = _load("take_launch")

ALL = tuple(script for script in list(globals().values()) if isinstance(script, Script))
