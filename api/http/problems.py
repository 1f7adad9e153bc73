"""Errors as RFC 9457 problem details (`application/problem+json`), in answers and in OpenAPI."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount
from starlette.types import Scope

from api.http import errors
from api.http.paths import public_path
from api.http.rights import ALL, RIGHTS, Role, is_counted
from infra.database.engine import DatabaseUnavailable, OutcomeUnconfirmed
from infra.database.quotas import DailyQuotaReached
from infra.jobs.registry import ArgumentsInvalid
from infra.valkey.failures import explain_failure
from worker_runtime.protocol import errors as protocol
from worker_runtime.protocol.errors import BerthError

MEDIA_TYPE = "application/problem+json"
#: Seconds, sent as `Retry-After` with every problem
#: that may pass by itself, unless it is known when.
RETRY_AFTER_S = 1

#: Why a request may find no worker of its user that could serve it.
WITHOUT_WORKER = (
    protocol.Parked,
    protocol.LoginRejected,
    protocol.LoginLimited,
    protocol.BrokerUnreachable,
    protocol.WorkerUnavailable,
    protocol.MemoryShort,
    errors.ValkeyUnavailable,
    errors.TemporalUnavailable,
    errors.OrchestratorUnavailable,
)
#: Which server an error speaks of, as `/v1/readyz` names it.
_DEPENDENCIES: dict[type[BerthError], str] = {
    DatabaseUnavailable: "postgresql",
    errors.ValkeyUnavailable: "valkey",
    errors.TemporalUnavailable: "temporal",
}
#: Methods that routes have; HEAD is served wherever GET is.
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class ProblemError(Exception):
    """Carries an error to the handler together with members of its own,
    such as the order it left behind."""

    def __init__(self, error: BerthError, **members: BaseModel | Sequence[BaseModel]) -> None:
        super().__init__(error.detail)
        self.error = error
        self.members = members


def status_of(error: type[BerthError] | BerthError) -> int:
    """Returns the HTTP status of an error; 503 for anything retryable that has none of its own,
    else
    500."""
    kind = error if isinstance(error, type) else type(error)
    return kind.status or (503 if kind.retryable else 500)


def body_of(
    error: BerthError, *, instance: str = "", request_id: str = "", **members: Any
) -> dict[str, Any]:
    """Returns the members of one problem."""
    problem: dict[str, Any] = {
        "type": f"urn:berth:problem:{error.code.lower().replace('_', '-')}",
        "title": error.title(),
        "status": status_of(error),
        "detail": error.detail,
        "code": error.code,
        "retryable": error.retryable,
    }
    if instance:
        problem["instance"] = instance
    if request_id:
        problem["request_id"] = request_id
    for kind, name in _DEPENDENCIES.items():
        if isinstance(error, kind):
            problem["dependency"] = name
    if isinstance(error, errors.InvalidRequest | ArgumentsInvalid) and error.errors:
        problem["errors"] = error.errors
    return problem | members


def response_of(
    error: BerthError, *, instance: str = "", request_id: str = "", **members: Any
) -> Response:
    body = body_of(error, instance=instance, request_id=request_id, **members)
    headers = {}
    if error.retryable:
        known = error.retry_after
        headers["Retry-After"] = str(RETRY_AFTER_S if known is None else max(1, math.ceil(known)))
    if body["status"] == 401:
        headers["WWW-Authenticate"] = "ApiKey"
    return Response(json.dumps(body, default=_plain), body["status"], headers, MEDIA_TYPE)


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _answer(scope: Scope, error: BerthError, **members: Any) -> Response:
    request_id = scope.get("state", {}).get("request_id", "")
    scope["berth.code"] = error.code  # for the access log
    return response_of(error, instance=public_path(scope), request_id=request_id, **members)


#: Failures that a problem's detail tells; `errors` has all of them.
_MAX_SHOWN_FAILURES = 3
#: The words with which pydantic begins the message of a validator's own error.
_OWN_ERROR = re.compile(r"^(Value|Assertion) error, ")
#: Words of fields that hold secrets.
_SECRETS = ("secret", "key", "password", "token", "certificate", "passphrase")


def invalid_request(failures: Sequence[Mapping[str, Any]], *within: str) -> errors.InvalidRequest:
    """Returns the error for pydantic's failures, with their sentences; `within` is the model's
    place.

    No value of a secret field is told: of these,
    only what pydantic itself says, which names no value.
    """
    invalid: list[dict[str, Any]] = [
        {
            "loc": [*within, *map(str, failure["loc"])],
            "msg": _told(failure),
            "type": str(failure["type"]),
        }
        for failure in failures
    ]
    sentences = [_sentence(entry["loc"], entry["msg"]) for entry in invalid[:_MAX_SHOWN_FAILURES]]
    rest = (
        f" (and {len(invalid) - _MAX_SHOWN_FAILURES} more)"
        if len(invalid) > _MAX_SHOWN_FAILURES
        else ""
    )
    return errors.InvalidRequest(f"{'; '.join(sentences)}{rest}", invalid)


def _told(failure: Mapping[str, Any]) -> str:
    field = " ".join(map(str, failure["loc"])).lower()
    given = failure.get("input")
    message = str(failure["msg"])
    hides = any(word in field for word in _SECRETS)
    if hides and isinstance(given, str) and len(given) > 2 and given in message:
        return "Value error, it is not valid"
    return message


def _sentence(loc: Sequence[str], message: str) -> str:
    """Makes a sentence such as `quantity: it is not whole`; of a body's field it has the name
    alone."""
    where = ".".join(part for part in loc if part != "body" and not part.isdigit())
    text = _OWN_ERROR.sub("", message)
    return f"{where}: {text[:1].lower()}{text[1:]}" if where else text


@contextmanager
def refusing_invalid(*within: str) -> Iterator[None]:
    """Raises `InvalidRequest` for what a model refuses: it names fields and shows no value, which
    may be a secret."""
    try:
        yield
    except ValidationError as error:
        raise invalid_request(error.errors(), *within) from None


def _of_http(failure: HTTPException) -> BerthError:
    """Returns the error for what Starlette and FastAPI refuse; all that we refuse is a
    `BerthError`."""
    match failure.status_code:
        case 404:
            return errors.NotFound()
        case 405:
            return errors.MethodNotAllowed()
        case status if status < 500:
            return errors.InvalidRequest("the request cannot be read")
    return BerthError()


def _allowed_methods(scope: Scope) -> list[str]:
    """Return the methods of all routes of this path:
    Starlette names those of the first one only."""
    routes = [route for route in scope["app"].routes if not isinstance(route, Mount)]
    methods = {
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    } or {"GET"}  # a file of the pages
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def problem_response(scope: Scope, error: Exception) -> Response:
    """Returns the problem that one of `_KINDS` becomes; raises any other error again."""
    match error:
        case ProblemError():
            return _answer(scope, error.error, **error.members)
        case BerthError():
            return _answer(scope, error)
        case RequestValidationError():
            return _answer(scope, invalid_request(error.errors()))
        case RedisError():
            # For the access log, too.
            scope["berth.cause"] = f"{type(error).__name__}: {error}"[:200]
            return _answer(scope, errors.ValkeyUnavailable(explain_failure(error)))
        case HTTPException():
            response = _answer(scope, _of_http(error))
            response.headers.update(error.headers or {})
            if error.status_code == 405:
                response.headers["Allow"] = ", ".join(_allowed_methods(scope))
            return response
    raise error


_KINDS = (ProblemError, BerthError, RequestValidationError, RedisError, HTTPException)


def install(app: FastAPI) -> None:
    """Makes every error of the app a problem."""

    async def on_error(request: Request, error: Exception) -> Response:
        return problem_response(request.scope, error)

    for kind in _KINDS:
        app.add_exception_handler(kind, on_error)


def responses(*kinds: type[BerthError]) -> dict[int | str, dict[str, Any]]:
    """Returns the OpenAPI `responses` of an operation that may fail with these errors, with an
    example of each.

    Besides those, what many operations share is added to the document (`add_common`).
    """
    documented: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        _add(documented, status_of(kind), kind)
    return dict(sorted(documented.items(), key=lambda item: int(item[0])))


def _add(documented: dict[Any, dict[str, Any]], status: int | str, kind: type[BerthError]) -> None:
    entry = documented.get(status, {})
    if MEDIA_TYPE not in entry.get("content", ()):  # there is none, or FastAPI's own 422
        empty = {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}
        entry = documented[status] = {"description": "", "content": {MEDIA_TYPE: empty}}
    examples = entry["content"][MEDIA_TYPE]["examples"]
    if kind.code not in examples:
        examples[kind.code] = {"summary": kind.title(), "value": body_of(kind(), instance="/v1/…")}
        entry["description"] = f"{entry['description']} {kind.title()}".strip()


def add_common(operation: dict[str, Any], method: str, path: str) -> None:
    """Adds to an operation of the OpenAPI document what
    it may answer because of its path, key and body."""
    kinds: list[type[BerthError]] = [errors.TooManyRequests]
    if "requestBody" in operation:
        kinds += [errors.BodyTooLarge, errors.BodyTooSlow]
    if right := RIGHTS.get(f"{method.upper()} {path}"):
        kinds += [errors.Unauthenticated, errors.InvalidRequest, DatabaseUnavailable, BerthError]
        kinds += [OutcomeUnconfirmed] * (method.upper() not in ("GET", "HEAD"))
        kinds += [errors.Forbidden] * (right.roles != ALL)
        kinds += [errors.ScopeMissing] * (right.scope is not None)
        kinds += [errors.KeySourceRefused]
        counted = Role.USER in right.roles and is_counted(f"{method.upper()} {path}")
        kinds += [DailyQuotaReached] * counted
        kinds += [errors.NotFound] * ("{user_id}" in path and Role.USER in right.roles)
    for kind in kinds:
        _add(operation["responses"], str(status_of(kind)), kind)


def answer(model: Any, description: str, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns one of the OpenAPI `responses` that is no problem: a body of this type."""
    return {"model": model, "description": description} | ({"headers": headers} if headers else {})


def content(
    description: str, media_type: str, example: str | None = None
) -> dict[int | str, dict[str, Any]]:
    """Returns the OpenAPI `responses` of an operation that answers with text of this type."""
    shown: dict[str, Any] = {"schema": {"type": "string"}}
    if example is not None:
        shown["example"] = example
    return {200: {"description": description, "content": {media_type: shown}}}


#: Schema of a problem in OpenAPI. Written out: no route returns it as its model.
SCHEMA: dict[str, Any] = json.loads((files("api.http") / "problem.json").read_bytes())
