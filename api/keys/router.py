"""Routes of administrators: API keys, the images that workers may be launched from, the audit
trail."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Self
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field, computed_field, field_validator, model_validator

from api.container import Call
from api.http import problems
from api.http.errors import GrantTooWide, NotFound
from api.http.fields import EMPTY_IS_NONE, Body, OfUser, PlainText, Reason, Rows, UserId, View
from api.http.grants import require_grant
from api.http.rights import (
    APPLICATION_SCOPE_PATTERN,
    SCOPES_OF,
    Role,
    Scope,
    jobs_scope,
    known_applications,
    known_scopes,
)
from api.http.times import AwareTime, QueryStart
from infra.database import api_keys, audit, images, users
from infra.database.api_keys import ApiKeyNotFound
from infra.database.models import ApiKey
from infra.database.trading import webhooks as stored_webhooks
from infra.database.users import UserNotFound
from infra.jobs.applications import ApplicationNotFound
from infra.networks import parse_network

#: Networks that a key may list, and things made by a revoked key that the answer lists.
MAX_SOURCES, MAX_LISTED = 32, 100
#: Printable ASCII: without spaces, and with them.
IMAGE_PATTERN = r"^[!-~]+$"
TEXT_PATTERN = r"^[ -~]*$"


#: For the jobs of one application.
ApplicationScope = Annotated[str, Field(pattern=APPLICATION_SCOPE_PATTERN)]


class ApiKeyRequest(Body):
    """A new key. A user's key needs the user, who must exist; the other roles have none."""

    role: Role
    user_id: UserId | None = None
    label: str = Field(
        min_length=1, max_length=128, pattern=TEXT_PATTERN, description="What it is for."
    )
    scopes: list[Scope | ApplicationScope] | None = Field(
        default=None,
        min_length=1,
        description="What it may do; null: all that its role may do. `jobs:shop` is for jobs of "
        "the application shop only.",
    )
    sources: list[Annotated[str, Field(max_length=64)]] = Field(
        default_factory=list,
        max_length=MAX_SOURCES,
        description="Addresses or networks (CIDR) that may use it; empty: those of the key "
        "that makes it.",
    )
    expires_at: AwareTime | None = Field(
        default=None, description="When it ends; left out: after 90 days; null: when it is revoked."
    )

    @field_validator("sources")
    @classmethod
    def _are_networks(cls, sources: list[str]) -> list[str]:
        return list(dict.fromkeys(str(parse_network(source)) for source in sources))

    @model_validator(mode="after")
    def _has_a_user_or_not(self) -> Self:
        if (self.role is Role.USER) != (self.user_id is not None):
            raise ValueError("a user's key needs user_id, and only that")
        if self.expires_at is not None and self.expires_at <= datetime.now(UTC):
            raise ValueError("expires_at has passed")
        words = set(self.scopes or ())
        applications = {jobs_scope(name) for name in known_applications(words)}
        allowed = set() if self.role is Role.USER else applications
        if surplus := sorted(words - SCOPES_OF[self.role] - allowed):
            known = ", ".join(sorted(SCOPES_OF[self.role]))
            raise ValueError(
                f"the role {self.role} has no scope {', '.join(surplus)}; it has: {known}"
            )
        return self

    @property
    def ends_at(self) -> datetime | None:
        if "expires_at" in self.model_fields_set:
            return self.expires_at
        return datetime.now(UTC) + api_keys.KEY_LIFE


class RotationRequest(Body):
    """How long the old key still counts."""

    overlap_hours: float = Field(default=24.0, ge=0, le=720)


_SCOPES = Field(
    description="What it may do; null: all that its role may do (a key from before scopes)."
)
_SOURCES = Field(description="Addresses or networks that may use it; empty: all.")


class ApiKeyView(View):
    """A key without its token."""

    id: UUID
    prefix: str = Field(description="How the token begins.")
    label: Annotated[str | None, EMPTY_IS_NONE]
    role: Role
    user_id: str | None
    scopes: Annotated[list[str] | None, _SCOPES]
    sources: Annotated[list[str], _SOURCES]
    created_at: datetime
    made_by: UUID | None = Field(description="The API key that made it, where that is known.")
    last_used_at: datetime | None = Field(description="To the minute.")
    expires_at: datetime | None
    revoked_at: datetime | None

    @computed_field(  # type: ignore[prop-decorator]
        description="It was made before there were scopes: rotate it, so that it gets an end."
    )
    @property
    def unrestricted(self) -> bool:
        return self.scopes is None


class NewApiKeyView(View):
    """The token is shown this once."""

    id: UUID
    role: Role
    api_key: str = Field(repr=False)
    scopes: Annotated[list[str] | None, _SCOPES]
    sources: Annotated[list[str], _SOURCES]
    expires_at: datetime | None

    @classmethod
    def of(cls, key: ApiKey, token: str) -> Self:
        return cls(
            id=key.id,
            role=Role(key.role),
            api_key=token,
            scopes=key.scopes,
            sources=key.sources,
            expires_at=key.expires_at,
        )


class MadeWebhookView(View):
    """A webhook that a revoked key had made."""

    id: UUID
    user_id: str
    account_id: str
    label: str
    revoked_at: datetime | None = Field(description="null: it still takes signals.")


class RevokedApiKeyView(ApiKeyView):
    """A key that was revoked, and what it had made that was still in use."""

    webhooks_revoked: int
    webhooks_left: int = Field(description="They still take signals.")
    webhooks: list[MadeWebhookView] = Field(description="The first 100.")
    api_keys: list[ApiKeyView] = Field(
        description="Keys that it had made, and those that these had made: the first 100."
    )


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
    action: PlainText | None = Field(
        None, max_length=64, description="How it begins, such as `api_key.`"
    )
    subject: PlainText | None = Field(
        default=None, max_length=160, description="To whom or what, such as `user:alice`."
    )
    since: QueryStart | None = Field(
        default=None, description="At or after this time. A day begins at midnight in Taipei."
    )
    cursor: int | None = Field(
        default=None, ge=1, le=2**63 - 1, description="As `next_cursor` says."
    )
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

WithWebhooks = Annotated[bool, Query(description="Revoke the webhooks that it has made, too.")]
WithKeys = Annotated[bool, Query(description="Revoke the API keys that it has made, too.")]
WithRevoked = Annotated[bool, Query(description="Revoked and expired ones, too.")]
Image = Annotated[
    str, Query(pattern=IMAGE_PATTERN, max_length=512, description="As it stands on the list.")
]


@router.get("", summary="List API keys", responses=problems.responses(NotFound))
async def list_api_keys(
    call: Call,
    user_id: OfUser = None,
    revoked: WithRevoked = False,
    limit: Rows = 100,
    cursor: Annotated[UUID | None, Query(description="`next_cursor` of the page before.")] = None,
) -> ApiKeyList:
    """Whose they are, what they may do, when they were last used and when they end, the latest
    first.

    A user's key sees the user's own ones.
    """
    if user_id is not None:
        call.require_user(user_id)
    rows = await call.database.fetch(
        api_keys.list_api_keys,
        user_id=user_id or call.caller.user_id,
        revoked=revoked,
        behind=cursor,
        limit=limit + 1,
    )
    shown = [ApiKeyView.model_validate(key) for key in rows[:limit]]
    return ApiKeyList(api_keys=shown, next_cursor=shown[-1].id if len(rows) > limit else None)


@router.post(
    "",
    status_code=201,
    summary="Make an API key",
    responses=problems.responses(
        UserNotFound, ApplicationNotFound, GrantTooWide, api_keys.ApiKeyLimitReached
    ),
)
async def create_api_key(body: ApiKeyRequest, call: Call) -> NewApiKeyView:
    """The key is shown this once. For administrators.

    It gets no scope that the key that makes it does not have, and no address that it may not be
    used from.
    """
    scopes = SCOPES_OF[body.role] if body.scopes is None else frozenset(body.scopes)
    for application in known_applications(scopes):
        await call.services.job_types.applications.require(application)
    sources = body.sources or [str(network) for network in call.caller.sources]
    require_grant(call.caller, scopes, sources)
    ends = body.ends_at
    async with call.database.session() as session:
        if body.user_id is not None:
            await users.get_user(session, body.user_id)
        await api_keys.require_room(session, body.user_id)
        token = call.services.tokens.make()
        new = await api_keys.create_api_key(
            session,
            token,
            body.role.value,
            body.user_id,
            body.label,
            ends,
            scopes=scopes,
            sources=sources,
            made_by=UUID(call.caller.key_id),
        )
        asked = body.model_dump(mode="json")
        asked |= {"scopes": new.scopes, "sources": sources, "expires_at": ends and ends.isoformat()}
        audit.append_entry(session, call.actor, "api_key.created", f"key:{new.id}", **asked)
    return NewApiKeyView.of(new, token)


@router.get("/self", summary="Look at the API key of this call")
async def get_own_key(call: Call) -> ApiKeyView:
    """What it may do, from where, and when it ends. Any key may ask this."""
    key = await call.database.fetch(api_keys.get_api_key, UUID(call.caller.key_id))
    return ApiKeyView.model_validate(key)


@router.post(
    "/self/rotate",
    status_code=201,
    summary="Rotate the API key of this call",
    responses=problems.responses(ApiKeyNotFound, api_keys.ApiKeyLimitReached),
)
async def rotate_own_key(body: RotationRequest, call: Call) -> NewApiKeyView:
    """As rotating it by its id. An operator's key, too, may do this."""
    return await _rotate(call, UUID(call.caller.key_id), body)


@router.delete(
    "/self", summary="Revoke the API key of this call", responses=problems.responses(ApiKeyNotFound)
)
async def revoke_own_key(
    call: Call,
    reason: Reason = "requested",
    webhooks: WithWebhooks = False,
    keys: WithKeys = False,
) -> RevokedApiKeyView:
    """As revoking it by its id. Any key may do this: whoever finds one ends it."""
    return await _revoke(call, UUID(call.caller.key_id), reason, webhooks=webhooks, keys=keys)


@router.post(
    "/{key_id}/rotate",
    status_code=201,
    summary="Rotate an API key",
    responses=problems.responses(ApiKeyNotFound, GrantTooWide, api_keys.ApiKeyLimitReached),
)
async def rotate_api_key(key_id: UUID, body: RotationRequest, call: Call) -> NewApiKeyView:
    """Makes a key that may do the same, for as long as the old one was made for, shown this once;
    the old one ends after the overlap.

    A key from before scopes gets all scopes of its role, and 90 days. A user's key rotates the
    user's own keys, and none that may do more than itself.
    """
    return await _rotate(call, key_id, body)


async def _rotate(call: Call, key_id: UUID, body: RotationRequest) -> NewApiKeyView:
    token, overlap = call.services.tokens.make(), timedelta(hours=body.overlap_hours)
    async with call.database.session() as session:
        old = await api_keys.get_api_key(
            session, key_id, user_id=call.caller.user_id, valid=True, lock=True
        )
        await api_keys.require_room(session, old.user_id)
        role = Role(old.role)
        scopes: frozenset[str] = known_scopes(old.scopes) or frozenset()
        scopes |= {jobs_scope(name) for name in known_applications(old.scopes)}
        if old.scopes is None:
            scopes = SCOPES_OF[role]
        if key_id != UUID(call.caller.key_id):
            require_grant(call.caller, scopes, old.sources or ["0.0.0.0/0", "::/0"])
        new = await api_keys.rotate_api_key(
            session, old, token, overlap, scopes=scopes, made_by=UUID(call.caller.key_id)
        )
        ends = old.expires_at and old.expires_at.isoformat()
        subject, became = f"key:{key_id}", f"key:{new.id}"
        audit.append_entry(session, call.actor, "api_key.rotated", subject, to=became, ends=ends)
    return NewApiKeyView.of(new, token)


@router.delete(
    "/{key_id}", summary="Revoke an API key", responses=problems.responses(ApiKeyNotFound)
)
async def revoke_api_key(
    key_id: UUID,
    call: Call,
    reason: Reason = "requested",
    webhooks: WithWebhooks = False,
    keys: WithKeys = False,
) -> RevokedApiKeyView:
    """No API process takes it any more, and its event streams end. A user's key revokes the user's
    own keys.

    What the key has made outlives it unless `webhooks` and `keys` are given: the answer lists it.
    """
    return await _revoke(call, key_id, reason, webhooks=webhooks, keys=keys)


async def _revoke(
    call: Call, key_id: UUID, reason: str, *, webhooks: bool, keys: bool
) -> RevokedApiKeyView:
    async with call.database.session() as session:
        if call.caller.user_id is not None:
            await api_keys.get_api_key(session, key_id, user_id=call.caller.user_id)
        made_keys = await api_keys.keys_made_by(session, key_id)
        ended = [key_id, *(key.id for key in made_keys)] if keys else [key_id]
        for made_id in ended[1:]:
            await api_keys.revoke_api_key(session, made_id)
            audit.append_entry(
                session,
                call.actor,
                "api_key.revoked",
                f"key:{made_id}",
                reason=reason,
                made_by=str(key_id),
            )
        key = await api_keys.revoke_api_key(session, key_id)
        made = await stored_webhooks.webhooks_made_by(session, ended)
        if webhooks:
            for hook in made:
                await stored_webhooks.revoke_webhook(
                    session, hook.user_id, hook.id, actor=call.actor
                )
            for hook in made:
                await session.refresh(hook)
        revoked = len(made) if webhooks else 0
        about = {"reason": reason, "webhooks": revoked, "keys": len(ended) - 1}
        audit.append_entry(session, call.actor, "api_key.revoked", f"key:{key_id}", **about)
        if keys:
            for made_key in made_keys:
                await session.refresh(made_key)
    for ended_id in ended:  # PostgreSQL's notification comes to this process later, too
        call.services.authenticator.forget(str(ended_id))
    return RevokedApiKeyView(
        **ApiKeyView.model_validate(key).model_dump(exclude={"unrestricted"}),
        webhooks_revoked=revoked,
        webhooks_left=len(made) - revoked,
        webhooks=[MadeWebhookView.model_validate(hook) for hook in made[:MAX_LISTED]],
        api_keys=[ApiKeyView.model_validate(made_key) for made_key in made_keys[:MAX_LISTED]],
    )


@image_router.get("", summary="List allowed images")
async def list_images(call: Call) -> ImageList:
    """What workers may be launched from, besides what the launcher was configured with."""
    rows = await call.database.fetch(images.allowed_images)
    return ImageList(images=[ImageView.model_validate(image) for image in rows])


@image_router.put("", summary="Allow an image", responses=problems.responses(images.ImageNotExact))
async def allow_image(body: ImageRequest, call: Call) -> ImageView:
    """Its workers get tokens with which they may get credentials. For administrators."""
    images.check_exact(call.services.settings.launcher, body.image)
    row = await call.database.write(
        images.allow_image, body.image, actor=call.actor, reason=body.reason
    )
    return ImageView.model_validate(row)


@image_router.delete(
    "", summary="Forbid an image", responses=problems.responses(images.ImageNotAllowed)
)
async def forbid_image(image: Image, call: Call, reason: Reason = "requested") -> ImageList:
    """Nothing is launched from it any more; workers that run go on. For administrators."""
    await call.database.write(images.forbid_image, image, actor=call.actor, reason=reason)
    return await list_images(call)


@audit_router.get("", summary="Read the audit trail")
async def list_audit_entries(call: Call, query: Annotated[AuditQuery, Query()]) -> AuditPage:
    """Who did what to whom, the latest first. For operators and administrators."""
    filters = query.model_dump(exclude={"cursor", "limit"})
    rows = await call.database.fetch(
        audit.list_entries, **filters, before=query.cursor, limit=query.limit + 1
    )
    shown = [AuditEntryView.model_validate(row) for row in rows[: query.limit]]
    return AuditPage(entries=shown, next_cursor=shown[-1].id if len(rows) > query.limit else None)
