"""Runs a runner behind a proxy to Valkey, which kills or freezes it at a chosen step."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from math import inf
from pathlib import Path

from infra.lab.chaos.jobs.freeze import FreezePlan, FrozenProcess
from infra.lab.chaos.jobs.ledger import RunnerFreeze
from infra.lab.chaos.jobs.steps import TRAPS, RunnerStep

_CHUNK_BYTES = 1 << 16


class ProxiedRunner:
    """A runner that connects to Valkey through a socket of its own.

    All effects that others can see pass this proxy, so the product needs no code for it. With a
    `FreezePlan` the runner is frozen at its step instead of killed; it continues later, and is
    killed then. `on_end` is called once its process has ended, `on_freeze` when it is frozen
    and needs a replacement.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        target: tuple[str, int],
        on_end: Callable[[ProxiedRunner], None],
        on_freeze: Callable[[], None],
    ):
        self.name = name
        self.path = folder / f"{name}.sock"
        self._target = target
        self._on_end = on_end
        self._on_freeze = on_freeze
        self._step: RunnerStep | None = None
        self._delay = 0.0
        self._freeze_plan: FreezePlan | None = None
        self._freezing: asyncio.Task[None] | None = None
        self._still = asyncio.Event()
        self._thaw = asyncio.Event()
        self._spared = False
        self._pid_known = asyncio.Event()
        #: 0 until it is known.
        self.pid = 0
        self._pidfd = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        #: Lives long enough to notice that others have died.
        self.steady = False
        #: The step at which it was killed, and when (CLOCK_MONOTONIC).
        self.killed_at = 0.0
        self.killed_step: RunnerStep | None = None
        #: The number of times that it gave prefetched jobs back.
        self.releases = 0
        #: When it was frozen, and at which step.
        self.freeze: RunnerFreeze | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def open(self) -> None:
        """Listens; to be called before the runner starts."""
        self._server = await asyncio.start_unix_server(self._accepted, self.path)

    def started(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)
        self.pid = pid
        self._pid_known.set()

    def arm(self, step: RunnerStep, delay: float = 0.0, plan: FreezePlan | None = None) -> None:
        """Injects the fault at the next such step;
        at `ANY` and `RUNNING` after `delay` more seconds."""
        self._step, self._delay, self._freeze_plan = step, delay, plan
        if step is RunnerStep.ANY:
            self._spawn(self._inject_later(step, delay))

    def expire_after(self, seconds: float) -> None:
        """Injects the fault after `seconds` in any case."""
        self._spawn(self._inject_later(RunnerStep.ANY, seconds))

    def disarm(self) -> None:
        """Injects no further fault. A frozen runner still continues at its time."""
        self._spared = True
        self._step = self._freeze_plan = None
        for task in self._tasks:
            task.cancel()

    @property
    def frozen(self) -> bool:
        return self._freezing is not None and not self._freezing.done()

    def inject_fault(self, step: RunnerStep) -> bool:
        """Freezes the runner if that is planned, else kills it; true if it is killed."""
        plan, self._freeze_plan = self._freeze_plan, None
        if plan is None:
            self.kill(step)
            return True
        if self.killed_step is None and self._pidfd >= 0:
            self._step = None
            self._freezing = asyncio.get_running_loop().create_task(self._freeze(step, plan))
        return False

    async def thaw(self) -> None:
        """Lets a frozen runner continue before its time."""
        self._thaw.set()
        await self.wait_thawed()

    async def wait_thawed(self) -> None:
        """Waits until it continues."""
        if self._freezing is not None:
            await asyncio.wait([self._freezing])

    async def _freeze(self, step: RunnerStep, plan: FreezePlan) -> None:
        """Runs as a task that is never cancelled before the process continues."""
        still = FrozenProcess(self.pid, self._pidfd)
        began = time.monotonic()
        try:
            await still.begin(plan.children)
            self.freeze = RunnerFreeze(self.pid, began, inf, step)
            self._on_freeze()
            self._still.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._thaw.wait(), plan.seconds)
            self.freeze = RunnerFreeze(self.pid, began, time.monotonic(), step)
        finally:
            still.end()
        if not self._spared:
            self._spawn(self._inject_later(RunnerStep.THAWED, plan.life))

    def kill(self, step: RunnerStep) -> None:
        """Sends SIGKILL by descriptor: the process id may be another's by now."""
        if self.killed_step is None and self._pidfd >= 0:
            self.killed_step, self.killed_at, self._step = step, time.monotonic(), None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Closes the proxy; the process has another owner."""
        if self._freezing is not None:
            self._freezing.cancel()
            self._still.set()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        for task in self._tasks:
            task.cancel()
        for link in list(self._links):
            link.transport.abort()
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)

    def _ended(self) -> None:
        self.close()
        self._on_end(self)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _inject_later(self, step: RunnerStep, delay: float) -> None:
        await self._pid_known.wait()
        await asyncio.sleep(delay)
        self.inject_fault(step)

    # --- the proxy --------------------------------------------------------------------------------

    async def _accepted(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            answers, far = await asyncio.open_connection(*self._target)
        except OSError:
            near.transport.abort()
            return
        self._links |= {near, far}
        connection = _ProxyConnection(self, near, far)
        try:
            await asyncio.gather(
                connection.forward_requests(reader), connection.forward_replies(answers)
            )
        finally:
            for link in (near, far):
                link.transport.abort()
                self._links.discard(link)

    async def inject_at(self, step: RunnerStep) -> bool:
        """Injects the fault at this step; True if the runner was killed. If it was frozen, it has
        stopped by then."""
        await self._pid_known.wait()  # it may connect before its process id is known
        killed = self.inject_fault(step)
        if self.frozen:
            await self._still.wait()
        return killed

    def jobs_started(self) -> None:
        """Notes that a claim has brought jobs."""
        self._step = None
        self._spawn(self._inject_later(RunnerStep.RUNNING, self._delay))

    @property
    def step(self) -> RunnerStep | None:
        return self._step


class _ProxyConnection:
    """A connection of a runner and the one to Valkey behind it."""

    def __init__(
        self, runner: ProxiedRunner, near: asyncio.StreamWriter, far: asyncio.StreamWriter
    ) -> None:
        self._runner = runner
        self._near = near
        self._far = far
        #: The step that the next reply belongs to.
        self._step_asked: RunnerStep | None = None

    async def forward_requests(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                self._runner.releases += TRAPS[RunnerStep.RETURN_ASKED].matches(data)
                step = self._runner.step
                trap = TRAPS.get(step) if step is not None else None
                if step is not None and trap is not None and trap.matches(data):
                    if trap.before:
                        heard = trap.sent_part(data)
                        self._far.write(heard)
                        await self._far.drain()
                        if await self._runner.inject_at(step):
                            return
                        await self._runner.wait_thawed()  # then the rest arrives late
                        data = data[len(heard) :]
                    else:
                        self._step_asked = step
                self._far.write(data)
                await self._far.drain()
        self._far.transport.abort()

    async def forward_replies(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                step, self._step_asked = self._step_asked, None
                if (
                    step is not None
                    and self._runner.step is step
                    and TRAPS[step].reply_contains in data
                ):
                    if step is RunnerStep.RUNNING:
                        self._runner.jobs_started()
                    elif await self._runner.inject_at(step):
                        return
                self._near.write(data)
                await self._near.drain()
        self._near.transport.abort()
