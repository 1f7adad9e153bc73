"""A worker without a broker: reads its config as the real one does, and behaves as `config.version`
says.

The node starts it as `python stand_in_worker.py <worker> <task>`. It loads nothing of Berth, so it
starts quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def _wait() -> NoReturn:
    while True:
        signal.pause()


def _eat() -> NoReturn:
    """Takes memory until somebody objects."""
    taken = []
    while True:
        taken.append(b"x" * (4 * 1024 * 1024))


def main() -> int:
    text = sys.stdin.read()
    if not text:
        return 2
    config = json.loads(text)
    behaviour, _, argument = config["version"].partition(":")
    if behaviour == "exits":
        return int(argument)
    stubborn = behaviour in ("stubborn", "parent", "daemon")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: sys.exit(0))
    if behaviour == "parent" and not (child := os.fork()):
        _wait()  # the child ignores SIGTERM, too, and survives its parent unless somebody ends it
    if behaviour == "daemon":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # as the real one
        if not os.fork():
            os.setsid()
            if child := os.fork():
                _say(f"daemon {child}")
                os._exit(0)
            _wait()
        os.wait()
    _say(f"ready {child}" if behaviour == "parent" else "ready")
    if behaviour == "hog":
        _eat()
    if behaviour == "noisy":
        _say("n" * int(argument))
    if behaviour == "dies":
        time.sleep(float(argument))
        return 3
    _wait()


if __name__ == "__main__":
    sys.exit(main())
