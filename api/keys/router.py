"""Routes of administrators: API keys, the images that workers may be launched from, the audit trail."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Self
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field, model_validator

from api.container import Call
from api.http import problems
from api.http.fields import EMPTY_IS_NONE, Body, OfUser, PlainText, Reason, Rows, UserId, View
from api.http.rights import Role
from api.http.times import AwareTime, QueryStart
from infra.database import api_keys, audit, images, users
from infra.database.api_keys import ApiKeyNotFound
from infra.database.trading import webhooks as stored_webhooks
from infra.database.users import UserNotFound

#: Printable ASCII: without spaces, and with them.
IMAGE_PATTERN = r"^[!-~]+$"
TEXT_PATTERN = r"^[ -~]*$"


class ApiKeyRequest(Body):
    """A new key. A user's key needs the user, who must exist; the other roles have none."""

    role: Role
    user_id: UserId | None = None
    label: str = Field(min_length=1, max_length=128, pattern=TEXT_PATTERN, description="What it is for.")
    expires_at: AwareTime | None = Field(default=None, description="When it ends; null: when it is revoked.")

    @model_validator(mode="after")
    def _has_a_user_or_not(self) -> Self:
        if (self.role is Role.USER) != (self.user_id is not None):
            raise ValueError("a user's key needs user_id, and only that")
        if self.expires_at is not None and self.expires_at <= datetime.now(UTC):
            raise ValueError("expires_at has passed")
        return self


class RotationRequest(Body):
    """How long the old key still counts."""

    overlap_hours: float = Field(default=24.0, ge=0, le=720)


class ApiKeyView(View):
    """A key without its token."""

    id: UUID
    prefix: str = Field(description="How the token begins.")
    label: Annotated[str | None, EMPTY_IS_NONE]
    role: Role
    user_id: str | None
    created_at: datetime
    last_used_at: datetime | None = Field(description="To the minute.")
    expires_at: datetime | None
    revoked_at: datetime | None


class NewApiKeyView(View):
    """The token is shown this once."""

    id: UUID
    role: Role
    api_key: str
    expires_at: datetime | None


class RevokedApiKeyView(ApiKeyView):
    """A key that was revoked, and the webhooks that it had made."""

    webhooks_revoked: int
    webhooks_left: int = Field(description="They still take signals.")


class ApiKeyList(View):
    """A page of keys, the latest first."""

    api_keys: list[ApiKeyView]
    next_cursor: UUID | None = None


class ImageRequest(Body):
    """An image, named exactly: by its digest, or as a revision of a task definition on ECS."""

    image: str = Field(pattern=IMAGE_PATTERN, max_length=512)
    reason: Reason = "requested"


class ImageView(View):
    image: str
    actor: str = Field(description="Who put it on the list.")
    reason: str
    added_at: datetime


class ImageList(View):
    images: list[ImageView]


class AuditQuery(Body):
    """Which entries of the audit trail."""

    actor: PlainText | None = Field(None, max_length=128, description="A part of who did it.")
    action: PlainText | None = Field(None, max_length=64, description="How it begins, such as `api_key.`")
    subject: PlainText | None = Field(
        default=None, max_length=160, description="To whom or what, such as `user:alice`."
    )
    since: QueryStart | None = Field(
        default=None, description="At or after this time. A day begins at midnight in Taipei."
    )
    cursor: int | None = Field(default=None, ge=1, le=2**63 - 1, description="As `next_cursor` says.")
    limit: int = Field(default=100, ge=1, le=1000)


class AuditEntryView(View):
    """Who did what to whom."""

    id: int
    at: datetime
    actor: str = Field(description="The key's label and id, or the part of Berth.")
    action: str
    subject: str
    data: dict[str, Any]


class AuditPage(View):
    entries: list[AuditEntryView]
    next_cursor: int | None


router = APIRouter(prefix="/api-keys", tags=["keys"])
image_router = APIRouter(prefix="/images", tags=["images"])
audit_router = APIRouter(prefix="/audit", tags=["audit"])

WithRevoked = Annotated[bool, Query(description="Revoked and expired ones, too.")]
Image = Annotated[str, Query(pattern=IMAGE_PATTERN, max_length=512, description="As it stands on the list.")]


@router.get("", summary="List API keys")
async def list_api_keys(
    call: Call,
    user_id: OfUser = None,
    revoked: WithRevoked = False,
    limit: Rows = 100,
    cursor: Annotated[UUID | None, Query(description="`next_cursor` of the page before.")] = None,
) -> ApiKeyList:
    """Whose they are, when they were last used and when they end, the latest first. For administrators."""
    found = await call.database.fetch(
        api_keys.list_api_keys, user_id=user_id, revoked=revoked, behind=cursor, limit=limit + 1
    )
    shown = [ApiKeyView.model_validate(key) for key in found[:limit]]
    return ApiKeyList(api_keys=shown, next_cursor=shown[-1].id if len(found) > limit else None)


@router.post("", status_code=201, summary="Make an API key", responses=problems.responses(UserNotFound))
async def create_api_key(body: ApiKeyRequest, call: Call) -> NewApiKeyView:
    """The key is shown this once. For administrators."""
    async with call.database.session() as session:
        if body.user_id is not None:
            await users.get_user(session, body.user_id)
        token = call.services.tokens.make()
        new = await api_keys.create_api_key(
            session, token, body.role.value, body.user_id, body.label, body.expires_at
        )
        asked = body.model_dump(mode="json")
        audit.append_entry(session, call.actor, "api_key.created", f"key:{new.id}", **asked)
    return NewApiKeyView(id=new.id, role=body.role, api_key=token, expires_at=new.expires_at)


@router.post(
    "/{key_id}/rotate",
    status_code=201,
    summary="Rotate an API key",
    responses=problems.responses(ApiKeyNotFound),
)
async def rotate_api_key(key_id: UUID, body: RotationRequest, call: Call) -> NewApiKeyView:
    """Makes a key with the same role, user, label and life, shown this once; the old one ends after the
    overlap. For administrators."""
    token, overlap = call.services.tokens.make(), timedelta(hours=body.overlap_hours)
    async with call.database.session() as session:
        new, old = await api_keys.rotate_api_key(session, key_id, token, overlap)
        ends = old.expires_at and old.expires_at.isoformat()
        subject, became = f"key:{key_id}", f"key:{new.id}"
        audit.append_entry(session, call.actor, "api_key.rotated", subject, to=became, ends=ends)
    return NewApiKeyView(id=new.id, role=Role(new.role), api_key=token, expires_at=new.expires_at)


@router.delete("/{key_id}", summary="Revoke an API key", responses=problems.responses(ApiKeyNotFound))
async def revoke_api_key(
    key_id: UUID,
    call: Call,
    reason: Reason = "requested",
    webhooks: Annotated[bool, Query(description="Revoke the webhooks that it has made, too.")] = False,
) -> RevokedApiKeyView:
    """No API process takes it any more, and its event streams end. For administrators.

    A webhook that the key has made outlives it, unless `webhooks` is given: the answer counts them.
    """
    async with call.database.session() as session:
        key = await api_keys.revoke_api_key(session, key_id)
        revoked = await stored_webhooks.revoke_made_by(session, key_id, actor=call.actor) if webhooks else 0
        left = await stored_webhooks.count_made_by(session, key_id)
        audit.append_entry(session, call.actor, "api_key.revoked", f"key:{key_id}", reason=reason)
    shown = ApiKeyView.model_validate(key).model_dump()
    return RevokedApiKeyView(**shown, webhooks_revoked=revoked, webhooks_left=left)


@image_router.get("", summary="List allowed images")
async def list_images(call: Call) -> ImageList:
    """What workers may be launched from, besides what the launcher was configured with."""
    found = await call.database.fetch(images.allowed_images)
    return ImageList(images=[ImageView.model_validate(image) for image in found])


@image_router.put("", summary="Allow an image", responses=problems.responses(images.ImageNotExact))
async def allow_image(body: ImageRequest, call: Call) -> ImageView:
    """Its workers get tokens with which they may get credentials. For administrators."""
    images.check_exact(call.services.settings.launcher, body.image)
    found = await call.database.write(images.allow_image, body.image, actor=call.actor, reason=body.reason)
    return ImageView.model_validate(found)


@image_router.delete("", summary="Forbid an image", responses=problems.responses(images.ImageNotAllowed))
async def forbid_image(image: Image, call: Call, reason: Reason = "requested") -> ImageList:
    """Nothing is launched from it any more; workers that run go on. For administrators."""
    await call.database.write(images.forbid_image, image, actor=call.actor, reason=reason)
    return await list_images(call)


@audit_router.get("", summary="Read the audit trail")
async def list_audit_entries(call: Call, query: Annotated[AuditQuery, Query()]) -> AuditPage:
    """Who did what to whom, the latest first. For operators and administrators."""
    wanted = query.model_dump(exclude={"cursor", "limit"})
    rows = await call.database.fetch(audit.list_entries, **wanted, before=query.cursor, limit=query.limit + 1)
    shown = [AuditEntryView.model_validate(row) for row in rows[: query.limit]]
    return AuditPage(entries=shown, next_cursor=shown[-1].id if len(rows) > query.limit else None)
