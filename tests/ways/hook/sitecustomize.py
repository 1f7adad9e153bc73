"""Counts the calls of our functions in a process. Python imports this module when it starts.

Only the traced system has it on its `PYTHONPATH`, which reaches the workers, too. The counts go
into the folder `counts` beside this file: one file a process, rewritten while the process goes on.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER = Path(__file__).parent / "counts"
_ROOT = (Path(__file__).parent / "root").read_text(encoding="utf-8")
_ROOMS = ("worker_runtime", "workflows", "activities", "api", "infra")
#: Seconds between two writes of the counts.
_PERIOD = 0.2
#: The first calls of a process are written one by one: a job's child ends soon, and by `os._exit`.
_FIRST = 400

_calls: Counter[tuple[str, str]] = Counter()
_ours: dict[str, str] = {}
_written = 0.0


def _file_of(name: str) -> str:
    """The file's path within our tree; '' for anybody else's."""
    path_in_tree = _ours.get(name)
    if path_in_tree is None:
        path = os.path.relpath(name, _ROOT)
        path_in_tree = _ours[name] = path if path.partition("/")[0] in _ROOMS else ""
    return path_in_tree


def _count(frame: FrameType, event: str, _argument: Any) -> None:
    if event != "call":
        return
    code = frame.f_code
    file = _file_of(code.co_filename)
    if file and code.co_name != "<module>":
        _calls[file, code.co_qualname] += 1
        if time.monotonic() - _written > _PERIOD or _calls.total() < _FIRST:
            _write()


def _write() -> None:
    global _written
    _written = time.monotonic()
    path = _FOLDER / f"{os.getpid()}.json"
    new = path.with_suffix(f".{threading.get_ident()}")
    calls = [[file, function, count] for (file, function), count in list(_calls.items())]
    new.write_text(json.dumps({"argv": sys.orig_argv, "calls": calls}), encoding="utf-8")
    new.replace(path)


def _begin() -> None:
    _calls.clear()  # after a fork the parent's counts are not ours
    sys.setprofile(_count)


os.register_at_fork(after_in_child=_begin)
threading.setprofile(_count)
_begin()
