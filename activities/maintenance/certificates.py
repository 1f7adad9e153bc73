"""Warns users of certificates that expire: 30, 7 and 1 days ahead, and when they have."""

import asyncio
from collections.abc import Iterable

import msgspec
import structlog

from infra.database import certificates
from infra.database.certificates import CertificateWarning
from infra.database.engine import Database
from infra.jobs.kept import KeptJobs
from infra.market.calendar import HOME_ZONE
from worker_runtime.jobs.protocol.catalog import DeliverWebhook, SendEmail, make_job
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.protocol.errors import MalformedMessage

#: Seconds between two looks.
CHECK_INTERVAL_S = 60.0
#: Name of the event in deliveries to a user's own receiver (`DeliverWebhook.event`).
EVENT = "certificate.expires"

log = structlog.get_logger()


async def warn_of_certificates(
    database: Database, jobs: KeptJobs, period_s: float = CHECK_INTERVAL_S
) -> None:
    """Warns of certificates that expire soon, in a background loop."""
    while True:
        try:
            while await send_due(database, jobs):
                pass
        except Exception as error:  # the boundary of a loop: a server is away
            log.warning(
                "certificates_not_watched", error=type(error).__name__, reason=str(error)[:200]
            )
        await asyncio.sleep(period_s)


async def send_due(database: Database, jobs: KeptJobs) -> int:
    """Sends the warnings that are due, at most 50; returns how many.

    The jobs are made before the warnings are marked as given, and are named after the account, the
    version of its credentials and the warning: a process that dies in between sends nothing twice.
    """
    async with database.session() as session:
        warnings = await certificates.take_warnings(session)
        for warning in warnings:
            for job in _jobs_of(warning):
                await jobs.enqueue(job)
            log.warning(
                "certificate_expires",
                user=warning.user_id,
                account=warning.account_id,
                days=warning.days,
            )
    return len(warnings)


def _jobs_of(warning: CertificateWarning) -> Iterable[Job]:
    ends = warning.expires_at.astimezone(HOME_ZONE)
    when = (
        f"expired on {ends:%Y-%m-%d %H:%M}"
        if not warning.days
        else f"expires on {ends:%Y-%m-%d %H:%M}"
    )
    work: list[tuple[str, SendEmail | DeliverWebhook]] = []
    if warning.email:
        text = (
            f"The certificate of account {warning.account_id} at {warning.broker} {when} "
            f"({HOME_ZONE} time).\n"
            "Orders are refused once it has expired. Get a new certificate from the broker and "
            "store it\n"
            "with the account's credentials.\n"
        )
        subject = f"The certificate of account {warning.account_id} {when}"
        work.append(("mail", SendEmail(to=warning.email, subject=subject, text=text)))
    if warning.webhook_url:
        body = {
            "account_id": warning.account_id,
            "broker": warning.broker,
            "expires_at": warning.expires_at.isoformat(),
            "days": warning.days,
        }
        raw = msgspec.Raw(msgspec.json.encode(body))
        post = DeliverWebhook(
            url=warning.webhook_url, recipient=warning.user_id, event=EVENT, body=raw
        )
        work.append(("post", post))
    name = f"certificate-{warning.user_id}.{warning.account_id}.{warning.version}.{warning.days}"
    for kind, message in work:
        try:
            yield make_job(f"{name}-{kind}", message)
        except MalformedMessage as error:  # a wrong address keeps the other from the message
            log.warning("certificate_warning_not_sent", user=warning.user_id, reason=error.detail)
