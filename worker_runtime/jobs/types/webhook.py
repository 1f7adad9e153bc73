"""The job `webhook`: one signed POST."""

from __future__ import annotations

import time

from worker_runtime.jobs.config import WebhookOutlet
from worker_runtime.jobs.context import JobContext
from worker_runtime.jobs.registry import JobType, RetryLater
from worker_runtime.protocol import job_work
from worker_runtime.protocol.job_messages import JobFailed
from worker_runtime.protocol.job_work import WebhookDelivery, WebhookReceipt

#: Statuses that may be others later; all from 500 on may, too.
_PASSING = frozenset({408, 425, 429})
#: Seconds: a receiver's `Retry-After` beyond this is not waited for.
_LONGEST_WAIT = 3600.0


class WebhookRefused(JobFailed):
    """The receiver refused the delivery."""

    code = "WEBHOOK_REFUSED"


class WebhookDeferred(RetryLater):
    """The receiver cannot take the delivery now."""

    code = "WEBHOOK_DEFERRED"


def webhook(outlet: WebhookOutlet) -> JobType:
    """The type, with the fleet's keys."""

    def deliver(arguments: WebhookDelivery, context: JobContext) -> WebhookReceipt:
        # Here, not above: TLS and HTTP cost every runner and child some MiB.
        from worker_runtime.jobs.types import http_post
        from worker_runtime.protocol import webhook_signing as signing

        body = bytes(arguments.body)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "Berth",
            signing.DELIVERY: context.job_id,
            signing.EVENT: arguments.event,
            signing.ATTEMPT: str(context.attempt),
            signing.SIGNATURE: signing.signature(outlet.keys, arguments.recipient, int(time.time()), body),
        }
        begun = time.monotonic()
        reply = http_post.post(arguments.url, body, headers, outlet)
        elapsed = (time.monotonic() - begun) * 1000
        if 200 <= reply.status < 300:
            return WebhookReceipt(status=reply.status, elapsed_ms=round(elapsed, 3))
        if reply.status in _PASSING or reply.status >= 500:
            after = reply.retry_after
            wait = after if after is not None and after <= _LONGEST_WAIT else None
            raise WebhookDeferred(f"status {reply.status}", delay=wait)
        if 300 <= reply.status < 400:
            raise WebhookRefused(f"status {reply.status}: redirects are not followed")
        raise WebhookRefused(f"status {reply.status}")

    return JobType(name=job_work.WEBHOOK.name, arguments=WebhookDelivery, run=deliver)
