"""The configuration of a job runner: one JSON document on standard input."""

from typing import Annotated, Literal

import msgspec

from worker_runtime.jobs.own_types.config import OwnTypesConfig
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import webhook_signing
from worker_runtime.jobs.protocol.catalog import PROVIDER_QUEUES
from worker_runtime.jobs.protocol.messages import FAILED_TTL_S, FIFO_QUEUE, RUNNER_TTL_S
from worker_runtime.process.config import BadConfig
from worker_runtime.process.valkey import BadValkeyAddress, ValkeyAddress
from worker_runtime.protocol.authentication import MessageKey

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Timeout = Annotated[float, msgspec.Meta(gt=0, le=60)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Key = Annotated[bytes, msgspec.Meta(min_length=webhook_signing.MIN_KEY_BYTES)]


class PostOutlet(msgspec.Struct, frozen=True, kw_only=True):
    """Says how a POST goes out. Durations are seconds."""

    #: Limits all of a delivery, from the resolution of the receiver's name to the end of its
    #: answer.
    timeout: _Timeout = 10.0
    #: Allows private addresses, and plain http to this machine:
    #: for tests, or for our own receivers.
    allow_private: bool = False
    #: Certificates to trust instead of the system's.
    ca_file: str = ""

    def __repr__(self) -> str:  # what the others hold besides are secrets
        return f"{type(self).__name__}()"


class WebhookOutlet(PostOutlet, frozen=True, kw_only=True):
    """Holds what webhook jobs need."""

    #: The fleet's keys: the present one first, then those that are being replaced.
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(min_length=1)]


class MessagingOutlet(PostOutlet, frozen=True, kw_only=True):
    """The account at the provider of SMS and WhatsApp."""

    url: _Name
    account: _Name
    token: _Name
    #: A number (E.164) or a messaging service (`MG…`); empty: nothing is sent that way.
    sms_sender: str = ""
    whatsapp_sender: str = ""


class PushOutlet(PostOutlet, frozen=True, kw_only=True):
    """The service account with which pushes are sent; the names are those of its key file."""

    url: _Name
    project_id: _Name
    client_email: _Name
    private_key: _Name
    token_uri: _Name


class MailOutlet(msgspec.Struct, frozen=True, kw_only=True):
    """The server that sends our mails. Durations are seconds."""

    host: _Name
    sender: Annotated[str, msgspec.Meta(pattern="@")]
    port: int = 587
    #: `starttls` and `tls` check the server's certificate;
    #: `none` is for a server on the same machine.
    security: Literal["starttls", "tls", "none"] = "starttls"
    username: str = ""
    password: str = ""
    #: Limits all of a mail, from the resolution of the server's name to its answer.
    timeout: _Timeout = 60.0
    #: Certificates to trust instead of the system's.
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"MailOutlet(host={self.host!r})"


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one runner. Durations are seconds."""

    #: Stays the same over restarts: `berth jobs suspend --runner` names it.
    name: _Name
    valkey_url: str
    #: Under which the tag's jobs and results are signed; newest first.
    message_keys: Annotated[tuple[MessageKey, ...], msgspec.Meta(min_length=1)]
    #: The host or the task. Limits per node count by it.
    node: str = "local"
    #: `job_keys.user_tag` for a user's own jobs; the fleet's tag otherwise.
    tag: str = job_keys.FLEET_TAG
    #: `("*",)` means all.
    queues: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1)] = ("*",)
    #: Jobs that run at once.
    slots: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    #: Jobs that one child process runs; 1: each job gets a fresh one.
    recycle: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    #: A runner without a beat for this long counts as dead, and others take its jobs back.
    lease: Annotated[float, msgspec.Meta(ge=1, le=300)] = 5.0
    #: The time for which the runner's entry lives without a renewal, and beyond the timeout of its
    #: longest job.
    runner_ttl: Annotated[int, msgspec.Meta(ge=10, le=86_400)] = RUNNER_TTL_S
    timeout_margin: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = 60
    #: Between TERM and KILL of a job that has timed out or was cancelled.
    kill_grace: _Seconds = 5.0
    #: The time for which a failed job is kept.
    failed_ttl: Annotated[int, msgspec.Meta(ge=1)] = FAILED_TTL_S
    #: The runner ends after this long without a job; 0: never.
    #: Then something else must hear the doorbell.
    idle_exit: _Seconds = 0.0
    #: With it the runner runs the types of an application, and none of Berth's.
    own: OwnTypesConfig | None = None
    #: Without these the runner does not know the types of jobs that need them.
    webhook: WebhookOutlet | None = None
    mail: MailOutlet | None = None
    messaging: MessagingOutlet | None = None
    push: PushOutlet | None = None
    #: True if this runner's errors are reported to operators.
    report_errors: bool = False
    version: str = ""
    log_level: str = "INFO"

    @property
    def served_queues(self) -> tuple[str, ...]:
        """The queues; every runner of own types also serves the one that is first in, first out."""
        if self.own is None or "*" in self.queues or FIFO_QUEUE in self.queues:
            return self.queues
        return (*self.queues, FIFO_QUEUE)

    @property
    def receiver_limit(self) -> int:
        """Jobs of one receiver that run at once, so that a slow one leaves slots to others; 0: no
        limit, because all jobs have the same one."""
        only_one = len(self.queues) == 1 and self.queues[0] in PROVIDER_QUEUES
        return 0 if only_one else max(1, self.slots // 4)

    def __repr__(self) -> str:  # the address may hold a password
        return f"RunnerConfig(name={self.name!r}, tag={self.tag!r})"


def parse_config(data: bytes) -> RunnerConfig:
    """Decodes and checks; raises `BadConfig` with the reason, never with a value."""
    try:
        config = msgspec.json.decode(data, type=RunnerConfig)
        ValkeyAddress(config.valkey_url)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"the runner's configuration does not fit: {error}") from None
    except BadValkeyAddress as error:
        raise BadConfig(f"valkey_url: {error.detail}") from None
    return config
