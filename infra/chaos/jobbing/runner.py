"""One runner under fire: its process, and its line to Valkey, which kills it at a step."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from infra.chaos.jobbing.steps import TRAPS, Step, before

_CHUNK = 1 << 16


class Victim:
    """A runner that connects through a socket of its own. `on_end` is called once, after its process ended.

    Nothing of this is in the product: what a runner does for a job and others can see passes this line.
    """

    def __init__(self, name: str, folder: Path, target: tuple[str, int], on_end: Callable[[Victim], None]):
        self.name = name
        self.path = folder / f"{name}.sock"
        self._target = target
        self._on_end = on_end
        self._step: Step | None = None
        self._delay = 0.0
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
        self.struck: Step | None = None

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

    def arm(self, step: Step, delay: float = 0.0) -> None:
        """It dies at the next such step; at `ANY` and `RUNNING` after `delay` more seconds."""
        self._step, self._delay = step, delay
        if step is Step.ANY:
            self._spawn(self._kill_later(step, delay))

    def expire(self, seconds: float) -> None:
        """It dies after so long in any case."""
        self._spawn(self._kill_later(Step.ANY, seconds))

    def disarm(self) -> None:
        """It may live."""
        self._step = None
        for task in self._tasks:
            task.cancel()

    def kill(self, step: Step) -> None:
        """SIGKILL, to this process and no other one that has its number by now."""
        if self.struck is None and self._pidfd >= 0:
            self.struck, self.killed_at, self._step = step, time.monotonic(), None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Ends the line; the process is somebody else's."""
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

    async def _kill_later(self, step: Step, delay: float) -> None:
        await self._born.wait()
        await asyncio.sleep(delay)
        self.kill(step)

    # --- the line ---------------------------------------------------------------------------------

    async def _accepted(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            answers, far = await asyncio.open_connection(*self._target)
        except OSError:
            near.transport.abort()
            return
        self._links |= {near, far}
        line = _Line(self, near, far)
        try:
            await asyncio.gather(line.asks(reader), line.answers(answers))
        finally:
            for link in (near, far):
                link.transport.abort()
                self._links.discard(link)

    async def spring(self, step: Step) -> None:
        await self._born.wait()  # it may be quicker than those who tell its number
        self.kill(step)

    def running(self) -> None:
        """The jobs are in its hands."""
        self._step = None
        self._spawn(self._kill_later(Step.RUNNING, self._delay))

    @property
    def step(self) -> Step | None:
        return self._step


class _Line:
    """One connection of a runner and its other half."""

    def __init__(self, victim: Victim, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._victim = victim
        self._near = near
        self._far = far
        #: The step that the next answer belongs to.
        self._asked: Step | None = None

    async def asks(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                step = self._victim.step
                trap = TRAPS.get(step) if step is not None else None
                if step is not None and trap is not None and trap.says in data:
                    if trap.before:
                        self._far.write(before(data, trap.cut))
                        await self._far.drain()
                        await self._victim.spring(step)
                        return
                    self._asked = step
                self._far.write(data)
                await self._far.drain()
        self._far.transport.abort()

    async def answers(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                step, self._asked = self._asked, None
                if step is not None and self._victim.step is step and TRAPS[step].hears in data:
                    if step is not Step.RUNNING:
                        await self._victim.spring(step)
                        return
                    self._victim.running()
                self._near.write(data)
                await self._near.drain()
        self._near.transport.abort()
