"""The registry of a runner: the jobs that exist, as far as its configuration lets it do them."""

from __future__ import annotations

from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.ping import PING
from worker_runtime.jobs.registry import Registry
from worker_runtime.jobs.types.mail import email
from worker_runtime.jobs.types.orders import EXPORT, STATEMENT
from worker_runtime.jobs.types.snapshot import position_snapshot
from worker_runtime.jobs.types.statements import statement_email, statement_webhook
from worker_runtime.jobs.types.webhook import webhook


def registry(config: RunnerConfig) -> Registry:
    """Webhooks and mails need what only a fleet's runner is given; a user's worker has neither."""
    types = [PING, STATEMENT, EXPORT, position_snapshot(config.valkey_url)]
    if config.webhook is not None:
        types += [webhook(config.webhook), statement_webhook(config.webhook)]
    if config.mail is not None:
        types += [email(config.mail), statement_email(config.mail)]
    return Registry(*types)
