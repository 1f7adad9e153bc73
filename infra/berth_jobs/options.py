"""From a type's options and a call's options to the fields of one job.

The API and direct producers use it, so that a job is the same whoever enqueues it.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from .manifest import ManifestType

_FORBIDDEN = re.compile(r"[^!-z|~]")
_Key = Annotated[str, msgspec.Meta(max_length=128)]


class JobDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment gives to jobs whose type says nothing else. Durations are seconds."""

    timeout: float = 180.0
    attempts: int = 10
    retry_delay: float = 120.0
    result_ttl: int = 500


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one call changes of its type's options; None: as the type says. Durations are
    seconds."""

    queue: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\Z")] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=9)] | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    #: Until it may run.
    delay_s: Annotated[float, msgspec.Meta(ge=0, le=366 * 86_400)] = 0.0
    group: _Key | None = None
    #: While a job of this type with the same key has not ended, no other one is accepted.
    unique: _Key | None = None
    #: For how long a result is kept.
    result_ttl_s: Annotated[int, msgspec.Meta(ge=1, le=14 * 86_400)] | None = None
    #: Jobs of one type with the same key share the type's rate.
    rate_key: _Key | None = None


def job_fields(
    kind: ManifestType,
    arguments: bytes,
    options: JobOptions | None = None,
    defaults: JobDefaults | None = None,
) -> dict[str, Any]:
    """Returns the fields of the job's message but its id.
    `arguments`: the JSON object, already checked.

    A group or unique key that the type makes of the arguments is the same whether a default is
    given or left out. One that holds what no key may, or is too long, is replaced by its digest.
    """
    own, default, declared = options or JobOptions(), defaults or JobDefaults(), kind.options
    values: dict[str, Any] = {**_default_arguments(kind), **msgspec.json.decode(arguments)}
    queue = own.queue or declared.queue
    timeout = own.timeout_s or declared.timeout_s or default.timeout
    unique = own.unique or ""
    if not unique and declared.unique_for_s:
        unique = blake2b(msgspec.json.encode(values, order="sorted"), digest_size=16).hexdigest()
    return {
        "name": kind.name,
        "type_version": kind.version,
        "args": msgspec.Raw(arguments),
        "queue": queue,
        "priority": declared.priority if own.priority is None else own.priority,
        "idempotent": declared.idempotent,
        "timeout": timeout,
        "attempts": own.max_attempts or declared.max_attempts or default.attempts,
        "retry_delay": declared.backoff_s[0] if declared.backoff_s else default.retry_delay,
        "delay": own.delay_s,
        "group": _key(own.group if own.group is not None else _group(declared.group, values)),
        "unique": _key(f"{kind.name}:{unique}") if unique else "",
        "unique_for": declared.unique_for_s if unique else 0.0,
        "on_failed": declared.on_failed,
        "rate_key": _key(own.rate_key or "all")
        if declared.rate_interval_ms or own.rate_key
        else "",
        "result_ttl": own.result_ttl_s or default.result_ttl,
    }


class JobFailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a failure handler (`on_failed`) is called with: its arguments."""

    job_id: str
    type: str
    code: str
    detail: str
    attempt: int
    #: The failed job's; None if they would make the handler's too large.
    arguments: msgspec.Raw | None


def handler_id(job_id: str, failed_at_ms: int) -> str:
    """Returns the id of the job that handles one failure. Whoever enqueues it, it runs once."""
    suffix = f".failed.{failed_at_ms}"
    return f"{job_id[: 128 - len(suffix)]}{suffix}"


def handler_fields(
    kind: ManifestType, report: JobFailureReport, max_bytes: int, defaults: JobDefaults
) -> dict[str, Any]:
    """Returns the fields of a failure handler's message but its id. `max_bytes`: of its
    arguments."""
    arguments = msgspec.json.encode(report)
    if len(arguments) > max_bytes:
        arguments = msgspec.json.encode(msgspec.structs.replace(report, arguments=None))
    fields = job_fields(kind, arguments, defaults=defaults)
    # A handler's failure has no handler.
    return {**fields, "on_failed": "", "unique": "", "unique_for": 0.0}


def fields_depend_on_arguments(kind: ManifestType, options: JobOptions) -> bool:
    """Returns False if a job's fields, but the arguments themselves, are the same whatever its
    arguments are."""
    group = kind.options.group if options.group is None else ""
    return "{" in group or bool(kind.options.unique_for_s and not options.unique)


def _default_arguments(kind: ManifestType) -> dict[str, Any]:
    """Returns the defaults that the type's schema names; a runner writes those that make keys."""
    properties = kind.arguments_schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        name: about["default"]
        for name, about in properties.items()
        if isinstance(about, dict) and "default" in about
    }


def _group(template: str, values: dict[str, Any]) -> str:
    """Fills `{argument}` with the argument's value, which is JSON unless it is a text."""

    def value_of(match: re.Match[str]) -> str:
        value = values.get(match[1])
        return (
            value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
        )

    return re.sub(r"\{([^{}]*)\}", value_of, template)


def _key(text: str) -> str:
    """Returns a text as a key may be: printable, no spaces or braces, at most 128 characters."""
    if len(text) <= 128 and not _FORBIDDEN.search(text):
        return text
    return blake2b(text.encode(), digest_size=16).hexdigest()
