"""The job types of applications: what their runners have announced, and the check of a job's
arguments.

Runners have no login to PostgreSQL. They announce signed manifests in Valkey
(`worker_runtime/jobs/protocol/manifest.py`); each API process copies new ones into PostgreSQL,
where they survive a flush and the end of all runners. A job is validated by a version of its type
that a live runner has, the one announced last first; the job remembers it, and only runners of that
version take it.
"""

import asyncio
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from sqlalchemy import ForeignKey, Index, String, delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from infra.berth_jobs.manifest import BadManifest, JobManifest, ManifestType, read_manifest
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.models import Base
from infra.jobs.applications import ApplicationDirectory
from infra.jobs.arguments import ArgumentsValidator, SchemaRefused
from infra.valkey.client import reply_of, text_of
from infra.vault.message_secret import MessageSecrets
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import manifest as wire
from worker_runtime.protocol.errors import BerthError, InvalidSignature

#: Seconds after which the types are read again.
REFRESH_INTERVAL_S = 2.0
#: Versions of one type that are kept in the list.
MAX_VERSIONS = 20
#: Types of one application that PostgreSQL keeps, all versions counted: those that are in Valkey,
#: and the newest others.
MAX_ROWS = 5_000

log = structlog.get_logger()


class JobTypeUnknown(BerthError, code="JOB_TYPE_UNKNOWN", status=404):
    """No runner has announced a job type of this name. Start a runner that has it, or check the
    name."""


class JobTypeRefused(BerthError, code="JOB_TYPE_REFUSED", status=409):
    """The API cannot check arguments of this job type, because it does not support its schema."""


class ArgumentsInvalid(BerthError, code="JOB_ARGUMENTS_INVALID", status=422):
    """The arguments do not fit the job type. `errors` names each part that does not fit, and
    why."""

    def __init__(self, detail: str = "", errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(detail)
        self.errors = errors or []


class JobTypeRow(Base):
    """One version of a job type, as a runner last announced it."""

    __tablename__ = "job_types"
    __table_args__ = (Index("job_types_by_application", "application"),)

    name: Mapped[str] = mapped_column(String(160), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    application: Mapped[str] = mapped_column(
        String(32), ForeignKey("job_applications.name", ondelete="CASCADE")
    )
    package: Mapped[str] = mapped_column(String(200))
    package_version: Mapped[str] = mapped_column(String(200))
    #: The type in its manifest: `ManifestType` as JSON.
    definition: Mapped[dict[str, Any]]
    #: Why the API takes no jobs of it; empty if it does.
    refusal: Mapped[str] = mapped_column(server_default=text("''"))
    announced_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


@dataclass(frozen=True, eq=False)
class TypeVersion:
    """One version of a type, ready to validate arguments."""

    kind: ManifestType
    package: str
    package_version: str
    announced_at: datetime
    refusal: str
    #: Runners that take jobs of it now; None if Valkey is away.
    runners: int | None = None
    validator: ArgumentsValidator | None = None


@dataclass
class _Loaded:
    at: float = -1e9
    #: Type → its versions, the one announced last first.
    types: dict[str, list[TypeVersion]] = field(default_factory=dict)


class TypeRegistry:
    """The job types as one API process knows them, at most `REFRESH_INTERVAL_S` old."""

    def __init__(
        self,
        database: Database,
        client: Redis,
        secrets: MessageSecrets,
        directory: ApplicationDirectory,
    ) -> None:
        self._database = database
        self._client = client
        self._secrets = secrets
        self.applications = directory
        self._loaded = _Loaded()
        self._loading = asyncio.Lock()
        #: Digests of manifests that this process has read, by application, with the time of the
        #: announcement.
        self._known: dict[str, dict[str, float]] = {}
        self._validators: dict[tuple[str, int], tuple[ManifestType, ArgumentsValidator | None]] = {}
        #: Digests of manifests of which types were left out, by application.
        self._incomplete: dict[str, set[str]] = {}
        #: Applications and types that could not be read at the last look; each is logged once.
        self._unreadable: set[str] = set()

    async def types(
        self, max_age_s: float = REFRESH_INTERVAL_S
    ) -> Mapping[str, Sequence[TypeVersion]]:
        """Return all types by name. Raises `DatabaseUnavailable`."""
        async with self._loading:
            if time.monotonic() - self._loaded.at > max_age_s:
                self._loaded = await self._load()
            return self._loaded.types

    async def versions(self, name: str) -> Sequence[TypeVersion]:
        """Return the versions of one type, the one announced last first.

        Raises `JobTypeUnknown`, `ApplicationNotFound`, `DatabaseUnavailable`.
        """
        await self.applications.require(wire.application_of(name))
        versions = (await self.types()).get(name) or (await self.types(max_age_s=0.2)).get(name)
        application = wire.application_of(name)
        if not versions and self._incomplete.get(application):
            raise JobTypeUnknown(
                f"{name} is unknown, perhaps because the application {application} has more than "
                f"{MAX_ROWS} job types, all versions counted: types that came later were left out. "
                "Stop runners of old versions and restart a runner that has the type."
            )
        if not versions:
            raise JobTypeUnknown(
                f"No runner has announced the job type {name}. Start a runner that has it, or "
                "check the name; GET /v1/job-types lists all types."
            )
        return versions

    async def validate(self, name: str, arguments: dict[str, Any]) -> TypeVersion:
        """Return the version of a type that takes these arguments.

        Raises what `versions` raises, `JobTypeRefused`, and `ArgumentsInvalid` with the reasons of
        the newest.
        """
        versions = await self.versions(name)
        live = [version for version in versions if version.runners] or versions[:1]
        first_errors: list[dict[str, Any]] | None = None
        for version in live:
            if version.validator is None:
                continue
            errors = await asyncio.to_thread(version.validator.errors, arguments)
            if not errors:
                return version
            first_errors = first_errors or errors
        if first_errors is None:
            raise JobTypeRefused(f"Jobs of the type {name} are not accepted. {live[0].refusal}")
        raise ArgumentsInvalid(f"The arguments do not fit the job type {name}.", first_errors)

    async def _load(self) -> _Loaded:
        began = time.monotonic()
        unreadable: dict[str, Exception] = {}
        live = await self._live_runners(await self.applications.load(), unreadable)
        rows = await self._database.read(_list_rows)
        types: dict[str, list[TypeVersion]] = {}
        for row in rows:
            versions = types.get(row.name, [])
            if len(versions) == MAX_VERSIONS:
                continue
            try:
                versions.append(self._version(row, live.get(row.application)))
            except Exception as error:  # a type that cannot be read harms no other one
                unreadable[wire.queued_type(row.name, row.version)] = error
                continue
            types[row.name] = versions
        for name in unreadable.keys() - self._unreadable:
            log.error("job_types_not_read", subject=name, reason=_reason(unreadable[name]))
        self._unreadable = set(unreadable)
        return _Loaded(began, types)

    async def _live_runners(
        self, applications: Iterable[str], unreadable: dict[str, Exception]
    ) -> dict[str, dict[str, int]]:
        """Copies what runners have announced, and returns for each application how many runners
        take each type. Leaves out applications whose runners are not known: those in `unreadable`,
        and all while Valkey is away."""
        live: dict[str, dict[str, int]] = {}
        for name in applications:
            try:
                await self._copy_manifests(name)
                live[name] = await count_runners(self._client, name)
            except ResponseError as error:  # its own login may write anything under its keys
                unreadable[name] = error
            except (RedisError, OSError):
                return {}
        return live

    def _version(self, row: JobTypeRow, live: Mapping[str, int] | None) -> TypeVersion:
        kind = msgspec.convert(row.definition, ManifestType)
        known, validator = self._validators.get((row.name, row.version), (None, None))
        if known != kind:
            validator = None
            if not row.refusal:
                try:
                    validator = ArgumentsValidator(kind.arguments_schema)
                except SchemaRefused as error:  # a release that takes more has copied it
                    log.warning("job_type_refused", type=row.name, reason=error.detail)
            self._validators[row.name, row.version] = kind, validator
        return TypeVersion(
            kind,
            row.package,
            row.package_version,
            row.announced_at,
            row.refusal,
            None if live is None else live.get(wire.queued_type(row.name, row.version), 0),
            validator,
        )

    async def _copy_manifests(self, application: str) -> None:
        """Copy manifests that runners have announced since the last look into PostgreSQL."""
        tag = job_keys.application_tag(application)
        announced = await reply_of(
            self._client.zrange(job_keys.announced(tag), 0, wire.MAX_MANIFESTS * 2, withscores=True)
        )
        known = self._known.setdefault(application, {})
        incomplete = self._incomplete.setdefault(application, set())
        fresh = {
            text_of(digest): score
            for digest, score in announced
            if known.get(text_of(digest)) != score
        }
        present = {text_of(digest) for digest, _ in announced}
        current = await self._announced_types(tag, present) if fresh else set()
        for digest, at in sorted(fresh.items(), key=lambda pair: pair[1]):
            entry = await reply_of(self._client.hget(job_keys.manifests(tag), digest))
            try:
                body = wire.read_signed(entry or b"", application, self._secrets.job_keys(tag))
                manifest = read_manifest(body)
                if manifest.application != application:
                    raise InvalidSignature(f"a manifest of {application}")
                incomplete.discard(digest)
                if not await self._database.write(record_manifest, manifest, current):
                    incomplete.add(digest)
            except DatabaseUnavailable:
                raise  # it is recorded at the next look
            except Exception as error:  # whatever a runner announces harms no other application
                log.error("job_manifest_refused", application=application, reason=_reason(error))
            known[digest] = at
        incomplete &= present
        for digest in known.keys() - present:
            del known[digest]

    async def _announced_types(self, tag: str, digests: Iterable[str]) -> set[str]:
        """Return the types of these manifests, as the queue knows them."""
        async with self._client.pipeline(transaction=False) as pipe:
            for digest in digests:
                pipe.smembers(job_keys.announced_types(tag, digest))
            return {text_of(name) for names in await pipe.execute() for name in names}


def _reason(error: Exception) -> str:
    """Return why a manifest or a type cannot be used, for the log."""
    if isinstance(error, BerthError):
        return error.detail[:300]
    if isinstance(error, BadManifest):
        return str(error)[:300]
    return f"{type(error).__name__}: {error}"[:300]


async def record_manifest(
    session: AsyncSession, manifest: JobManifest, announced: Container[str]
) -> bool:
    """Write the types of a manifest. Returns False if there was no room for all of them.

    `announced`: types, as the queue knows them, of all manifests in Valkey. Where there is no room,
    the type that was announced longest ago, and is none of these, makes some.

    Does not write their limits and rates: each runner declares those in Valkey when it registers
    (`declare.lua`). The settings in PostgreSQL are what operators have set.
    """
    rows = {(row.name, row.version): row for row in await _rows_of(session, manifest.application)}
    number_of_rows, is_complete = len(rows), True
    outdated = [
        key
        for key, _ in sorted(rows.items(), key=lambda pair: pair[1].announced_at, reverse=True)
        if wire.queued_type(*key) not in announced
    ]
    for kind in manifest.types:
        definition = msgspec.to_builtins(kind)
        before = rows.get((kind.name, kind.version))
        if before is None and number_of_rows >= MAX_ROWS:
            if not outdated:
                is_complete = False
                continue
            name, number = outdated.pop()
            await session.execute(
                delete(JobTypeRow).where(JobTypeRow.name == name, JobTypeRow.version == number)
            )
            number_of_rows -= 1
        refusal = ""
        try:
            ArgumentsValidator(kind.arguments_schema)
        except SchemaRefused as error:
            refusal = error.detail
        package, version = kind.package, kind.package_version
        if not package:
            package, version = manifest.package, manifest.package_version
        values = {
            "application": manifest.application,
            "package": package,
            "package_version": version,
            "definition": definition,
            "refusal": refusal,
            "announced_at": func.clock_timestamp(),
        }
        row = insert(JobTypeRow).values(name=kind.name, version=kind.version, **values)
        await session.execute(
            row.on_conflict_do_update(index_elements=["name", "version"], set_=values)
        )
        number_of_rows += before is None
        if before is None or before.definition.get("options") != definition.get("options"):
            log.info("job_type_announced", type=kind.name, version=kind.version, package=package)
    if not is_complete:
        log.error("job_types_not_kept", application=manifest.application, most=MAX_ROWS)
    return is_complete


async def count_runners(client: Redis, application: str) -> dict[str, int]:
    """Return how many live runners take jobs of each type, as the queue knows it. Raises
    `RedisError`."""
    tag = job_keys.application_tag(application)
    runners = [text_of(runner) for runner in await reply_of(client.hkeys(job_keys.beats(tag)))]
    async with client.pipeline(transaction=False) as pipe:
        for runner in runners:
            pipe.hget(job_keys.runner(tag, runner), "manifests")
        digests = [text_of(value).split(",") if value else [] for value in await pipe.execute()]
        names = sorted({digest for of_runner in digests for digest in of_runner})
        for digest in names:
            pipe.smembers(job_keys.announced_types(tag, digest))
        types = dict(zip(names, await pipe.execute() if names else [], strict=True))
    counts: dict[str, int] = {}
    for of_runner in digests:
        for name in {text_of(name) for digest in of_runner for name in types[digest]}:
            counts[name] = counts.get(name, 0) + 1
    return counts


async def count_waiting(client: Redis, application: str) -> dict[str, int]:
    """Return how many jobs of each type, as the queue knows it, wait. Raises `RedisError`."""
    tag = job_keys.application_tag(application)
    queues = [text_of(queue) for queue in await reply_of(client.zrange(job_keys.ready(tag), 0, -1))]
    counts: dict[str, int] = {}
    async with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.zrange(job_keys.subqueues(tag, queue), 0, -1)
        names = [
            [text_of(name) for name in types] for types in (await pipe.execute() if queues else [])
        ]
        pairs = [
            (queue, name) for queue, types in zip(queues, names, strict=True) for name in types
        ]
        for queue, name in pairs:
            pipe.zcard(job_keys.subqueue(tag, queue, name))
        numbers = await pipe.execute() if pairs else []
    for (_, name), number in zip(pairs, numbers, strict=True):
        counts[name] = counts.get(name, 0) + int(number)
    return counts


async def _rows_of(session: AsyncSession, application: str) -> Sequence[JobTypeRow]:
    rows = select(JobTypeRow).where(JobTypeRow.application == application)
    return (await session.scalars(rows)).all()


async def find_newest_type(session: AsyncSession, name: str) -> ManifestType | None:
    """Return the version of a type that was announced last; None if there is none.

    Raises `msgspec.ValidationError` for one that this release cannot read.
    """
    newest_first = JobTypeRow.announced_at.desc(), JobTypeRow.version.desc()
    rows = select(JobTypeRow).where(JobTypeRow.name == name).order_by(*newest_first).limit(1)
    row = (await session.scalars(rows)).first()
    return None if row is None else msgspec.convert(row.definition, ManifestType)


async def _list_rows(session: AsyncSession) -> Sequence[JobTypeRow]:
    """Lists the announced types, the newest announcement of each type first."""
    newest_first = JobTypeRow.name, JobTypeRow.announced_at.desc(), JobTypeRow.version.desc()
    return (await session.scalars(select(JobTypeRow).order_by(*newest_first))).all()
