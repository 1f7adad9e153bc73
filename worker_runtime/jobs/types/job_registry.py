"""The registry of a runner: the types of jobs that it knows, by name.

A message only names a job. Nothing that a message says is imported, and arguments are data that
must fit the type's struct.
"""

import os
from collections.abc import Callable

import msgspec

from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol.catalog import JOB_KINDS, PingRunner, RunnerPong
from worker_runtime.jobs.protocol.messages import Job, UnknownJob
from worker_runtime.jobs.types.job_type import JobContext, JobType
from worker_runtime.jobs.types.mail import email_job
from worker_runtime.jobs.types.message import message_job
from worker_runtime.jobs.types.position_snapshot import position_snapshot_job
from worker_runtime.jobs.types.push import FcmProvider
from worker_runtime.jobs.types.statements import (
    EXPORT_JOB,
    STATEMENT_JOB,
    statement_email_job,
    statement_webhook_job,
)
from worker_runtime.jobs.types.twilio import SmsProvider, WhatsappProvider
from worker_runtime.jobs.types.webhook import webhook_job
from worker_runtime.protocol.authentication import AssignmentKeys
from worker_runtime.protocol.errors import MalformedMessage


class JobRegistry:
    def __init__(self, *types: JobType) -> None:
        self._types = {kind.name: kind for kind in types}
        # Built in the parent: each fresh child would have to build its own.
        self._decoders = {kind.name: msgspec.json.Decoder(kind.arguments) for kind in types}

    def check(self, job: Job) -> None:
        """Raises `UnknownJob` if this runner does not run such a job."""
        self.find(job.name)

    def find(self, name: str) -> JobType:
        """Raises `UnknownJob`."""
        try:
            return self._types[name]
        except KeyError:
            lacking = (
                "webhooks need BERTH_WEBHOOK_KEY_FILE, mails BERTH_MAIL_HOST, sms and whatsapp "
                "BERTH_MESSAGING_ACCOUNT, push BERTH_PUSH_KEY_FILE, others a newer release"
            )
            raise UnknownJob(f"this runner does no {name[:64]!r}: {lacking}") from None

    def arguments(self, kind: JobType, raw: msgspec.Raw) -> msgspec.Struct:
        """Returns the arguments of one job; raises `MalformedMessage` if they do not fit its
        type."""
        try:
            return self._decoders[kind.name].decode(raw)
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"arguments of {kind.name}: {error}") from None


def answer_ping(arguments: PingRunner, context: JobContext) -> RunnerPong:
    """Answers the job `ping`, which shows that a fleet takes jobs, runs them and answers."""
    return RunnerPong(text=arguments.text, pid=os.getpid(), attempt=context.attempt)


PING_JOB = JobType(name=JOB_KINDS[PingRunner].name, arguments=PingRunner, run=answer_ping)


def build_registry(
    config: RunnerConfig, message_keys: Callable[[], AssignmentKeys] | None = None
) -> JobRegistry:
    """Returns the types that this configuration allows. Only the fleet's runners get what webhooks
    and mails need, and only users' own runners the keys with which a session is asked."""
    types = [PING_JOB, STATEMENT_JOB, EXPORT_JOB]
    if message_keys is not None:
        types += [position_snapshot_job(config.valkey_url, message_keys)]
    if config.webhook is not None:
        types += [webhook_job(config.webhook), statement_webhook_job(config.webhook)]
    if config.mail is not None:
        types += [email_job(config.mail), statement_email_job(config.mail)]
    if config.messaging is not None:
        types += [
            message_job(SmsProvider(config.messaging)),
            message_job(WhatsappProvider(config.messaging)),
        ]
    if config.push is not None:
        types += [message_job(FcmProvider(config.push))]
    return JobRegistry(*types)
