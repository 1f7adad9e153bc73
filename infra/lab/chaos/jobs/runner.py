"""One runner under fire: its process, and its line to Valkey, which kills or freezes it at a step."""

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

_CHUNK = 1 << 16


class ProxiedRunner:
    """A runner that connects through a socket of its own. `on_end` is called once, after its process ended;
    `on_freeze` when it is stopped: somebody has to take its place.

    Nothing of this is in the product: what a runner does for a job and others can see passes this line.
    With a `FreezePlan` it is not killed at its step but frozen; then it goes on, and is killed later.
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
        self._spell: FreezePlan | None = None
        self._freezing: asyncio.Task[None] | None = None
        self._still = asyncio.Event()
        self._spared = False
        self._born = asyncio.Event()
        #: 0 until it is born.
        self.pid = 0
        self._pidfd = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        #: Lives long enough to notice the end of others.
        self.steady = False
        #: The step at which it was killed, and when (CLOCK_MONOTONIC).
        self.killed_at = 0.0
        self.struck: RunnerStep | None = None
        #: How often it gave jobs back that it had claimed ahead.
        self.returns = 0
        #: When it was frozen, and at which step.
        self.freeze: RunnerFreeze | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def open(self) -> None:
        """Listens; to be called before the runner starts."""
        self._server = await asyncio.start_unix_server(self._accepted, self.path)

    def born(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)
        self.pid = pid
        self._born.set()

    def arm(self, step: RunnerStep, delay: float = 0.0, spell: FreezePlan | None = None) -> None:
        """It is struck at the next such step; at `ANY` and `RUNNING` after `delay` more seconds."""
        self._step, self._delay, self._spell = step, delay, spell
        if step is RunnerStep.ANY:
            self._spawn(self._inject_later(step, delay))

    def expire(self, seconds: float) -> None:
        """It is struck after so long in any case."""
        self._spawn(self._inject_later(RunnerStep.ANY, seconds))

    def disarm(self) -> None:
        """It may live. If it stands still, it goes on when its time has come."""
        self._spared = True
        self._step = self._spell = None
        for task in self._tasks:
            task.cancel()

    @property
    def frozen(self) -> bool:
        return self._freezing is not None and not self._freezing.done()

    def strike(self, step: RunnerStep) -> bool:
        """Freezes it if that is in store, else kills it; true if it is killed."""
        spell, self._spell = self._spell, None
        if spell is None:
            self.kill(step)
            return True
        if self.struck is None and self._pidfd >= 0:
            self._step = None
            self._freezing = asyncio.get_running_loop().create_task(self._freeze(step, spell))
        return False

    async def wait_thawed(self) -> None:
        """Waits until it goes on."""
        if self._freezing is not None:
            await asyncio.wait([self._freezing])

    async def _freeze(self, step: RunnerStep, spell: FreezePlan) -> None:
        """A task of its own: whatever else is given up, what was stopped goes on."""
        still = FrozenProcess(self.pid, self._pidfd)
        began = time.monotonic()
        try:
            await still.begin(spell.children)
            self.freeze = RunnerFreeze(self.pid, began, inf, step)
            self._on_freeze()
            self._still.set()
            await asyncio.sleep(spell.seconds)
            self.freeze = RunnerFreeze(self.pid, began, time.monotonic(), step)
        finally:
            still.end()
        if not self._spared:
            self._spawn(self._inject_later(RunnerStep.THAWED, spell.life))

    def kill(self, step: RunnerStep) -> None:
        """SIGKILL, to this process and no other one that has its number by now."""
        if self.struck is None and self._pidfd >= 0:
            self.struck, self.killed_at, self._step = step, time.monotonic(), None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Ends the line; the process is somebody else's."""
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
        await self._born.wait()
        await asyncio.sleep(delay)
        self.strike(step)

    # --- the line ---------------------------------------------------------------------------------

    async def _accepted(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            answers, far = await asyncio.open_connection(*self._target)
        except OSError:
            near.transport.abort()
            return
        self._links |= {near, far}
        line = _ProxyConnection(self, near, far)
        try:
            await asyncio.gather(line.asks(reader), line.answers(answers))
        finally:
            for link in (near, far):
                link.transport.abort()
                self._links.discard(link)

    async def trigger(self, step: RunnerStep) -> bool:
        """True if it is killed; if it is frozen, it stands still by then."""
        await self._born.wait()  # it may be quicker than those who tell its number
        killed = self.strike(step)
        if self.frozen:
            await self._still.wait()
        return killed

    def running(self) -> None:
        """The jobs are in its hands."""
        self._step = None
        self._spawn(self._inject_later(RunnerStep.RUNNING, self._delay))

    @property
    def step(self) -> RunnerStep | None:
        return self._step


class _ProxyConnection:
    """One connection of a runner and its other half."""

    def __init__(self, victim: ProxiedRunner, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._victim = victim
        self._near = near
        self._far = far
        #: The step that the next answer belongs to.
        self._asked: RunnerStep | None = None

    async def asks(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                self._victim.returns += TRAPS[RunnerStep.RETURN_ASKED].sees(data)
                step = self._victim.step
                trap = TRAPS.get(step) if step is not None else None
                if step is not None and trap is not None and trap.sees(data):
                    if trap.before:
                        heard = trap.lets_through(data)
                        self._far.write(heard)
                        await self._far.drain()
                        if await self._victim.trigger(step):
                            return
                        await self._victim.wait_thawed()  # then the rest arrives, a spell late
                        data = data[len(heard) :]
                    else:
                        self._asked = step
                self._far.write(data)
                await self._far.drain()
        self._far.transport.abort()

    async def answers(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                step, self._asked = self._asked, None
                if step is not None and self._victim.step is step and TRAPS[step].hears in data:
                    if step is RunnerStep.RUNNING:
                        self._victim.running()
                    elif await self._victim.trigger(step):
                        return
                self._near.write(data)
                await self._near.drain()
        self._near.transport.abort()
