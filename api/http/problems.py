"""Errors as RFC 9457 problem details (`application/problem+json`), in answers and in OpenAPI."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from api.http import errors
from infra.database.engine import DatabaseUnavailable
from infra.database.orders.attention import OrderSettled, ResolutionInvalid
from infra.database.orders.states import OrderNotFound
from infra.database.trading.reconciliations import ReconciliationNotFound
from infra.database.users import UserExists, UserNotFound
from infra.jobs.client import JobIdReused
from infra.market.windows import ZoneUnknown
from worker_runtime.jobs.protocol.catalog import TooManyOrders
from worker_runtime.protocol import errors as protocol
from worker_runtime.protocol.errors import BerthError
from workflows.worker_pool.policy import PoolPolicyInvalid

MEDIA_TYPE = "application/problem+json"
#: Seconds, sent as `Retry-After` with every problem that may pass by itself, unless it is known when.
RETRY_AFTER = 1

#: HTTP status by error class; a subclass has its parent's unless it stands here itself.
_STATUS: dict[type[BerthError], int] = {
    BerthError: 500,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.BodyTooLarge: 413,
    UserExists: 409,
    UserNotFound: 404,
    OrderNotFound: 404,
    ReconciliationNotFound: 404,
    OrderSettled: 409,
    ResolutionInvalid: 422,
    protocol.Parked: 409,
    errors.PoolChanged: 409,
    errors.RolloutUnderWay: 409,
    errors.RolloutInvalid: 422,
    PoolPolicyInvalid: 422,
    ZoneUnknown: 422,
    errors.ClientOrderIdReused: 409,
    errors.RequestIdReused: 409,
    errors.NotAtBroker: 409,
    errors.NoPosition: 409,
    errors.PositionBusy: 409,
    errors.CloseNotFilled: 409,
    errors.IntentExpired: 409,
    errors.OrderUnknown: 409,
    protocol.SymbolBlocked: 409,
    protocol.AccountBlocked: 409,
    errors.InvalidRequest: 422,
    errors.ReplaceInvalid: 422,
    errors.CloseInvalid: 422,
    protocol.UnknownAccount: 422,
    protocol.LoginRejected: 422,
    protocol.OrderRejected: 422,
    protocol.DeadlineExceeded: 422,
    protocol.CheckFailed: 422,
    protocol.DuplicateOrder: 409,
    protocol.DailyOrderLimit: 429,
    protocol.TradingHalted: 423,
    protocol.ReducingOnly: 423,
    protocol.LoginLimited: 429,
    protocol.RateLimited: 429,
    errors.TooManyStreams: 429,
    errors.TooManyJobs: 429,
    JobIdReused: 409,
    TooManyOrders: 422,
    errors.AlertOutdated: 422,
    errors.WebhookBusy: 429,
    errors.NoAnswer: 504,
}


#: Which server an error speaks of, as `/v1/readyz` names it.
_DEPENDENCIES: dict[type[BerthError], str] = {
    DatabaseUnavailable: "postgresql",
    errors.ValkeyUnavailable: "valkey",
    errors.TemporalUnavailable: "temporal",
}


class ProblemError(Exception):
    """Carries an error to the handler together with members of its own, such as the order it left behind."""

    def __init__(self, error: BerthError, **members: BaseModel | Sequence[BaseModel]) -> None:
        super().__init__(error.detail)
        self.error = error
        self.members = members


def status_of(error: type[BerthError] | BerthError) -> int:
    """The HTTP status of an error; 503 for anything retryable that has none of its own, else 500."""
    kind = error if isinstance(error, type) else type(error)
    for cls in kind.__mro__:
        if cls is BerthError:
            break
        if cls in _STATUS:
            return _STATUS[cls]
    return 503 if kind.retryable or issubclass(kind, protocol.BrokerError) else 500


def body_of(error: BerthError, *, instance: str = "", request_id: str = "", **members: Any) -> dict[str, Any]:
    """The members of one problem."""
    found: dict[str, Any] = {
        "type": f"urn:berth:problem:{error.code.lower().replace('_', '-')}",
        "title": error.title(),
        "status": status_of(error),
        "detail": error.detail,
        "code": error.code,
        "retryable": error.retryable,
    }
    if instance:
        found["instance"] = instance
    if request_id:
        found["request_id"] = request_id
    for kind, name in _DEPENDENCIES.items():
        if isinstance(error, kind):
            found["dependency"] = name
    if isinstance(error, errors.InvalidRequest) and error.errors:
        found["errors"] = error.errors
    return found | members


def redacted_path(path: str) -> str:
    """A path as logs and problems may show it: the one of a webhook has its token in it."""
    return "/v1/webhooks/…" if path.startswith("/v1/webhooks/") else path


def response_of(error: BerthError, *, instance: str = "", request_id: str = "", **members: Any) -> Response:
    body = body_of(error, instance=instance, request_id=request_id, **members)
    headers = {}
    if error.retryable:
        known = error.retry_after
        headers["Retry-After"] = str(RETRY_AFTER if known is None else max(1, math.ceil(known)))
    if body["status"] == 401:
        headers["WWW-Authenticate"] = "ApiKey"
    return Response(json.dumps(body, default=_plain), body["status"], headers, MEDIA_TYPE)


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _answer(scope: Scope, error: BerthError, **members: Any) -> Response:
    request_id = scope.get("state", {}).get("request_id", "")
    scope["berth.code"] = error.code  # for the access log
    return response_of(error, instance=redacted_path(scope["path"]), request_id=request_id, **members)


def invalid_request(failures: Sequence[Mapping[str, Any]], *within: str) -> errors.InvalidRequest:
    """The error that pydantic's mean, without any value; `within`: where the model stands."""
    found = [
        {"loc": [*within, *map(str, one["loc"])], "msg": str(one["msg"]), "type": str(one["type"])}
        for one in failures
    ]
    where = ", ".join(".".join(one["loc"]) for one in found[:5])
    return errors.InvalidRequest(f"not valid: {where}", found)


def _of_http(failure: HTTPException) -> BerthError:
    """What Starlette and FastAPI refuse by themselves; all that we refuse is a `BerthError`."""
    match failure.status_code:
        case 404:
            return errors.NotFound()
        case 405:
            return errors.MethodNotAllowed()
        case status if status < 500:
            return errors.InvalidRequest("the request cannot be read")
    return BerthError()


def problem_response(scope: Scope, error: Exception) -> Response:
    """The problem that one of `_KINDS` becomes; raises any other error again."""
    match error:
        case ProblemError():
            return _answer(scope, error.error, **error.members)
        case BerthError():
            return _answer(scope, error)
        case RequestValidationError():
            return _answer(scope, invalid_request(error.errors()))
        case RedisError():
            return _answer(scope, errors.ValkeyUnavailable())
        case HTTPException():
            response = _answer(scope, _of_http(error))
            response.headers.update(error.headers or {})  # 405 names the allowed methods
            return response
    raise error


_KINDS = (ProblemError, BerthError, RequestValidationError, RedisError, HTTPException)


def install(app: FastAPI) -> None:
    """Makes every error of the app a problem."""

    async def on_error(request: Request, error: Exception) -> Response:
        return problem_response(request.scope, error)

    for kind in _KINDS:
        app.add_exception_handler(kind, on_error)


#: What every operation behind an API key may answer.
_ALWAYS = (errors.Unauthenticated, errors.InvalidRequest, DatabaseUnavailable, BerthError)


def responses(*kinds: type[BerthError], public: bool = False) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI `responses` of an operation that may fail with these errors, with an example of each.

    `public`: the operation needs no API key, so that what comes with a key is left out.
    """
    found: dict[int | str, dict[str, Any]] = {}
    for kind in (*kinds, *(() if public else _ALWAYS)):
        empty = {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}
        entry = found.setdefault(status_of(kind), {"description": "", "content": {MEDIA_TYPE: empty}})
        examples = entry["content"][MEDIA_TYPE]["examples"]
        if kind.code not in examples:
            examples[kind.code] = {"summary": kind.title(), "value": body_of(kind(), instance="/v1/…")}
            entry["description"] = f"{entry['description']} {kind.title()}".strip()
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def content(description: str, media_type: str, example: str | None = None) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI `responses` of an operation that answers with text of this type."""
    shown: dict[str, Any] = {"schema": {"type": "string"}}
    if example is not None:
        shown["example"] = example
    return {200: {"description": description, "content": {media_type: shown}}}


#: Schema of a problem in OpenAPI. Written out: no route returns it as its model.
SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "RFC 9457 problem details. `code` is stable; `detail` is for people.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retryable"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "retryable": {
            "type": "boolean",
            "description": "The same call may succeed later without anyone changing anything.",
        },
        "instance": {"type": "string"},
        "request_id": {"type": "string"},
        "dependency": {"type": "string", "enum": ["postgresql", "valkey", "temporal"]},
        "errors": {"type": "array", "items": {"type": "object"}},
        "order": {
            "$ref": "#/components/schemas/OrderView",
            "description": "The order that exists nevertheless. Repeat with the same client order id to learn"
            " its outcome; take a new one to try again.",
        },
        "legs": {
            "type": "array",
            "items": {"$ref": "#/components/schemas/OrderView"},
            "description": "The orders of an intent that exist nevertheless.",
        },
    },
}
