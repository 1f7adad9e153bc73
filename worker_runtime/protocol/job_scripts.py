"""The Lua scripts of the job queue. Each is loaded behind `shelf.lua`, which holds what they share."""

from __future__ import annotations

from hashlib import sha1
from pathlib import Path

from worker_runtime.protocol.scripts import Script

_FOLDER = Path(__file__).parent / "lua" / "jobs"
_SHELF = (_FOLDER / "shelf.lua").read_text(encoding="utf-8")


def _load(name: str) -> Script:
    source = _SHELF + (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    return Script(f"jobs/{name}", source, sha1(source.encode(), usedforsecurity=False).hexdigest())


ENQUEUE = _load("enqueue")
CLAIM = _load("claim")
FINISH = _load("finish")
HELD = _load("held")
JOIN = _load("join")
RENEW = _load("renew")
REAP = _load("reap")
CANCEL = _load("cancel")
SWITCH = _load("switch")
REQUEUE = _load("requeue")
PROGRESS = _load("progress")
RING = _load("ring")
SURVEY = _load("survey")
CONFIGURE = _load("configure")
COUNT = _load("count")

ALL = (
    *(ENQUEUE, CLAIM, FINISH, HELD, JOIN, RENEW, REAP, CANCEL, SWITCH, REQUEUE, PROGRESS, RING),
    *(SURVEY, CONFIGURE, COUNT),
)
