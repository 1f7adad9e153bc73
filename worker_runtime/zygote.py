"""The zygote: parent of all. It has no event loop, no sockets, no keys, and runs no broker code.

It imports what all of them need, once; forks supervisor and session; reaps them. It runs in one thread
and takes its signals by `sigtimedwait`, so nothing happens to it between two lines.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable

from worker_runtime import kernel
from worker_runtime.board import Board, State
from worker_runtime.boottime import wall_ms
from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.exits import ExitCode
from worker_runtime.log import Log
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.session import Session
from worker_runtime.supervisor import Supervisor

_STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_WAITED = _STOP | {signal.SIGCHLD}
#: Seconds the supervisor gets to take the mark away: one connect and two commands.
_FAREWELL = 4.0
#: More ends of one process than this within `_CRASH_WINDOW` seconds are a loop.
_MAX_CRASHES = 5
_CRASH_WINDOW = 60.0


class Child:
    """One of the two processes: how to make it, and how often it has died."""

    def __init__(self, name: str, main: Callable[[], ExitCode]) -> None:
        self.name = name
        self.main = main
        self.pid = 0
        self._ends: list[float] = []

    def crash_loop(self) -> bool:
        """Notes one more end; true if there were too many of late."""
        now = time.monotonic()
        self._ends = [*(end for end in self._ends if now - end < _CRASH_WINDOW), now]
        return len(self._ends) > _MAX_CRASHES


class Zygote:
    """Forks, reaps, and decides what the end of a child means."""

    def __init__(self, config: WorkerConfig, load_factory: Callable[[], BrokerFactory], log: Log) -> None:
        self._config = config
        self._log = log
        self._board = Board()
        self._board.launched_at_ms = wall_ms()
        self._load_factory = load_factory
        self._supervisor = Child("supervisor", self.supervisor_main)
        self._session = Child("session", self.session_main)
        #: Set once: the code with which the whole worker ends.
        self._end: ExitCode | None = None
        self._kill_at: float | None = None

    def run(self) -> ExitCode:
        """Runs the worker to its end and returns its exit code. Leaves no child behind."""
        kernel.forbid_dumps()
        kernel.rename("berth-zygote")
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
        gc.collect()
        gc.freeze()  # the children's collectors leave these pages alone, so they stay shared
        self._fork_session()
        self._fork(self._supervisor)
        while self._session.pid:
            self._await_signal()
            self._reap()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._log.error("shutdown_too_slow", timeout_s=self._config.shutdown_timeout)
                self._kill_at = None
                self._end = ExitCode.SHUTDOWN_TIMEOUT
                os.kill(self._session.pid, signal.SIGKILL)
        self._farewell()
        end = ExitCode.OK if self._end is None else self._end
        self._log.info("worker_ended", code=int(end))
        return end

    def session_main(self) -> ExitCode:
        """What the session process does."""
        log = self._log.bind(process="session")
        return Session(self._config, self._board, self._load_factory, log).run()

    def supervisor_main(self) -> ExitCode:
        """What the supervisor process does."""
        log = self._log.bind(process="supervisor")
        return Supervisor(self._config, self._board, log).run()

    def _fork_session(self) -> None:
        board = self._board
        board.session_number += 1
        board.claiming = 0
        board.state = State.PoolIdle
        board.pulse = time.monotonic_ns()
        self._fork(self._session)
        board.session_pid = self._session.pid

    def _fork(self, child: Child) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            child.pid = pid
            return
        code = ExitCode.INTERNAL
        try:
            kernel.die_with_parent(parent)
            kernel.rename(f"berth-{child.name}")
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; ours is SIGTERM
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            # SIGTERM stays blocked until the child has its handler.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED - {signal.SIGTERM})
            code = child.main()
        except BaseException as error:
            self._log.crash(f"{child.name}_crashed", error)
        finally:
            os._exit(code)  # at once: a broker SDK's threads must not hold the process

    def _await_signal(self) -> None:
        wait = 3600.0 if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        received = signal.sigtimedwait(_WAITED, wait)
        if received is not None and received.si_signo in _STOP:
            self._log.info("stop_requested", signal=signal.Signals(received.si_signo).name)
            self._stop_session(ExitCode.OK)

    def _stop_session(self, end: ExitCode) -> None:
        """Asks the session to finish the order in hand; it is killed after `shutdown_timeout`."""
        if self._end is not None:
            return
        self._end = end
        self._kill_at = time.monotonic() + self._config.shutdown_timeout
        if self._session.pid:
            os.kill(self._session.pid, signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid == self._session.pid:
                # Before the process is reaped, while its number cannot be given to another.
                self._board.session_pid = 0
            _, status = os.waitpid(ended.si_pid, 0)
            self._ended(ended.si_pid, os.waitstatus_to_exitcode(status))

    def _ended(self, pid: int, status: int) -> None:
        if pid == self._session.pid:
            self._session.pid = 0
            self._session_ended(status)
        elif pid == self._supervisor.pid:
            self._supervisor.pid = 0
            self._supervisor_ended(status)

    def _session_ended(self, status: int) -> None:
        board = self._board
        if self._end is not None:  # it was asked to, or the worker is ending anyway
            if status != ExitCode.OK and self._end is ExitCode.OK:
                self._end = _as_code(status)
            return
        if status >= 0 and status != ExitCode.INTERNAL:
            self._end = _as_code(status)
            return
        self._log.error("session_died", status=status, assigned=bool(board.assigned))
        if board.fenced:
            self._end = ExitCode.FENCED
        elif board.assigned or board.claiming:
            # Its keys died with it, and an order may have been in hand: another worker takes over.
            board.session_lost = 1
            self._end = ExitCode.SESSION_LOST
        elif self._session.crash_loop():
            self._end = ExitCode.CRASH_LOOP
        else:
            self._fork_session()

    def _supervisor_ended(self, status: int) -> None:
        if self._end is not None:
            return
        if status in (ExitCode.FENCED, ExitCode.CLAIM_REFUSED):
            self._stop_session(_as_code(status))
            return
        self._log.error("supervisor_died", status=status)
        if self._supervisor.crash_loop():
            self._stop_session(ExitCode.CRASH_LOOP)
        else:
            self._fork(self._supervisor)

    def _farewell(self) -> None:
        """The session is gone: the supervisor takes the mark away and goes too."""
        pid = self._supervisor.pid
        if not pid:
            return
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + _FAREWELL
        while time.monotonic() < until:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            signal.sigtimedwait({signal.SIGCHLD}, until - time.monotonic())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _as_code(status: int) -> ExitCode:
    try:
        return ExitCode(status)
    except ValueError:  # killed by a signal
        return ExitCode.SESSION_LOST
