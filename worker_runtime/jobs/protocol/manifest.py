"""Announces an application's job types: signed manifests that its runners write to Valkey.

A runner reads the types of a package in a process without keys, signs the manifest with its
application's key and publishes it when it registers. The API copies it into PostgreSQL and
validates arguments by it. Nothing in a manifest is imported or run. What a manifest holds is in
`infra/berth_jobs/manifest.py`; here it is bytes with a few fields.

A type's name has the application in front (`shop/jobs.resize_image`); Berth's built-in types have
no slash. The queue knows a type with its version: `shop/jobs.resize_image@2`.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.calls import QueueCall, reply_text
from worker_runtime.protocol.authentication import MessageKeys, read_payload, sign_payload
from worker_runtime.protocol.errors import BerthError, MalformedMessage

#: Bytes of one manifest.
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
#: Types of one manifest.
MAX_TYPES = 500
#: Manifests of one application that Valkey keeps, beyond those of its live runners.
MAX_MANIFESTS = 50

#: The names that an application may have.
APPLICATION_PATTERN = r"^[a-z][a-z0-9-]{0,31}\Z"
_APPLICATION = re.compile(APPLICATION_PATTERN)
_USE = b"job_manifest/1"


class PackageConflict(BerthError, code="JOB_TYPE_OF_ANOTHER_PACKAGE", status=409):
    """A live runner of this application has the same job type from another package. Rename one of
    the two types, or stop the runners of the other package first."""


class _AnnouncedType(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(max_length=160)]
    version: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    #: Empty: that of its manifest.
    package: Annotated[str, msgspec.Meta(max_length=200)] = ""


class _Announcement(msgspec.Struct, frozen=True):
    """The fields of a manifest that the queue needs."""

    application: Annotated[str, msgspec.Meta(pattern=APPLICATION_PATTERN)]
    package: Annotated[str, msgspec.Meta(max_length=200)]
    types: Annotated[tuple[_AnnouncedType, ...], msgspec.Meta(max_length=MAX_TYPES)] = ()


def application_of(name: str) -> str:
    """Return the application of a job type's name; an empty text for a built-in type."""
    application, slash, _ = name.partition("/")
    return application if slash else ""


def is_application_name(name: str) -> bool:
    """Return True if an application may have this name."""
    return _APPLICATION.fullmatch(name) is not None


def queued_type(name: str, version: int) -> str:
    """Return a type as the queue knows it."""
    return f"{name}@{version}" if version else name


def digest_of(body: bytes) -> str:
    """Return the name under which a manifest stands in Valkey."""
    return blake2b(body, digest_size=16).hexdigest()


def publish(
    runner_id: str, manifests: Sequence[bytes], keys: MessageKeys, application: str
) -> QueueCall:
    """Announce the types of a registered runner. Call it after each `join`; it may be repeated.

    `manifests`: the JSON of each package's manifest, all of `application`; `keys`: the
    application's. From then on the runner's claims take jobs of these types only. Pass the reply to
    `check_reply`. Raises `MalformedMessage` for a manifest of another application or one that
    breaks a bound.
    """
    args: list[Any] = [runner_id, MAX_MANIFESTS, len(manifests)]
    for body in manifests:
        announced = _read_announcement(body)
        if announced.application != application:
            raise MalformedMessage(
                f"{announced.package} declares types of {announced.application}, not of "
                f"{application}"
            )
        args += [
            digest_of(body),
            announced.package,
            sign_payload(keys, _USE, body),
            len(announced.types),
        ]
        for kind in announced.types:
            if application_of(kind.name) != application:
                raise MalformedMessage(
                    f"{kind.name} is no job type of the application {application}"
                )
            package = kind.package or announced.package
            args += [kind.name, queued_type(kind.name, kind.version), package]
    return QueueCall(
        job_scripts.PUBLISH, [job_keys.meta(job_keys.application_tag(application))], args
    )


def check_reply(reply: Sequence[bytes | str]) -> bool:
    """Read the reply to `publish`: False if the runner is not registered. Raises
    `PackageConflict`."""
    status, *details = map(reply_text, reply)
    if status == "conflict":
        name, package, other = details
        raise PackageConflict(
            f"The job type {name} of {package} is also declared by {other}, which a live runner "
            "serves. Rename one of the two, or stop the runners of the other package first."
        )
    return status == "published"


def read_signed(entry: bytes, application: str, keys: MessageKeys) -> bytes:
    """Return the JSON of a manifest that stands among an application's. Raises what `read_payload`
    raises, and `MalformedMessage` for one that is too large."""
    if len(entry) > MAX_MANIFEST_BYTES + 1024:
        raise MalformedMessage(f"a manifest of {application} has {len(entry)} bytes")
    return read_payload(keys, _USE, entry, f"a manifest of {application}")


def _read_announcement(body: bytes) -> _Announcement:
    if len(body) > MAX_MANIFEST_BYTES:
        raise MalformedMessage(
            f"the manifest has {len(body)} bytes; at most {MAX_MANIFEST_BYTES} are allowed"
        )
    try:
        return msgspec.json.decode(body, type=_Announcement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"the manifest does not fit: {error}") from None
