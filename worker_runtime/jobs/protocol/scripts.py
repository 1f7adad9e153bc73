"""The Lua scripts of the job queue. Each is loaded after `queue_lib.lua`, which all share."""

from pathlib import Path

from worker_runtime.protocol.scripts import Script

_FOLDER = Path(__file__).parent


def _load(name: str) -> Script:
    return Script.of(f"jobs/{name}", _FOLDER / "queue_lib.lua", _FOLDER / "lua" / f"{name}.lua")


ENQUEUE = _load("enqueue")
FINISH_AND_CLAIM = _load("finish_and_claim")
LIST_HELD = _load("list_held")
JOIN = _load("join")
RENEW = _load("renew")
REAP = _load("reap")
RELEASE = _load("release")
CANCEL = _load("cancel")
REQUEUE = _load("requeue")
PROGRESS = _load("progress")
RING = _load("ring")
SCAN = _load("scan")
CONFIGURE = _load("configure")
DECLARE = _load("declare")
PUBLISH = _load("publish")

#: All of them: a runner loads them when it joins.
ALL = tuple(script for script in list(globals().values()) if isinstance(script, Script))
