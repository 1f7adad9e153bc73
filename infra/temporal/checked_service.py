"""A connection to Temporal that is replaced when it has died silently:
bytes vanish, and nothing is closed.

The SDK's keep-alive finds that out, too, but not within seconds: the server allows a ping
every 10 s. So a connection that was idle for a moment is asked before a call, and while a call
waits for long. If it does not answer and a new one does, the new one takes its place, and
calls that may be repeated are.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import structlog
from google.protobuf.message import Message
from temporalio.client import ClientConfig, Plugin
from temporalio.service import (
    ConnectConfig,
    KeepAliveConfig,
    RPCError,
    RPCStatusCode,
    ServiceClient,
    ServiceResponse,
)

#: Finds a dead connection of a worker's long polls.
KEEP_ALIVE = KeepAliveConfig(interval_millis=15_000, timeout_millis=3_000)
#: Seconds without an answer after which the connection is asked.
SILENT_AFTER_S = 0.5
#: The time that the connection has for its answer, and the seconds after which a new connection is
#: opened, too.
CHECK_TIMEOUT, CONNECT_AFTER_S = timedelta(seconds=0.5), 0.25
#: Seconds that a new connection may take: about 10 ms, TLS included.
CONNECT_TIMEOUT_S = 1.0
#: A connection that does not answer a check in time.
_SILENT = {RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED}

Connect = Callable[[ConnectConfig], Awaitable[ServiceClient]]

log = structlog.get_logger()


class CheckedConnections(Plugin):
    """Has a client use a `CheckedService`."""

    def configure_client(self, config: ClientConfig) -> ClientConfig:
        return config

    async def connect_service_client(self, config: ConnectConfig, next: Connect) -> ServiceClient:
        return CheckedService(config, await next(config), next)


class CheckedService(ServiceClient):
    def __init__(self, config: ConnectConfig, service: ServiceClient, connect: Connect) -> None:
        super().__init__(config)
        self._service = service
        self._connect = connect
        #: All that are still used: a worker keeps the one with which it began.
        self._services = WeakSet([service])
        #: Instant of the last answer on `time.monotonic`; None: there was none yet.
        self._answered_at: float | None = None
        self._check: asyncio.Task[None] | None = None
        #: Set when the present connection is replaced.
        self._replaced = asyncio.Event()

    @property
    def worker_service_client(self) -> Any:
        return self._service.worker_service_client

    def update_rpc_metadata(self, metadata: Mapping[str, str | bytes]) -> None:
        for service in self._services:
            service.update_rpc_metadata(metadata)

    def update_api_key(self, api_key: str | None) -> None:
        for service in self._services:
            service.update_api_key(api_key)

    async def _rpc_call(
        self,
        rpc: str,
        req: Message,
        resp_type: type[ServiceResponse],
        *,
        service: str,
        retry: bool,
        metadata: Mapping[str, str | bytes],
        timeout: timedelta | None,
    ) -> ServiceResponse:
        await self._check_if_silent()
        call: Callable[[], Any] = lambda: self._service._rpc_call(  # noqa: E731 - called twice
            rpc, req, resp_type, service=service, retry=retry, metadata=metadata, timeout=timeout
        )
        answer: ServiceResponse | None = await self._answer(call())
        if answer is None and retry:
            answer = await self._answer(call())
        if answer is None:
            raise RPCError("the connection died silently", RPCStatusCode.UNKNOWN, b"")
        return answer

    async def _answer(self, call: Any) -> Any:
        """Returns the answer to a call; None if its connection was replaced meanwhile."""
        replaced = self._replaced
        answer = asyncio.ensure_future(call)
        try:
            while True:
                await asyncio.wait({answer}, timeout=SILENT_AFTER_S)
                if answer.done():
                    self._answered_at = time.monotonic()
                    return answer.result()
                await self._check_if_silent()
                if replaced.is_set() and not answer.done():
                    return None
        finally:
            answer.cancel()

    async def _check_if_silent(self) -> None:
        """Asks the connection if it was silent for a while; callers share one question."""
        if self._answered_at is None or time.monotonic() - self._answered_at < SILENT_AFTER_S:
            return
        if self._check is None:
            self._check = asyncio.create_task(
                self._replace_if_dead(), name="silent connection to Temporal"
            )
            self._check.add_done_callback(self._checked)
        await asyncio.wait({self._check})

    def _checked(self, check: asyncio.Task[None]) -> None:
        self._check = None
        if not check.cancelled() and (error := check.exception()) is not None:
            log.error("temporal_check_crashed", exc_info=error)

    async def _replace_if_dead(self) -> None:
        """Replaces the connection if a new one answers sooner, although it was asked later."""
        answers = asyncio.create_task(self._answers())
        try:
            await asyncio.wait({answers}, timeout=CONNECT_AFTER_S)
            if answers.done() and answers.result():
                return
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                fresh = await self._connect(replace(self.config, lazy=False))
            if await answers:
                return
        except (RuntimeError, RPCError, TimeoutError):
            return  # the server is away for all: the time limits of the calls apply
        finally:
            answers.cancel()
        log.warning("temporal_connection_dead")
        self._service = fresh
        self._services.add(fresh)
        self._answered_at = time.monotonic()
        self._replaced.set()
        self._replaced = asyncio.Event()

    async def _answers(self) -> bool:
        """Return True if the present connection brings an answer, of whatever kind."""
        try:
            await self._service.check_health(timeout=CHECK_TIMEOUT)
        except RPCError as error:
            if error.status in _SILENT:
                return False
        except RuntimeError:  # it is not connected
            return True
        self._answered_at = time.monotonic()
        return True
