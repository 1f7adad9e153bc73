"""The configuration of a job runner: one JSON document on standard input."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from worker_runtime.jobs.event_sink import BadEventSink, parse_sink_address
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import webhook_signing
from worker_runtime.process.config import BadConfig
from worker_runtime.process.valkey import BadValkeyAddress, ValkeyAddress

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Timeout = Annotated[float, msgspec.Meta(gt=0, le=60)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Key = Annotated[bytes, msgspec.Meta(min_length=webhook_signing.MIN_KEY_BYTES)]


class WebhookOutlet(msgspec.Struct, frozen=True, kw_only=True):
    """What webhook jobs need. Durations are seconds."""

    #: The fleet's keys: the present one first, then those that are being replaced.
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(min_length=1)]
    #: For each step of a delivery: connect, send, wait for the answer.
    timeout: _Timeout = 10.0
    #: Allows private addresses, and plain http to this machine: for tests, or for our own receivers.
    allow_private: bool = False
    #: Certificates to trust instead of the system's.
    ca_file: str = ""

    def __repr__(self) -> str:
        return "WebhookOutlet()"


class MailOutlet(msgspec.Struct, frozen=True, kw_only=True):
    """The server that sends our mails. Durations are seconds."""

    host: _Name
    sender: Annotated[str, msgspec.Meta(pattern="@")]
    port: int = 587
    #: `starttls` and `tls` check the server's certificate; `none` is for a server on the same machine.
    security: Literal["starttls", "tls", "none"] = "starttls"
    username: str = ""
    password: str = ""
    timeout: _Timeout = 20.0
    #: Certificates to trust instead of the system's.
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"MailOutlet(host={self.host!r})"


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one runner. Durations are seconds."""

    #: Stays the same over restarts: `berth jobs suspend --runner` names it.
    name: _Name
    valkey_url: str
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
    #: Between TERM and KILL of a job that has timed out or was cancelled.
    kill_grace: _Seconds = 5.0
    #: The runner ends after this long without a job; 0: never. Then something else must hear the doorbell.
    idle_exit: _Seconds = 0.0
    #: Without these the runner does not know the types of jobs that need them.
    webhook: WebhookOutlet | None = None
    mail: MailOutlet | None = None
    #: A collector that gets the jobs' events beside the log (`parse_sink_address`); empty: none.
    events_to: str = ""
    version: str = ""
    log_level: str = "INFO"

    def __repr__(self) -> str:  # the address may hold a password
        return f"RunnerConfig(name={self.name!r}, tag={self.tag!r})"


def parse_config(data: bytes) -> RunnerConfig:
    """Decodes and checks; raises `BadConfig` with the reason, never with a value."""
    try:
        config = msgspec.json.decode(data, type=RunnerConfig)
        if config.events_to:
            parse_sink_address(config.events_to)
        ValkeyAddress(config.valkey_url)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"standard input is no runner configuration: {error}") from None
    except BadEventSink as error:
        raise BadConfig(f"events_to: {error.detail}") from None
    except BadValkeyAddress as error:
        raise BadConfig(f"valkey_url: {error.detail}") from None
    return config
