"""The images that workers may be launched from. A worker gets a token with which it may get
credentials, so an administrator decides what runs as one.

An image is named exactly, so that what it stands for cannot change later: by its digest, or on ECS
by a revision of a task definition. A launch without an image runs what the launcher was configured
with, which whoever deploys the orchestrator decides, and needs no entry.
"""

import re
from collections.abc import Sequence

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import AllowedImage
from worker_runtime.protocol.errors import BerthError

#: Launcher → the shape of an exact image.
#: The process launcher runs its own code, whatever the image.
_EXACT = {
    "docker": (re.compile(r"(.+@)?sha256:[0-9a-f]{64}"), "an image by its digest: name@sha256:…"),
    "ecs": (re.compile(r"[^@\s]+:[1-9][0-9]*"), "a revision of a task definition: family:7"),
}


class ImageNotAllowed(BerthError, code="IMAGE_NOT_ALLOWED", status=422):
    """The image is not on the list of those that workers may be launched from."""


class ImageNotExact(BerthError, code="IMAGE_NOT_EXACT", status=422):
    """The image's name could mean another image later. Name it by its digest, or on ECS by its
    revision."""


def check_exact(launcher: str, image: str) -> None:
    """Raises `ImageNotExact`."""
    shape, example = _EXACT.get(launcher, (None, ""))
    if shape is not None and not shape.fullmatch(image):
        raise ImageNotExact(f"launcher {launcher} takes {example}")


async def require_allowed(session: AsyncSession, image: str) -> None:
    """Raises `ImageNotAllowed`."""
    if image and await session.get(AllowedImage, image) is None:
        raise ImageNotAllowed(f"{image} is not on the list of allowed images")


async def allowed_images(session: AsyncSession) -> Sequence[AllowedImage]:
    """Returns all, the latest first."""
    return (
        await session.scalars(select(AllowedImage).order_by(AllowedImage.added_at.desc()))
    ).all()


async def allow_image(
    session: AsyncSession, image: str, *, actor: str, reason: str
) -> AllowedImage:
    """Puts an image on the list; one that is there stays as it is."""
    row = (
        insert(AllowedImage)
        .values(image=image, actor=actor, reason=reason)
        .on_conflict_do_nothing()
    )
    if await session.scalar(row.returning(AllowedImage.image)) is not None:
        subject = f"image:{image}"[:160]
        audit.append_entry(session, actor, "image.allowed", subject, image=image, reason=reason)
    return (await session.scalars(select(AllowedImage).where(AllowedImage.image == image))).one()


async def forbid_image(session: AsyncSession, image: str, *, actor: str, reason: str) -> None:
    """Takes an image from the list: nothing is launched from it any more. Its workers continue.

    Raises `ImageNotAllowed` if it is not there.
    """
    gone = delete(AllowedImage).where(AllowedImage.image == image).returning(AllowedImage.image)
    if await session.scalar(gone) is None:
        raise ImageNotAllowed(f"{image} is not on the list of allowed images")
    subject = f"image:{image}"[:160]
    audit.append_entry(session, actor, "image.forbidden", subject, image=image, reason=reason)
