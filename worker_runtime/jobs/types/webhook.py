"""The job `webhook`: one signed POST."""

import time

from worker_runtime.jobs.config import WebhookOutlet
from worker_runtime.jobs.protocol import webhook_signing as signing
from worker_runtime.jobs.protocol.catalog import JOB_KINDS, DeliverWebhook, WebhookReceipt
from worker_runtime.jobs.protocol.messages import JobFailed
from worker_runtime.jobs.types.job_type import JobContext, JobType, RetryLater

#: Statuses after which another attempt makes sense, in addition to all from 500 on.
_PASSING_STATUSES = frozenset({408, 425, 429})


class WebhookRefused(JobFailed, code="WEBHOOK_REFUSED"):
    """The receiver refused the delivery."""


class WebhookDeferred(RetryLater, code="WEBHOOK_DEFERRED"):
    """The receiver cannot take the delivery now."""


def webhook_job(outlet: WebhookOutlet) -> JobType:
    """Returns the type `webhook`, with the fleet's keys."""

    def deliver(arguments: DeliverWebhook, context: JobContext) -> WebhookReceipt:
        # Imported here: TLS and HTTP would cost every runner and child some MiB.
        from worker_runtime.jobs.types import webhook_client

        body = bytes(arguments.body)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "Berth",
            signing.DELIVERY_HEADER: context.job_id,
            signing.EVENT_HEADER: arguments.event,
            signing.ATTEMPT_HEADER: str(context.attempt),
            signing.SIGNATURE_HEADER: signing.sign_delivery(
                outlet.keys, arguments.recipient, int(time.time()), body
            ),
        }
        begun = time.monotonic()
        reply = webhook_client.send_post(arguments.url, body, headers, outlet)
        elapsed = (time.monotonic() - begun) * 1000
        if 200 <= reply.status < 300:
            return WebhookReceipt(status=reply.status, elapsed_ms=round(elapsed, 3))
        if reply.status in _PASSING_STATUSES or reply.status >= 500:
            raise WebhookDeferred(f"status {reply.status}", retry_after=reply.retry_after)
        why = ": redirects are not followed" if 300 <= reply.status < 400 else ""
        raise WebhookRefused(f"status {reply.status}{why}")

    return JobType(name=JOB_KINDS[DeliverWebhook].name, arguments=DeliverWebhook, run=deliver)
