"""The Lua scripts, loaded once. Each opens with its table of KEYS and ARGV."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its source, and the SHA-1 under which a server knows it (EVALSHA)."""

    name: str
    source: str
    sha: str


def _load(name: str) -> Script:
    source = (files("worker_runtime.protocol") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return Script(name, source, sha1(source.encode(), usedforsecurity=False).hexdigest())


ENQUEUE = _load("enqueue")
WITHDRAW = _load("withdraw")
CONTROL = _load("control")
POP = _load("pop")
ANSWER = _load("answer")
MARK = _load("mark")
UNMARK = _load("unmark")
OWN = _load("own")
READY = _load("ready")
CLAIM = _load("claim")
SETTLE = _load("settle")

ALL = (ENQUEUE, WITHDRAW, CONTROL, POP, ANSWER, MARK, UNMARK, OWN, READY, CLAIM, SETTLE)
