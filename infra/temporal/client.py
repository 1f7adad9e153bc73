"""The clients of Temporal, signals to workflows, and what a failed call means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import structlog
from temporalio.client import Client
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.service import RPCError, RPCStatusCode

from infra.settings import Settings
from worker_runtime.protocol.errors import BerthError

#: What one call may take that does not wait for a workflow. A busy host stands still for 2 to 3 s.
CALL = timedelta(seconds=5)
#: Seconds between two tries to reach Temporal at start.
RETRY = 0.5

#: A connection that breaks under a call is UNKNOWN ("transport error"), one that cannot be made UNAVAILABLE.
DOWN = {RPCStatusCode.UNAVAILABLE, RPCStatusCode.UNKNOWN, RPCStatusCode.RESOURCE_EXHAUSTED}
_SLOW = {RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED}
#: Answers that no repetition changes: there is no such workflow, or its id is not allowed.
_REFUSED = {RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT}

T = TypeVar("T")

log = structlog.get_logger()


class OrchestratorUnavailable(BerthError):
    """Temporal answers, but no orchestrator took the work in time."""

    code = "ORCHESTRATOR_UNAVAILABLE"
    retryable = True


class TemporalUnavailable(BerthError):
    """Temporal cannot be reached."""

    code = "TEMPORAL_UNAVAILABLE"
    retryable = True


async def connect_orchestrator(settings: Settings) -> Client:
    """The orchestrator's client. Tries until Temporal answers: it may start later, or be away for a while."""
    runtime = Runtime(telemetry=TelemetryConfig())
    while True:
        try:
            return await Client.connect(
                settings.temporal_address, namespace=settings.temporal_namespace, runtime=runtime
            )
        except (RuntimeError, RPCError) as error:
            log.warning("temporal_not_reachable", address=settings.temporal_address, reason=str(error)[:200])
            await asyncio.sleep(RETRY)


async def signal_workflow(client: Client, workflow_id: str, signal: str, *message: object) -> bool:
    """Sends a signal; False if there is no such workflow. Raises `RPCError` when Temporal does not answer."""
    try:
        await client.get_workflow_handle(workflow_id).signal(signal, args=message, rpc_timeout=CALL)
    except RPCError as error:
        if error.status not in _REFUSED:
            raise
        return False
    return True


async def unless_missing(call: Awaitable[T]) -> T | None:
    """The answer of a call; None if what it asks about does not exist. Raises other `RPCError`s."""
    try:
        return await call
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return None


def error_of_rpc(error: RPCError, *, server_only: bool = False) -> BerthError:
    """What a failed call to Temporal means to our caller. `server_only`: no orchestrator has a part in it."""
    if error.status in DOWN:
        return TemporalUnavailable()
    if error.status in _SLOW:
        return TemporalUnavailable() if server_only else OrchestratorUnavailable()
    return BerthError(f"Temporal: {error.status.name.lower()}")


@contextmanager
def temporal_errors(*, missing: BerthError | None = None, server_only: bool = False) -> Iterator[None]:
    """Turns errors of Temporal into ours; `missing` is raised for an unknown workflow or schedule."""
    try:
        yield
    except RPCError as error:
        if missing is not None and error.status == RPCStatusCode.NOT_FOUND:
            raise missing from None
        raise error_of_rpc(error, server_only=server_only) from None
    except RuntimeError:  # what a lazy client raises when its first connect fails
        raise TemporalUnavailable from None
