"""The Lua scripts of the job queue. Each is loaded behind `queue_lib.lua`, which holds what all of them
share; those that take jobs or end them behind `claim_lib.lua` and `finish_lib.lua`, too."""

from __future__ import annotations

from hashlib import sha1
from pathlib import Path

from worker_runtime.protocol.scripts import Script

_FOLDER = Path(__file__).parent / "lua"


def _read_source(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def _load(name: str, *shared: str) -> Script:
    source = "".join(_read_source(part) for part in ("queue_lib", *shared, name))
    return Script(f"jobs/{name}", source, sha1(source.encode(), usedforsecurity=False).hexdigest())


ENQUEUE = _load("enqueue")
CLAIM = _load("claim", "claim_lib")
FINISH = _load("finish", "finish_lib")
FINISH_AND_CLAIM = _load("finish_and_claim", "claim_lib", "finish_lib")
LIST_HELD = _load("list_held")
JOIN = _load("join")
RENEW = _load("renew")
REAP = _load("reap")
RELEASE = _load("release")
CANCEL = _load("cancel")
SUSPEND = _load("suspend")
REQUEUE = _load("requeue")
PROGRESS = _load("progress")
RING = _load("ring")
SCAN = _load("scan")
CONFIGURE = _load("configure")
COUNT = _load("count")

ALL = (
    *(
        ENQUEUE,
        CLAIM,
        FINISH,
        FINISH_AND_CLAIM,
        LIST_HELD,
        JOIN,
        RENEW,
        REAP,
        CANCEL,
        SUSPEND,
        REQUEUE,
        PROGRESS,
        RING,
    ),
    *(SCAN, CONFIGURE, COUNT, RELEASE),
)
