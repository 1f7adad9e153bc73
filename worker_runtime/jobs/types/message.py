"""The jobs `sms`, `whatsapp` and `push`: one message, by one POST to the provider that carries it.

A provider says what to send, and reads its own answers (`MessageProvider`). What they have in
common is here: the POST, what a status means, and the time until another attempt. Texts of a
provider's errors are left out: they quote numbers and messages.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from worker_runtime.jobs.config import PostOutlet
from worker_runtime.jobs.protocol.catalog import JOB_KINDS, MessageReceipt
from worker_runtime.jobs.protocol.messages import JobFailed, JobOutcomeUnknown
from worker_runtime.jobs.types.deadline import TimeIsUp, deadline
from worker_runtime.jobs.types.job_type import JobContext, JobType, RetryLater

#: Bytes of an answer that are read, and most seconds that we choose until another attempt.
_MAX_ANSWER_BYTES, _MAX_RETRY_DELAY_S = 64 * 1024, 3600.0
#: After these the provider has not begun with the message: too late, too early, too many, not now.
_NOT_BEGUN_STATUSES = frozenset({408, 425, 429, 503})


class MessageRefused(JobFailed, code="MESSAGE_REFUSED"):
    """The provider refused the message."""


class MessageDeferred(RetryLater, code="MESSAGE_DEFERRED"):
    """The provider cannot take the message now."""


class ProviderLoginRefused(RetryLater, code="PROVIDER_LOGIN_REFUSED"):
    """The provider does not accept our login; messages wait until an operator corrects it."""


class ProviderRequest(NamedTuple):
    """Describes one POST."""

    url: str
    headers: dict[str, str]
    body: bytes


class MessageProvider(Protocol):
    """A service that carries messages of one type, which `arguments` describes."""

    @property
    def arguments(self) -> type[msgspec.Struct]: ...

    @property
    def outlet(self) -> PostOutlet: ...

    def request(self, message: Any, context: JobContext) -> ProviderRequest:
        """Returns the request that sends this message. May log in before, and raises what that
        raises."""

    def message_id(self, answer: Mapping[str, Any]) -> str:
        """Returns the provider's id of a message that it has accepted."""

    def error_code(self, answer: Mapping[str, Any]) -> str:
        """Returns the provider's name for what is wrong; empty if it gave none."""


def message_job(provider: MessageProvider) -> JobType:
    """Returns the type of job whose messages this provider carries."""
    kind = JOB_KINDS[provider.arguments]

    def send(message: msgspec.Struct, context: JobContext) -> MessageReceipt:
        begun = time.monotonic()
        request: ProviderRequest | None = None
        try:
            with deadline(provider.outlet.timeout):  # for a login before the message, too
                request = provider.request(message, context)
                status, answer, retry_after = post(
                    request, provider.outlet, repeatable=kind.idempotent
                )
        except TimeIsUp:  # outside of a POST
            if request is not None and not kind.idempotent:
                raise JobOutcomeUnknown("the provider may have sent the message") from None
            raise MessageDeferred("the provider is too slow") from None
        if 200 <= status < 300:
            elapsed = round((time.monotonic() - begun) * 1000, 3)
            return MessageReceipt(message_id=provider.message_id(answer)[:200], elapsed_ms=elapsed)
        said = f"status {status} {provider.error_code(answer)}".rstrip()
        if retry_after is None:
            retry_after = min(kind.retry_delay * 2 ** (context.attempt - 1), _MAX_RETRY_DELAY_S)
        if status == 401:
            raise ProviderLoginRefused(said, retry_after=retry_after)
        if status in _NOT_BEGUN_STATUSES or (status >= 500 and kind.idempotent):
            raise MessageDeferred(said, retry_after=retry_after)
        if status >= 500:
            raise JobOutcomeUnknown(f"{said}: the provider may have sent the message")
        raise MessageRefused(said)

    return JobType(name=kind.name, arguments=provider.arguments, run=send)


def post(
    request: ProviderRequest, outlet: PostOutlet, *, repeatable: bool
) -> tuple[int, Mapping[str, Any], float | None]:
    """Returns the status, the answer (empty if it is no JSON object) and the seconds after which
    it may be asked again.

    Raises `MessageDeferred`, `MessageRefused`, and `JobOutcomeUnknown` for what may have arrived
    and is not `repeatable`.
    """
    # Imported here: TLS and HTTP would cost every runner and child some MiB.
    from worker_runtime.jobs.types import webhook_client as client

    try:
        reply = client.send_post(
            request.url, request.body, request.headers, outlet, _MAX_ANSWER_BYTES
        )
    except client.ReceiverUnreachable as error:
        if error.sent and not repeatable:
            raise JobOutcomeUnknown(
                f"the connection broke with the message under way: {error}"
            ) from None
        raise MessageDeferred(f"the provider: {error.detail}") from None
    except (client.AddressRefused, client.CertificateRefused) as error:
        raise MessageRefused(f"the provider: {error.detail}") from None
    try:
        answer = msgspec.json.decode(reply.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = {}
    return reply.status, answer, reply.retry_after
