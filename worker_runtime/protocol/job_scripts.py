"""The Lua scripts of the job queue. Each is loaded behind `shelf.lua`, which holds what all of them share;
those that take jobs or end them behind `claiming.lua` and `ending.lua`, too."""

from __future__ import annotations

from hashlib import sha1
from pathlib import Path

from worker_runtime.protocol.scripts import Script

_FOLDER = Path(__file__).parent / "lua" / "jobs"


def _read(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def _load(name: str, *shared: str) -> Script:
    source = "".join(_read(part) for part in ("shelf", *shared, name))
    return Script(f"jobs/{name}", source, sha1(source.encode(), usedforsecurity=False).hexdigest())


ENQUEUE = _load("enqueue")
CLAIM = _load("claim", "claiming")
FINISH = _load("finish", "ending")
TURN = _load("turn", "claiming", "ending")
HELD = _load("held")
JOIN = _load("join")
RENEW = _load("renew")
REAP = _load("reap")
RELEASE = _load("release")
CANCEL = _load("cancel")
SWITCH = _load("switch")
REQUEUE = _load("requeue")
PROGRESS = _load("progress")
RING = _load("ring")
SURVEY = _load("survey")
CONFIGURE = _load("configure")
COUNT = _load("count")

ALL = (
    *(ENQUEUE, CLAIM, FINISH, TURN, HELD, JOIN, RENEW, REAP, CANCEL, SWITCH, REQUEUE, PROGRESS, RING),
    *(SURVEY, CONFIGURE, COUNT, RELEASE),
)
