"""A worker's processes set what they need in the kernel."""

from __future__ import annotations

import os
import selectors
import signal
from pathlib import Path

from worker_runtime.process import kernel

#: `nobody`: images of workers have no root either.
_NOBODY = 65534


def test_a_process_without_privileges_that_forbids_dumps_can_still_be_the_first_to_die() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            kernel.forbid_dumps()
            kernel.die_first()
            score = Path("/proc/self/oom_score_adj")
            # Nobody may write it any more: dumps are forbidden again.
            code = 0 if score.read_text() == "1000\n" and not os.access(score, os.W_OK) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_was_forked_twice_into_a_session_of_its_own_is_adopted_and_killed() -> None:
    """A worker leaves nothing behind that an SDK started as a daemon."""
    reader, writer = os.pipe()  # its end is read when nobody holds the writing side any more
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            kernel.adopt_orphans()
            child = os.fork()
            if child == 0:
                os.setsid()
                if os.fork() == 0:
                    while True:
                        signal.pause()
                os._exit(0)
            os.waitpid(child, 0)
            kernel.kill_children(10.0)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        assert selector.select(5.0), "the daemon lives"
    assert os.read(reader, 1) == b""
    os.close(reader)
