"""The zygote ends its children."""

from __future__ import annotations

import os
import signal
import time

from infra import processes
from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.process.log import Log
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.zygote import Zygote

CONFIG = WorkerConfig(
    worker_id="w-1",
    pool="main",
    valkey_url="redis://127.0.0.1:1/0",
    launch_token=b"token",
    orchestrator_keys=(b"k" * 32,),
    shutdown_timeout=1.0,
)


def _no_brokers() -> BrokerFactory:
    raise NotImplementedError


class StalledZygote(Zygote):
    """Is stopped, as its host is, from the moment in which its session has ended."""

    def __init__(self, report_fd: int) -> None:
        super().__init__(CONFIG, _no_brokers, Log(output=os.open(os.devnull, os.O_WRONLY)))
        self._report_fd = report_fd

    def session_main(self) -> ExitCode:
        os.write(self._report_fd, os.getpid().to_bytes(4, "big"))
        signal.sigwait({signal.SIGTERM})
        os.kill(os.getppid(), signal.SIGSTOP)
        return ExitCode.OK

    def supervisor_main(self) -> ExitCode:
        signal.sigwait({signal.SIGTERM})
        os.write(self._report_fd, b"mark removed")
        return ExitCode.OK


def test_a_zygote_that_was_frozen_past_the_end_of_a_stop_does_not_kill_its_whole_group() -> None:
    reader, writer = os.pipe()
    zygote = os.fork()
    if zygote == 0:
        code = 1
        try:
            os.setsid()
            code = StalledZygote(writer).run()
        finally:
            os._exit(code)
    os.close(writer)
    try:
        session = int.from_bytes(os.read(reader, 4), "big")
        os.kill(zygote, signal.SIGTERM)
        deadline = time.monotonic() + 20.0
        while (process := processes.read_process(session)) is not None and process.alive:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(CONFIG.shutdown_timeout)  # until a session that still ran would be killed
        os.kill(zygote, signal.SIGCONT)
        assert os.read(reader, 100) == b"mark removed"
    finally:
        os.close(reader)
        os.kill(zygote, signal.SIGCONT)
        _, status = os.waitpid(zygote, 0)
    assert os.waitstatus_to_exitcode(status) == ExitCode.OK
