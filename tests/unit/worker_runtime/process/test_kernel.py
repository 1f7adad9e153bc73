"""What a worker's processes ask of the kernel."""

from __future__ import annotations

import os
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
