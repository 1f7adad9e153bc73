"""The Lua scripts, loaded once. Each opens with its table of KEYS and ARGV."""

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


_FOLDER = Path(__file__).parent / "lua"


def _load(name: str) -> Script:
    source = (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    return Script(name, source, sha1(source.encode(), usedforsecurity=False).hexdigest())


ENQUEUE = _load("enqueue")
WITHDRAW = _load("withdraw")
OVERDUE = _load("overdue")
REMIND = _load("remind")
CONTROL = _load("control")
POP = _load("pop")
PUT_BACK = _load("put_back")
ANSWER = _load("answer")
MARK = _load("mark")
UNMARK = _load("unmark")
SWEEP = _load("sweep")
OWN = _load("own")
SWITCH = _load("switch")
READY = _load("ready")
CLAIM = _load("claim")
SETTLE = _load("settle")
LINE = _load("line")
RETIRE = _load("retire")
BUDGET = _load("budget")
CONNECTION = _load("connection")
CONNECTED = _load("connected")
TURN = _load("turn")

ALL = (
    ENQUEUE,
    WITHDRAW,
    OVERDUE,
    REMIND,
    CONTROL,
    POP,
    PUT_BACK,
    ANSWER,
    MARK,
    UNMARK,
    SWEEP,
    OWN,
    SWITCH,
    READY,
    CLAIM,
    SETTLE,
    LINE,
    RETIRE,
    BUDGET,
    CONNECTION,
    CONNECTED,
    TURN,
)
