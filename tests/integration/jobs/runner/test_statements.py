"""Daily statements by the runner that the fleet runs: to a mail server, and to a receiver of
webhooks."""

from __future__ import annotations

import json
from email import message_from_bytes
from email.policy import default
from typing import Any

from tests.support.jobs.order_rows import row
from tests.support.jobs.queue import KEYS
from tests.support.jobs.runners import RunnerFleet
from tests.support.receivers.mail import port_of, serving
from tests.support.receivers.webhooks import receiving
from worker_runtime.jobs.config import MailOutlet, WebhookOutlet
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import MailStatement, PostStatement, pack_orders
from worker_runtime.jobs.protocol.messages import JobStatus


def test_a_statement_reaches_its_user_by_mail_and_by_webhook(fleet: RunnerFleet) -> None:
    orders = pack_orders([row(1), row(2, side="sell")])
    about: dict[str, Any] = {"user_id": "alice", "day": "2026-11-20", "orders": orders}
    with receiving() as receiver, serving() as server:
        fleet.start(
            real=True,
            webhook=WebhookOutlet(keys=(b"k" * 32,), allow_private=True),
            mail=MailOutlet(
                host="127.0.0.1", port=port_of(server), sender="berth@example.com", security="none"
            ),
        )
        for job_id, work in (
            ("mailed", MailStatement(to="alice@example.com", **about)),
            ("posted", PostStatement(url=receiver.url, **about)),
        ):
            fleet.harness.call(job_calls.enqueue(catalog.make_job(job_id, work), KEYS))
            assert fleet.result(job_id).status is JobStatus.DONE
    [raw] = server.mails
    mail = message_from_bytes(raw, policy=default)
    text = mail.get_body()
    assert text is not None
    assert (mail["To"], mail["Subject"]) == ("alice@example.com", "Statement of 2026-11-20")
    assert "2330: bought 3 at 1001 on average; sold 3 at 1001 on average" in text.get_content()
    [(_, headers, body)] = receiver.got
    assert (headers["Berth-Event"], headers["Berth-Delivery"]) == ("statement.daily", "posted")
    assert json.loads(body)["lines"][0]["bought_average"] == "1001"
