"""The API's connection to Temporal, and the starter of workers on it."""

from __future__ import annotations

from datetime import timedelta

from temporalio.client import Client
from temporalio.service import RetryConfig

from infra.settings import Settings

#: One short repeat inside the SDK (a connection that broke while idle), then the truth at once. The SDK's
#: default would hide an outage for 10 s.
RETRY = RetryConfig(
    initial_interval_millis=20, max_interval_millis=50, max_elapsed_time_millis=300, max_retries=2
)
#: Seconds for one call that does not wait for a workflow. A busy host stands still for 2 to 3 s now and then.
CALL_TIMEOUT = 5.0


async def connect(settings: Settings) -> Client:
    """A lazy client: the API starts while Temporal is down, and connects with its first call."""
    return await Client.connect(
        settings.temporal_address,
        namespace=settings.temporal_namespace,
        lazy=True,
        retry_config=RETRY,
        connect_timeout=timedelta(seconds=CALL_TIMEOUT),
    )
