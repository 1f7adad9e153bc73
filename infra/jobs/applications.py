"""Manages applications: names under which operators run job types of their own.

Each application has its own key and tag.

An application's key is derived from the message secret, its name and a generation. Its runners
and direct producers get nothing else of the secret, so they can sign nothing of another
application, of a user or of Berth's built-in job types. `rotate` begins a new generation; the
former one counts until it is retired.
"""

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from sqlalchemy import String, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from infra.database.engine import Database
from infra.database.models import Base
from infra.settings import Settings
from infra.vault.message_secret import Keys, MessageSecretFile, MessageSecrets, write_keys
from worker_runtime.protocol.errors import BerthError

#: Seconds after which the applications are read again.
REFRESH_INTERVAL_S = 2.0
#: Applications of one system.
MAX_APPLICATIONS = 100
#: Generations of one application's key; their numbers have three digits
#: (`MessageSecrets.application_keys`).
MAX_GENERATION = 999


class ApplicationNotFound(BerthError, code="APPLICATION_NOT_FOUND", status=404):
    """There is no application of this name.
    `berth jobs application list` shows those that exist."""


class ApplicationExists(BerthError, code="APPLICATION_EXISTS", status=409):
    """There is already an application of this name."""


class RotationRefused(BerthError, code="APPLICATION_ROTATION_REFUSED", status=409):
    """The application's key cannot be rotated or retired now; the detail says why."""


class JobApplication(Base):
    """An application."""

    __tablename__ = "job_applications"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    #: The generation of its key; only grows.
    generation: Mapped[int] = mapped_column(server_default=text("1"))
    #: The one before, while it counts, too.
    former_generation: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    created_by: Mapped[str] = mapped_column(String(128))

    @property
    def generations(self) -> tuple[int, ...]:
        """The generations of its key that count, newest first."""
        former = self.former_generation
        return (self.generation,) if former is None else (self.generation, former)


async def list_applications(session: AsyncSession) -> Sequence[JobApplication]:
    """Return all applications by name."""
    return (await session.scalars(select(JobApplication).order_by(JobApplication.name))).all()


async def add_application(session: AsyncSession, name: str, actor: str) -> JobApplication:
    """Raises `ApplicationExists`."""
    if len(await list_applications(session)) >= MAX_APPLICATIONS:
        raise ApplicationExists(f"There are {MAX_APPLICATIONS} applications already.")
    row = insert(JobApplication).values(name=name, created_by=actor).on_conflict_do_nothing()
    added: JobApplication | None = await session.scalar(row.returning(JobApplication))
    if added is None:
        raise ApplicationExists(f"There is already an application {name}.")
    return added


async def rotate_application(
    session: AsyncSession, name: str, *, retire: bool = False
) -> JobApplication:
    """Begin a new generation of the key; or, with `retire`, end the former one.

    Raises `ApplicationNotFound`, `RotationRefused`.
    """
    application = await session.get(JobApplication, name, with_for_update=True)
    if application is None:
        raise ApplicationNotFound(f"There is no application {name}.")
    if retire:
        application.former_generation = None
    elif application.former_generation is not None:
        raise RotationRefused(
            f"Generation {application.former_generation} of {name} still counts. Restart its "
            "runners and producers with the new key file, then retire the former generation with "
            "--retire."
        )
    elif application.generation >= MAX_GENERATION:
        raise RotationRefused(
            f"{name} has had {MAX_GENERATION} generations of its key; make another application."
        )
    else:
        application.former_generation = application.generation
        application.generation += 1
    await session.flush()
    return application


class ApplicationDirectory:
    """The applications as one process knows them, at most `REFRESH_INTERVAL_S` old.

    Each `load` also says to the process's message secrets which generations of keys count.
    """

    def __init__(self, database: Database, secrets: MessageSecrets) -> None:
        self._database = database
        self._secrets = secrets
        self._loaded_at: float | None = None
        self._applications: dict[str, JobApplication] = {}

    async def load(self, max_age_s: float = REFRESH_INTERVAL_S) -> dict[str, JobApplication]:
        """Return all applications by name. Raises `DatabaseUnavailable`."""
        if self._loaded_at is None or time.monotonic() - self._loaded_at > max_age_s:
            began = time.monotonic()
            rows = await self._database.read(list_applications)
            self._applications = {row.name: row for row in rows}
            self._secrets.set_generations({row.name: row.generations for row in rows})
            self._loaded_at = began
        return self._applications

    async def require(self, name: str) -> JobApplication:
        """Return one application. Raises `ApplicationNotFound`, `DatabaseUnavailable`."""
        application = (await self.load()).get(name) or (await self.load(max_age_s=0.2)).get(name)
        if application is None:
            raise ApplicationNotFound(f"There is no application {name}.")
        return application


def key_file_of(settings: Settings, name: str) -> Path:
    """Return the file with an application's keys, which its runners and direct producers get."""
    return settings.message_key_file.parent / "applications" / f"{name}.key"


def write_application_keys(settings: Settings, application: JobApplication) -> Path:
    """Write the file with an application's keys (mode 0600); returns its path.

    Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`.
    """
    secrets = MessageSecretFile(settings.message_key_file)
    keys: Keys = secrets.application_keys(application.name, application.generations)
    path = key_file_of(settings, application.name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_keys(path, keys)
    return path
