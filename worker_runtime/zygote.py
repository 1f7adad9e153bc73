"""The zygote: the parent of all of a worker's processes. It has no event loop, sockets or keys.

It imports once what its children need, forks supervisor and session, and a job runner while the
user has jobs, and reaps them. It runs no broker code, has one thread and takes its signals by
`sigtimedwait`, so nothing interrupts it.
"""

import errno
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.process import kernel
from worker_runtime.process.clock import NS_PER_S, wall_ms
from worker_runtime.process.doorbell import JOB_RUNNER_WANTED
from worker_runtime.process.log import Log
from worker_runtime.process.replacement import MAX_REPLACEMENTS, REPLACEMENT_WINDOW_S, CrashCounter
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.process.supervisor import Supervisor
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.session.session import Session

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_WAITED_SIGNALS = _STOP_SIGNALS | {signal.SIGCHLD, JOB_RUNNER_WANTED}
#: Seconds the supervisor gets to remove the mark: one connect and two commands.
_STOP_TIMEOUT_S = 4.0
#: Options for glibc's resolver, which waits 5 s twice for each name server by default: a name
#: server that is down must not stop the pulse of a healthy session or a renewal.
_RESOLVER_OPTIONS = "timeout:1 attempts:2"
#: More ends of one process within `_CRASH_WINDOW_S` seconds are a crash loop (a user's session is
#: replaced less often, see `replacement.py`).
_MAX_CRASHES = 5
_CRASH_WINDOW_S = 60.0
#: Seconds without a job runner after too many have died. What killed them may be over then.
_JOB_RUNNER_PAUSE_S = 300.0


@dataclass(eq=False, repr=False)
class ForkedProcess:
    """A child process: its main function, what its exit status means, its pid and its crashes."""

    name: str
    main: Callable[[], ExitCode]
    ended: Callable[[int], None]
    pid: int = 0
    crashes: CrashCounter = field(
        default_factory=lambda: CrashCounter(_MAX_CRASHES, _CRASH_WINDOW_S)
    )


class Zygote:
    """Forks and reaps the children, and decides what the end of each means."""

    def __init__(
        self, config: WorkerConfig, load_factory: Callable[[], BrokerFactory], log: Log
    ) -> None:
        self._config = config
        self._log = log
        self._shared_state = SharedState()
        self._shared_state.launched_at_ms = wall_ms()
        self._load_factory = load_factory
        self._supervisor = ForkedProcess("supervisor", self.supervisor_main, self._supervisor_ended)
        self._session = ForkedProcess("session", self.session_main, self._session_ended)
        self._jobs = ForkedProcess("jobs", self.jobs_main, self._jobs_ended)
        self._replacements = CrashCounter(MAX_REPLACEMENTS, REPLACEMENT_WINDOW_S)
        #: Set once: the code with which the whole worker ends.
        self._end: ExitCode | None = None
        self._kill_at: float | None = None

    def run(self) -> ExitCode:
        """Runs the worker to its end and returns its exit code. Leaves no child behind."""
        kernel.forbid_dumps()
        kernel.forbid_privileges()
        kernel.adopt_orphans()
        kernel.rename_process("berth-zygote")
        os.environ.setdefault("RES_OPTIONS", _RESOLVER_OPTIONS)
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_SIGNALS)
        gc.collect()
        gc.freeze()  # the children's collectors leave these pages alone, so they stay shared
        self._fork_session()
        self._fork(self._supervisor)
        while self._session.pid:
            self._await_signal()
            self._reap()
            # Number 0, of a session that has ended, would be our whole process group.
            if (
                self._session.pid
                and self._kill_at is not None
                and time.monotonic() >= self._kill_at
            ):
                self._log.error("shutdown_too_slow", timeout_s=self._config.shutdown_timeout)
                self._kill_at = None
                self._end = ExitCode.SHUTDOWN_TIMEOUT
                os.kill(self._session.pid, signal.SIGKILL)
        self._stop_helpers()
        # An SDK may have forked twice, into a session of its own.
        kernel.kill_children(_STOP_TIMEOUT_S)
        end = ExitCode.OK if self._end is None else self._end
        self._log.info("worker_ended", code=int(end))
        return end

    def session_main(self) -> ExitCode:
        log = self._log.bind(process="session")
        return Session(self._config, self._shared_state, self._load_factory, log).run()

    def supervisor_main(self) -> ExitCode:
        log = self._log.bind(process="supervisor")
        return Supervisor(self._config, self._shared_state, log).run()

    def jobs_main(self) -> ExitCode:
        # Here, not above: workers whose users have no jobs do not pay for it.
        from worker_runtime.jobs.runner import run_for_user

        return run_for_user(self._config, self._shared_state, self._log.bind(process="jobs"))

    def _fork_session(self) -> None:
        shared_state = self._shared_state
        shared_state.session_number += 1
        shared_state.claiming = 0
        shared_state.broker_open = (
            0  # its predecessor has been reaped, and its connections ended with it
        )
        shared_state.state = (
            WorkerActivity.Reconnecting if shared_state.assigned else WorkerActivity.PoolIdle
        )
        shared_state.busy_until = 0
        shared_state.pulse = time.monotonic_ns()
        self._fork(self._session)
        shared_state.session_pid = self._session.pid

    def _fork_jobs(self) -> None:
        """Forks a job runner because the supervisor has asked for it: a job waits."""
        shared_state = self._shared_state
        if self._end is not None or self._jobs.pid or not shared_state.assigned:
            return
        try:
            self._fork(self._jobs)
        except OSError as error:  # no memory or process id left; the supervisor asks again soon
            self._log.error(
                "job_runner_not_forked", reason=errno.errorcode.get(error.errno or 0, "")
            )
            return
        shared_state.jobs_pid = self._jobs.pid
        shared_state.jobs_number += 1

    def _fork(self, child: ForkedProcess) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            child.pid = pid
            return
        code = ExitCode.INTERNAL
        try:
            kernel.die_with_parent(parent)
            kernel.rename_process(f"berth-{child.name}")
            # Ctrl-C reaches the whole group; ours is SIGTERM.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            # SIGTERM stays blocked until the child has its handler.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_SIGNALS - {signal.SIGTERM})
            code = child.main()
        except BaseException as error:
            self._log.crash(f"{child.name}_crashed", error)
        finally:
            os._exit(code)  # at once: a broker SDK's threads must not hold the process

    def _await_signal(self) -> None:
        wait = 3600.0 if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        received = signal.sigtimedwait(_WAITED_SIGNALS, wait)
        if received is not None and received.si_signo == JOB_RUNNER_WANTED:
            self._fork_jobs()
        elif received is not None and received.si_signo in _STOP_SIGNALS:
            self._log.info("stop_requested", signal=signal.Signals(received.si_signo).name)
            self._stop_session(ExitCode.OK)

    def _stop_session(self, end: ExitCode) -> None:
        """Asks the session to finish its order; it is killed after `shutdown_timeout`."""
        if self._end is not None:
            return
        self._end = end
        self._kill_at = time.monotonic() + self._config.shutdown_timeout
        for child in (self._session, self._jobs):  # a running job may end, too
            if child.pid:
                os.kill(child.pid, signal.SIGTERM)

    def _reap(self) -> None:
        for pid in kernel.ended_children():
            if pid == self._session.pid:
                # Before the process is reaped, while its number cannot be given to another.
                self._shared_state.session_pid = 0
            _, status = os.waitpid(pid, 0)
            for child in (self._session, self._supervisor, self._jobs):
                if child.pid == pid:
                    child.pid = 0
                    child.ended(os.waitstatus_to_exitcode(status))
                    break  # it may have been forked anew, perhaps under the same number

    def _session_ended(self, status: int) -> None:
        shared_state = self._shared_state
        shared_state.session_end = status
        if self._end is not None:  # it was asked to, or the worker is ending anyway
            if status not in (ExitCode.OK, ExitCode.SESSION_REPLACE) and self._end is ExitCode.OK:
                self._end = _exit_code_of(status)
            return
        if status >= 0 and status not in (ExitCode.INTERNAL, ExitCode.SESSION_REPLACE):
            self._end = _exit_code_of(status)
            return
        self._log.error("session_died", status=status, assigned=bool(shared_state.assigned))
        if shared_state.fenced:
            self._end = ExitCode.FENCED
        elif shared_state.connected:
            self._replace_session()
        elif shared_state.assigned or shared_state.claiming:
            self._lose_session()  # a claim does not wait for a fresh key: another worker takes over
        elif self._session.crashes.add_and_check():
            self._end = ExitCode.CRASH_LOOP
        else:
            self._fork_session()

    def _replace_session(self) -> None:
        """Forks a fresh session for the same user. Its predecessor's orders are never executed
        again."""
        if self._replacements.add_and_check():
            self._log.error(
                "session_replaced_too_often", limit=MAX_REPLACEMENTS, window_s=REPLACEMENT_WINDOW_S
            )
            self._lose_session()
        else:
            self._fork_session()

    def _lose_session(self) -> None:
        self._shared_state.session_lost = 1
        self._end = ExitCode.SESSION_LOST

    def _supervisor_ended(self, status: int) -> None:
        if self._end is not None:
            return
        if status in (ExitCode.FENCED, ExitCode.CLAIM_REFUSED):
            self._stop_session(_exit_code_of(status))
            return
        self._log.error("supervisor_died", status=status)
        if self._supervisor.crashes.add_and_check():
            self._stop_session(ExitCode.CRASH_LOOP)
        else:
            self._fork(self._supervisor)

    def _jobs_ended(self, status: int) -> None:
        self._shared_state.jobs_pid = 0
        if status != ExitCode.OK and self._end is None:
            self._log.error("job_runner_died", status=status)
            if self._jobs.crashes.add_and_check():
                self._log.error(
                    "job_runners_paused", limit=_MAX_CRASHES, pause_s=_JOB_RUNNER_PAUSE_S
                )
                self._shared_state.jobs_not_before = time.monotonic_ns() + int(
                    _JOB_RUNNER_PAUSE_S * NS_PER_S
                )

    def _stop_helpers(self) -> None:
        """Stops the supervisor, which removes the mark, and the job runner, which gives its job
        back."""
        remaining = [child.pid for child in (self._supervisor, self._jobs) if child.pid]
        for pid in remaining:
            os.kill(pid, signal.SIGTERM)
        if self._jobs.pid:
            # After one signal a runner lets its job end, after two it does not. The kernel merges
            # two equal pending signals, so these differ.
            os.kill(self._jobs.pid, signal.SIGINT)
        until = time.monotonic() + _STOP_TIMEOUT_S
        while remaining and time.monotonic() < until:
            remaining = [pid for pid in remaining if not os.waitpid(pid, os.WNOHANG)[0]]
            if remaining:
                signal.sigtimedwait({signal.SIGCHLD}, max(0.0, until - time.monotonic()))
        for pid in remaining:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _exit_code_of(status: int) -> ExitCode:
    try:
        return ExitCode(status)
    except ValueError:  # killed by a signal
        return ExitCode.SESSION_LOST
