"""The master of an API with several processes:
starts and replaces them on one socket, adds up their counts.

It serves no request, and no process waits for it: nothing that happens to it or to metrics holds up
an order. Its end ends the processes (PDEATHSIG). When they keep ending it gives up and says why.
Whoever started it (`berth up`, compose, ECS, systemd) starts it again; meanwhile clients are
refused instead of left waiting.
"""

import asyncio
import itertools
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from subprocess import SubprocessError
from typing import Any, Final

import msgspec
import structlog

from api.processes.messages import (
    Alive,
    Ask,
    Counted,
    Failed,
    Gather,
    Gathered,
    ToMaster,
    receive,
    send,
)
from infra import tasks
from infra.process_metrics import Samples, merge_samples, without_gauges
from infra.processes import end_with_parent

#: Seconds that the other processes have to answer when one is scraped.
ANSWER_TIMEOUT_S: Final = 0.8
#: Seconds without a sign of life after which a process that serves is replaced. 5 were too short on
#: a busy machine: a process answers only between two pieces of work.
MAX_SILENCE_S: Final = 30.0
#: Seconds until a process must serve. It takes 1.5 on an idle core.
START_TIMEOUT_S: Final = 120.0
#: Seconds for a stop: requests under way get 30 (`STOP_GRACE_S`).
STOP_TIMEOUT_S: Final = 40.0
#: The master gives up after this many processes in a row
#: that ended before they served, if none serves.
MAX_FAILED_STARTS: Final = 5
#: And after this many ends of processes that had served, within `DEATHS_WINDOW_S`.
MAX_DEATHS: Final = 20
DEATHS_WINDOW_S: Final = 60.0
#: Seconds until the next start after a failed one, doubled with each further one.
RETRY_INTERVAL_S = 0.25
#: Seconds between two starts after failed ones, at most.
MAX_RETRY_INTERVAL_S = 5.0
#: More of them would be no longer pause, and at last too large a number.
MAX_DOUBLINGS: Final = 10
#: Seconds by which the master's own loop may be late.
#: Beyond that, the silence of others proves nothing.
MAX_LOOP_DELAY_S: Final = 5.0

log = structlog.get_logger()


class ServingProcess:
    """Describes a process of the API, as its master sees it."""

    def __init__(self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.writer = writer
        #: The counts of its last report.
        self.samples: Samples = {}
        self.started_at = time.monotonic()
        #: When it was heard last on `time.monotonic`; None:
        #: its connection is gone, so silence says nothing.
        self.heard_at: float | None = self.started_at
        self.serves = asyncio.Event()
        #: True if it ends because it was asked to.
        self.is_retired = False
        #: Why it ends, in its own words or in the master's.
        self.reason = ""
        self.ended = asyncio.Event()
        self._answers: dict[int, asyncio.Future[None]] = {}

    @property
    def pid(self) -> int:
        return self.process.pid

    def retire(self) -> None:
        """Asks the process to finish its requests and end."""
        self.is_retired = True
        if self.process.returncode is None:
            self.process.terminate()

    def kill(self, reason: str) -> None:
        self.reason = reason
        if self.process.returncode is None:
            self.process.kill()

    async def ask(self, number: int) -> bool:
        """Asks the process for its `samples`. Returns False if it did not answer in time."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            if self.serves.is_set() and send(self.writer, Ask(number)):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await answer
                    return True
        except TimeoutError:
            pass
        finally:
            del self._answers[number]
        return False

    def take(self, counted: Counted) -> None:
        self.samples = counted.samples
        answer = self._answers.get(counted.number)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def describe_end(self) -> str:
        code = self.process.returncode or 0
        status = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self.reason} ({status})" if self.reason else status


class Master:
    def __init__(self, listening: socket.socket, count: int, command: Sequence[str]) -> None:
        """Starts processes by `command`, with the descriptors of two sockets added, the listening
        one first."""
        self._listening = listening
        self._count = count
        self._command = command
        self._processes: list[ServingProcess] = []
        #: The counts of processes that have ended.
        self._samples_of_dead: Samples = {}
        self._died = 0
        self._failed_starts = 0
        self._deaths: deque[float] = deque()
        self._has_served = False
        self._numbers = itertools.count(1)
        self._stopping = asyncio.Event()
        #: Why the master gave up; empty: it did not.
        self._reason = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing: asyncio.Task[None] | None = None

    async def run(self) -> str:
        """Serves until SIGTERM or SIGINT. Returns why it gave up, or an empty text."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._replace_all_soon)
        async with tasks.running(self._watch_silence()):
            for _ in range(self._count):
                await self._start()
            await self._stopping.wait()
            await self._stop()
        return self._reason

    async def _start(self) -> ServingProcess:
        """Raises `OSError`, `SubprocessError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*self._command, str(self._listening.fileno()), str(theirs.fileno())]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(self._listening.fileno(), theirs.fileno()),
                    preexec_fn=end_with_parent(os.getpid()),
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        started = ServingProcess(process, writer)
        self._processes.append(started)
        self._spawn(self._attend(started, reader))
        if self._stopping.is_set():  # meanwhile
            started.retire()
        return started

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, process: ServingProcess, reader: asyncio.StreamReader) -> None:
        """Reads what a process says until it has ended, and sees to a successor."""
        listening = asyncio.create_task(self._listen(process, reader))
        await process.process.wait()
        # What it had sent is still to be read;
        # a process of its own that holds the socket must not keep us.
        await asyncio.wait({listening}, timeout=1.0)
        await tasks.cancel_tasks(listening)
        process.writer.close()
        self._processes.remove(process)
        merge_samples(self._samples_of_dead, without_gauges(process.samples))
        process.ended.set()
        if process.is_retired or self._stopping.is_set():
            log.info("api_process_ended", pid=process.pid)
            return
        self._died += 1
        log.error("api_process_died", pid=process.pid, reason=process.describe_end())
        pause = self._pause_after(process)
        if self._reason:
            self._stopping.set()
            return
        await self._start_successor(pause)

    async def _start_successor(self, pause: float) -> None:
        """Starts a process in place of one that died,
        and tries again as long as the machine refuses."""
        while True:
            await asyncio.sleep(pause)
            if self._stopping.is_set():
                return
            try:
                await self._start()
            except (OSError, SubprocessError) as error:
                # Too many processes or descriptors, no memory.
                why = f"{type(error).__name__}: {error}"
                log.error("api_process_not_started", reason=why)
                pause = self._pause_after_failed_start(why)
                if self._reason:
                    self._stopping.set()
            else:
                return

    def _pause_after(self, process: ServingProcess) -> float:
        """Return the seconds until the successor of a process
        that died is started, or set why to give up."""
        now = time.monotonic()
        if process.serves.is_set():
            self._failed_starts = 0
            self._deaths.append(now)
            while now - self._deaths[0] > DEATHS_WINDOW_S:
                self._deaths.popleft()
            if len(self._deaths) >= MAX_DEATHS:
                self._reason = (
                    f"{MAX_DEATHS} processes of the API died within {DEATHS_WINDOW_S:.0f} s; the "
                    f"last one: {process.describe_end()}"
                )
            return 0.0
        # One that says why it ends before any has served:
        # settings or keys, so the next one would fail, too.
        return self._pause_after_failed_start(
            process.describe_end(), is_final=bool(process.reason) and not self._has_served
        )

    def _pause_after_failed_start(self, why: str, *, is_final: bool = False) -> float:
        """Return the seconds until the next start,
        or set why to give up; `is_final`: it would fail again."""
        self._failed_starts += 1
        if any(other.serves.is_set() for other in self._processes):
            pass  # nobody ends a process that serves because another one cannot be started
        elif is_final:
            self._reason = f"the API cannot start: {why}"
        elif self._failed_starts >= MAX_FAILED_STARTS:
            self._reason = (
                f"{self._failed_starts} processes of the API in a row ended before they served; "
                f"the last one: {why}"
            )
        return min(
            RETRY_INTERVAL_S * 2.0 ** min(self._failed_starts - 1, MAX_DOUBLINGS),
            MAX_RETRY_INTERVAL_S,
        )

    async def _listen(self, process: ServingProcess, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(ToMaster)
        try:
            while True:
                message = await receive(reader, decoder)
                process.heard_at = time.monotonic()
                match message:
                    case None:
                        log.error("api_process_garbled", pid=process.pid)
                    case Alive():
                        if not process.serves.is_set():
                            process.serves.set()
                            self._has_served = True
                            self._failed_starts = 0
                    case Counted():
                        process.take(message)
                    case Failed(reason):
                        process.reason = reason
                    case Gather(number, samples):
                        process.samples = samples
                        self._spawn(self._gather(process, number))
        except (EOFError, OSError, OverflowError) as error:
            process.heard_at = None
            if isinstance(error, OverflowError):
                log.error("api_process_garbled", pid=process.pid, reason=str(error))

    async def _gather(self, scraped: ServingProcess, number: int) -> None:
        """Answers a process that was scraped."""
        question = next(self._numbers)
        others = [process for process in self._processes if process is not scraped]
        answers = await asyncio.gather(*(process.ask(question) for process in others))
        total = dict(self._samples_of_dead)
        for process in self._processes:
            merge_samples(total, process.samples)
        send(scraped.writer, Gathered(number, 1 + sum(answers), self._died, total))

    async def _watch_silence(self) -> None:
        """Kills processes that have stood still, so that they are replaced."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for process in self._processes:
                if not process.serves.is_set():
                    if now - process.started_at > START_TIMEOUT_S:
                        process.kill(f"it did not serve within {START_TIMEOUT_S:.0f} s")
                elif process.heard_at is not None:
                    if now - began > MAX_LOOP_DELAY_S:  # it was us who stood still
                        process.heard_at = now
                    if now - process.heard_at > MAX_SILENCE_S:
                        process.kill(f"no sign of life for {MAX_SILENCE_S:.0f} s")

    def _replace_all_soon(self) -> None:
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.create_task(self._replace_all())

    async def _replace_all(self) -> None:
        """Replaces each process once its successor serves (SIGHUP)."""
        for old in list(self._processes):
            if old.ended.is_set():  # it died meanwhile, and its successor is new already
                continue
            try:
                new = await self._start()
            except (OSError, SubprocessError) as error:
                log.error("api_not_replaced", reason=f"{type(error).__name__}: {error}")
                return
            waits = {
                asyncio.create_task(event.wait())
                for event in (new.serves, new.ended, self._stopping)
            }
            await asyncio.wait(waits, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            await tasks.cancel_tasks(*waits)
            if self._stopping.is_set():
                return
            if not new.serves.is_set():
                new.is_retired = True
                new.kill("not ready in time")
                log.error("api_not_replaced", reason=new.describe_end())
                return
            if old.ended.is_set():  # it died while this one started, and has a successor of its own
                new.retire()
                await new.ended.wait()
                continue
            old.retire()
            await old.ended.wait()
        log.info("api_replaced")

    async def _stop(self) -> None:
        for process in self._processes:
            process.retire()
        if self._replacing is not None:
            await tasks.cancel_tasks(self._replacing)
        waiting = [asyncio.create_task(process.ended.wait()) for process in self._processes]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=STOP_TIMEOUT_S)
            if late:
                for process in self._processes:
                    process.kill("the stop took too long")
                await asyncio.wait(late)
        await tasks.cancel_tasks(*self._tasks)


def listen_on(host: str, port: int) -> socket.socket:
    """Return the socket on which all processes accept. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError:
        listening.close()
        raise
    return listening


def serve_api(listening: socket.socket, count: int) -> int:
    """Runs the API in `count` processes; returns the exit code."""
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-m", "api.processes.server"]
    reason = asyncio.run(Master(listening, count, command).run())
    if reason:
        log.error("api_gave_up", reason=reason)
        return 1
    return 0
