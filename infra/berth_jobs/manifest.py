"""A manifest: what one package's job types are called, take and ask for. A runner signs and
publishes it.

The API checks a new job against it, and imports nothing of the package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from .declaration import DeclaredJob, JobFunction

#: Types of one manifest.
MAX_TYPES = 500
#: Bytes of one type's JSON Schema, and of one whole manifest.
MAX_SCHEMA_BYTES = 32 * 1024
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
#: Levels of nesting in one type's JSON Schema.
MAX_SCHEMA_LEVELS = 32

_APPLICATION = re.compile(r"[a-z][a-z0-9-]{0,31}")
_Application = Annotated[str, msgspec.Meta(pattern=rf"^{_APPLICATION.pattern}\Z")]
_TypeName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{0,31}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
]
_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class BadManifest(ValueError):
    """A manifest, or what it would hold, breaks a bound; the text says which."""


class TypeOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says how jobs of one type are enqueued; None: the deployment's default. Durations are
    seconds."""

    queue: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\Z")] = "default"
    priority: Annotated[int, msgspec.Meta(ge=0, le=9)] = 5
    timeout_s: _Seconds | None = None
    memory: Annotated[int, msgspec.Meta(ge=1)] = 512 * 1024 * 1024
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    #: Pauses before the second attempt, the third and so on; the last one repeats.
    backoff_s: Annotated[
        tuple[Annotated[float, msgspec.Meta(ge=0, le=86_400)], ...], msgspec.Meta(max_length=100)
    ] = ()
    idempotent: bool = False
    group: Annotated[str, msgspec.Meta(max_length=128)] = ""
    unique_for_s: Annotated[float, msgspec.Meta(ge=0, le=366 * 86_400)] = 0.0
    #: The type that is enqueued with the failure, with its application; '' for none.
    on_failed: _Text = ""
    #: Milliseconds between two jobs of this type in the long run; 0: no limit.
    rate_interval_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_running: _Count = 0
    max_running_per_node: _Count = 0
    secrets: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=100)] = ()
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class ManifestType(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a type of job."""

    #: With its application: `shop/jobs.resize_image`.
    name: _TypeName
    version: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    #: JSON Schema of an object: the arguments by name.
    arguments_schema: dict[str, Any]
    options: TypeOptions = TypeOptions()
    #: The first paragraph of the function's docstring.
    summary: _Text = ""
    #: The distribution that has the type's function, or the module's first part if it is installed
    #: as none; with its version. Empty: that of its manifest, as in those of earlier releases.
    package: _Text = ""
    package_version: _Text = ""


class JobManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All job types of one runner."""

    application: _Application
    #: The distribution of the first type, for types without one; with its version.
    package: _Text
    package_version: _Text = ""
    types: Annotated[tuple[ManifestType, ...], msgspec.Meta(max_length=MAX_TYPES)] = ()

    def canonical_bytes(self) -> bytes:
        """Returns the JSON that is signed. Equal manifests are equal bytes."""
        ordered = tuple(sorted(self.types, key=lambda kind: (kind.name, kind.version)))
        return msgspec.json.encode(msgspec.structs.replace(self, types=ordered), order="sorted")


def check_application(name: str) -> str:
    """Returns the name of an application; raises `BadManifest` for what is none."""
    if not _APPLICATION.fullmatch(name):
        raise BadManifest("an application is a letter and up to 31 of a-z, 0-9 and '-'")
    return name


def build_manifest(
    application: str,
    functions: Sequence[JobFunction[..., Any]],
    package: str,
    package_version: str = "",
    packages: Mapping[str, tuple[str, str]] | None = None,
) -> JobManifest:
    """Describes these jobs. Raises `BadManifest`.

    `packages`: a module of functions → its distribution and version, where that is not `package`.
    """
    check_application(application)
    names = [function.type.name for function in functions]
    for function in functions:
        handler = function.type.on_failed
        if handler and handler not in names:
            raise BadManifest(
                f"{function.type.name}: on_failed names {handler}, which is no job here"
            )
    types = []
    for function in functions:
        kind = describe_type(application, function.type)
        of_type = (packages or {}).get(function.type.function.__module__)
        name, version = of_type or (package, package_version)
        types.append(
            msgspec.structs.replace(kind, package=name[:200], package_version=version[:200])
        )
    manifest = JobManifest(
        application=application,
        package=package[:200],
        package_version=package_version[:200],
        types=tuple(types),
    )
    return read_manifest(manifest.canonical_bytes())


def describe_type(application: str, declared: DeclaredJob) -> ManifestType:
    """Describes one job. Raises `BadManifest`."""
    options = TypeOptions(
        queue=declared.queue,
        priority=declared.priority,
        timeout_s=declared.timeout,
        memory=declared.memory,
        max_attempts=declared.max_attempts,
        backoff_s=declared.backoff,
        idempotent=declared.idempotent,
        group=declared.group,
        unique_for_s=declared.unique_for,
        on_failed=declared.on_failed and f"{application}/{declared.on_failed}",
        rate_interval_ms=declared.rate_interval_ms,
        max_running=declared.max_running,
        max_running_per_node=declared.max_running_per_node,
        secrets=declared.secrets,
        concurrency=declared.concurrency,
    )
    summary = (declared.function.__doc__ or "").strip().partition("\n\n")[0]
    return ManifestType(
        name=f"{application}/{declared.name}",
        version=declared.version,
        arguments_schema=arguments_schema(declared),
        options=options,
        summary=" ".join(summary.split())[:200],
    )


def read_manifest(data: bytes) -> JobManifest:
    """Decodes a manifest and checks all bounds; raises `BadManifest`."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise BadManifest(
            f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, this one has {len(data)}"
        )
    try:
        manifest = msgspec.json.decode(data, type=JobManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadManifest(f"the manifest does not fit: {error}") from None
    _check_texts("the package", [manifest.package, manifest.package_version])
    seen: set[str] = set()
    for kind in manifest.types:
        _check_levels(kind)
        application, _, _ = kind.name.partition("/")
        if application != manifest.application:
            raise BadManifest(
                f"{kind.name} belongs to another application than {manifest.application}"
            )
        if kind.name in seen:
            raise BadManifest(f"{kind.name} is declared twice; give one of them another name")
        seen.add(kind.name)
        if len(msgspec.json.encode(kind.arguments_schema)) > MAX_SCHEMA_BYTES:
            raise BadManifest(
                f"{kind.name}: the schema of its arguments has more than {MAX_SCHEMA_BYTES} bytes"
            )
        _check_texts(kind.name, msgspec.to_builtins(kind))
    return manifest


def _check_levels(kind: ManifestType) -> None:
    """Raises `BadManifest` for a schema that is nested too deeply."""
    parts: list[tuple[Any, int]] = [(kind.arguments_schema, 1)]
    while parts:
        part, level = parts.pop()
        if not isinstance(part, dict | list):
            continue
        if level > MAX_SCHEMA_LEVELS:
            raise BadManifest(
                f"{kind.name}: the schema of its arguments is nested more than "
                f"{MAX_SCHEMA_LEVELS} levels deep; use fewer types within types"
            )
        children = part.values() if isinstance(part, dict) else part
        parts += [(child, level + 1) for child in children]


def _check_texts(name: str, value: Any) -> None:
    """Raises `BadManifest` if a text holds NUL, which PostgreSQL does not store."""
    if isinstance(value, str) and "\0" in value:
        raise BadManifest(
            f"{name}: a text holds the character NUL, which cannot be stored; take it out of the "
            "docstring, or of the annotation of the argument"
        )
    if isinstance(value, dict):
        for key, child in value.items():
            _check_texts(name, key)
            _check_texts(name, child)
    elif isinstance(value, list | tuple):
        for child in value:
            _check_texts(name, child)


def arguments_schema(declared: DeclaredJob) -> dict[str, Any]:
    """Returns the JSON Schema of a job's arguments, an object. Raises `BadManifest`."""
    models: dict[str, Any] = {}
    try:
        schema = msgspec.json.schema(
            declared.arguments, schema_hook=lambda kind: _model_schema(kind, models)
        )
    except (TypeError, RecursionError) as error:
        raise BadManifest(f"{declared.name}: its arguments have no JSON Schema: {error}") from None
    definitions = {**schema.pop("$defs", {}), **models}
    reference = schema.pop("$ref", "")
    top = definitions.pop(reference.rpartition("/")[2]) if reference else schema
    top.setdefault("additionalProperties", False)
    # A job has the same group and unique key whether a default is given or left out (`job_fields`).
    for name, default in declared.key_defaults().items():
        top["properties"][name] = {**top["properties"][name], "default": default}
    if definitions:
        top["$defs"] = definitions
    return dict(top)


def _model_schema(kind: type, models: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a pydantic model; its definitions go to `models`."""
    describe = getattr(kind, "model_json_schema", None)
    if describe is None:
        raise NotImplementedError(kind.__name__)
    schema: dict[str, Any] = describe(ref_template="#/$defs/{model}")
    models.update(schema.pop("$defs", {}))
    return schema
