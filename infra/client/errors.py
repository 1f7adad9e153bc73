"""Why a call failed. Whatever is not one of these
is a mistake in the calling program, or in this client."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from msgspec import Struct

from .models import OrderSnapshot

#: How the types of answers begin that are no JSON: a file of orders, and what Prometheus reads.
TEXT_TYPES = ("text/csv", "text/plain; version=")


class BerthClientError(Exception):
    """The call has no result."""


class Unreachable(BerthClientError):
    """There was no answer: the connection failed, was lost, or nothing came in time."""

    def __init__(self, url: str, error: httpx.RequestError) -> None:
        #: False: the request was not sent. True: the API may have carried it out.
        self.sent = not isinstance(
            error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout
        )
        late = self.sent and isinstance(error, httpx.TimeoutException)
        super().__init__(
            f"the API at {url} did not answer in time" if late else f"no API answers at {url}"
        )


class UnexpectedAnswer(BerthClientError):
    """What answered is no API of Berth, or one that this release does not understand."""


class ProblemInvalidField(Struct, frozen=True):
    """Where a request does not fit its schema, and why."""

    loc: list[str | int] = []
    msg: str = ""


class ProblemDetails(Struct, frozen=True, kw_only=True):
    """RFC 9457 problem details, as the API sends them."""

    code: str
    title: str = ""
    detail: str = ""
    #: The same call may succeed later without anyone changing anything.
    retryable: bool = False
    request_id: str = ""
    dependency: str = ""
    errors: list[ProblemInvalidField] = []
    order: OrderSnapshot | None = None


class ApiError(BerthClientError):
    """The API refused the call, or could not carry it out."""

    def __init__(
        self, status: int, problem: ProblemDetails, retry_after: float | None = None
    ) -> None:
        #: HTTP status.
        self.status = status
        #: Stable code, such as `TRADING_HALTED`;
        #: empty when something in between answered, such as a proxy.
        self.code = problem.code
        self.detail = problem.detail or problem.title
        self.retryable = problem.retryable
        #: Seconds after which the same call may succeed, where the API says so.
        self.retry_after = retry_after
        #: What the API's log has this request under.
        self.request_id = problem.request_id
        #: The order that exists nevertheless.
        self.order = problem.order
        #: Fields that do not fit, each with the reason.
        self.fields = [
            f"{field.loc[-1] if field.loc else '?'}: {field.msg}" for field in problem.errors
        ]
        sentence = f"{self.code}: {self.detail}" if self.code else self.detail
        if self.fields:
            sentence = "; ".join([sentence.removesuffix("."), *self.fields])
        super().__init__(sentence)

    @classmethod
    def of(cls, answer: httpx.Response) -> ApiError:
        """Returns the error that an answer of 400 and above stands for."""
        try:
            problem = msgspec.json.decode(answer.content, type=ProblemDetails)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            url = answer.request.url
            problem = ProblemDetails(
                code="",
                detail=f"{url.scheme}://{url.netloc.decode()} answered {answer.status_code}",
            )
        given = answer.headers.get("retry-after", "")
        return cls(answer.status_code, problem, float(given) if given.isdigit() else None)


class OutcomeUnsettled(BerthClientError):
    """It is not known what became of an order.

    It may be at the broker: do not place it again under another id. Make the same call with the
    same ticket, or follow the user's orders, until its outcome is known. `__cause__` is what went
    wrong last, if anything.
    """

    def __init__(self, ticket_id: str, order: OrderSnapshot | None) -> None:
        #: `client_order_id` or `request_id` of the ticket.
        self.ticket_id = ticket_id
        #: The order as it was last seen.
        self.order = order
        state = f"last seen as {order.state}" if order is not None else "no answer has shown it yet"
        super().__init__(f"the outcome of {ticket_id} is not known: {state}")


def decode_answer(answer: httpx.Response, kind: Any) -> Any:
    """Returns the body of a successful answer as `kind`, None for a 204; with `Any` a file or the
    metrics are a text.

    Raises `ApiError`, `UnexpectedAnswer`.
    """
    if answer.status_code >= 400:
        raise ApiError.of(answer)
    if answer.status_code >= 300:
        raise UnexpectedAnswer(
            f"{answer.request.url} redirects elsewhere, which is not followed: is the API's "
            "address complete, and no id empty?"
        )
    if answer.status_code == 204:
        return None
    if kind is Any and answer.headers.get("content-type", "").startswith(TEXT_TYPES):
        return answer.text
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        url = answer.request.url
        message = f"what answers at {url.scheme}://{url.netloc.decode()} is no API of Berth"
        raise UnexpectedAnswer(f"{message}, or another release: {error}") from None
