"""What a job runner is told when it starts: one JSON document on standard input."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from worker_runtime.jobs.event_sink import BadEventSink, parse_sink_address
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import webhook_signing
from worker_runtime.process.config import BadConfig
from worker_runtime.process.valkey import BadValkeyAddress, ValkeyAddress

#: Bytes.
_MAX_SIZE = 64 * 1024


class WebhookOutlet(msgspec.Struct, frozen=True, kw_only=True):
    """What deliveries need. Seconds."""

    #: The fleet's keys: the present one first, then those that are being replaced.
    keys: tuple[bytes, ...]
    #: For each step of a delivery: connect, send, wait for the answer.
    timeout: float = 10.0
    #: Private addresses are allowed, and plain http to this machine itself: tests, or receivers of our own.
    allow_private: bool = False
    #: Certificates to trust instead of the system's.
    ca_file: str = ""

    def __repr__(self) -> str:
        return "WebhookOutlet()"


class MailOutlet(msgspec.Struct, frozen=True, kw_only=True):
    """The server that takes our mails. Seconds."""

    host: str
    sender: str
    port: int = 587
    #: `starttls` and `tls` check the server's certificate; `none` is for a server on the same machine.
    security: Literal["starttls", "tls", "none"] = "starttls"
    username: str = ""
    password: str = ""
    timeout: float = 20.0
    #: Certificates to trust instead of the system's.
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"MailOutlet(host={self.host!r})"


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a runner needs to know. Durations are seconds."""

    #: Lasts across restarts: `berth jobs suspend --runner` names it.
    name: str
    valkey_url: str
    #: The host, or the task: limits of a node are counted by it.
    node: str = "local"
    #: `job_keys.of_user` for a user's own jobs; the fleet's tag otherwise.
    tag: str = job_keys.FLEET_TAG
    #: `("*",)` means all.
    queues: tuple[str, ...] = ("*",)
    #: Jobs that run at once.
    slots: int = 1
    #: Jobs that one child process runs; 1: each job gets a fresh one.
    recycle: int = 1
    #: Without a beat for this long the runner counts as dead, and its jobs come back.
    lease: float = 5.0
    #: Between TERM and KILL of a job that took too long or was cancelled.
    kill_grace: float = 5.0
    #: Without a job for this long the runner ends; 0: never. Somebody else has to hear the bell then.
    idle_exit: float = 0.0
    #: What jobs of these types need; without it the runner does not know them.
    webhook: WebhookOutlet | None = None
    mail: MailOutlet | None = None
    #: A collector that gets the events of jobs beside the log (`sink.address_of`); empty: none.
    events_to: str = ""
    version: str = ""
    log_level: str = "INFO"

    def __repr__(self) -> str:  # the address may hold a password
        return f"RunnerConfig(name={self.name!r}, tag={self.tag!r})"


def parse_config(data: bytes) -> RunnerConfig:
    """Decodes and checks; raises `BadConfig` with the reason, never with a value."""
    try:
        config = msgspec.json.decode(data, type=RunnerConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"standard input is no runner configuration: {error}") from None
    if not config.name or not config.queues or "" in config.queues:
        raise BadConfig("name and queues must not be empty")
    if not 1 <= config.slots <= 256 or not 1 <= config.recycle <= 100_000:
        raise BadConfig("slots are 1 to 256, recycle is 1 to 100000")
    if not 1.0 <= config.lease <= 300.0 or config.kill_grace < 0 or config.idle_exit < 0:
        raise BadConfig("lease is 1 to 300 s, kill_grace and idle_exit are not negative")
    _check_outlets(config)
    try:
        if config.events_to:
            parse_sink_address(config.events_to)
    except BadEventSink as error:
        raise BadConfig(f"events_to: {error.detail}") from None
    try:
        ValkeyAddress(config.valkey_url)
    except BadValkeyAddress as error:
        raise BadConfig(f"valkey_url: {error.detail}") from None
    return config


def _check_outlets(config: RunnerConfig) -> None:
    webhook, mail = config.webhook, config.mail
    if webhook is not None:
        if not webhook.keys or min(map(len, webhook.keys)) < webhook_signing.MIN_KEY_BYTES:
            raise BadConfig(f"webhook keys have at least {webhook_signing.MIN_KEY_BYTES} bytes each")
        if not 0 < webhook.timeout <= 60:
            raise BadConfig("a webhook's timeout is more than 0 and at most 60 s")
    if mail is not None and (not mail.host or "@" not in mail.sender or not 0 < mail.timeout <= 60):
        raise BadConfig("mail needs a host, a sender with an @, and a timeout of at most 60 s")


def read_config(descriptor: int = 0) -> RunnerConfig:
    """Reads the configuration to its end; raises `BadConfig`."""
    data = b""
    while chunk := os.read(descriptor, _MAX_SIZE):
        data += chunk
        if len(data) > _MAX_SIZE:
            raise BadConfig(f"standard input is longer than {_MAX_SIZE} bytes")
    return parse_config(data)
