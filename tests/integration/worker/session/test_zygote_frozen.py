"""A frozen zygote cannot replace its session: the worker must not look alive for ever."""

from __future__ import annotations

import os
import signal

from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness


def test_a_worker_whose_zygote_and_session_are_stopped_ends_as_a_whole(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(pulse_timeout=3.0, mark_period=0.2)
    processes = worker.both()
    os.kill(worker.pid, signal.SIGSTOP)
    os.kill(processes[0], signal.SIGSTOP)
    assert worker.wait() == -signal.SIGKILL
    assert worker.logged("zygote_frozen")
    for pid in processes:
        eventually(lambda pid=pid: not alive(pid), "the end of its children")  # type: ignore[misc]
