"""Routes of administrators: API keys, the images that workers may be launched from, the audit
trail."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from api.container import Call
from api.http import problems
from api.http.errors import GrantTooWide, NotFound
from api.http.fields import OfUser, Reason, Rows
from api.keys.schemas import (
    IMAGE_PATTERN,
    ApiKeyList,
    ApiKeyRequest,
    ApiKeyView,
    AuditEntryView,
    AuditPage,
    AuditQuery,
    ImageList,
    ImageRequest,
    ImageView,
    NewApiKeyView,
    RevokedApiKeyView,
    RotationRequest,
)
from api.keys.service import create_key, revoke_key, rotate_key
from infra.database import api_keys, audit, images
from infra.database.api_keys import ApiKeyNotFound
from infra.database.users import UserNotFound
from infra.jobs.applications import ApplicationNotFound

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
    """Shows whose they are, what they may do, when they were last used and when they end, the
    latest first.

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
    summary="Create an API key",
    responses=problems.responses(
        UserNotFound, ApplicationNotFound, GrantTooWide, api_keys.ApiKeyLimitReached
    ),
)
async def create_api_key(body: ApiKeyRequest, call: Call) -> NewApiKeyView:
    """Shows the key only in this answer. For administrators.

    It gets no scope that the key that makes it does not have, and no address that it may not be
    used from.
    """
    return await create_key(call, body)


@router.get("/self", summary="Get the API key of this call")
async def get_own_key(call: Call) -> ApiKeyView:
    """Shows what the key may do, from where, and when it ends. Any key may ask this."""
    key = await call.database.fetch(api_keys.get_api_key, UUID(call.caller.key_id))
    return ApiKeyView.model_validate(key)


@router.post(
    "/self/rotate",
    status_code=201,
    summary="Rotate the API key of this call",
    responses=problems.responses(ApiKeyNotFound, api_keys.ApiKeyLimitReached),
)
async def rotate_own_key(body: RotationRequest, call: Call) -> NewApiKeyView:
    """Works as the route with its id does. An operator's key may do this, too."""
    return await rotate_key(call, UUID(call.caller.key_id), body)


@router.delete(
    "/self", summary="Revoke the API key of this call", responses=problems.responses(ApiKeyNotFound)
)
async def revoke_own_key(
    call: Call,
    reason: Reason = "requested",
    webhooks: WithWebhooks = False,
    keys: WithKeys = False,
) -> RevokedApiKeyView:
    """Works as the route with its id does. Any key may do this: anyone who finds a key
    can end it."""
    return await revoke_key(call, UUID(call.caller.key_id), reason, webhooks=webhooks, keys=keys)


@router.post(
    "/{key_id}/rotate",
    status_code=201,
    summary="Rotate an API key",
    responses=problems.responses(ApiKeyNotFound, GrantTooWide, api_keys.ApiKeyLimitReached),
)
async def rotate_api_key(key_id: UUID, body: RotationRequest, call: Call) -> NewApiKeyView:
    """Makes a successor with the same rights and lifetime, which is shown only in this answer. The
    old key ends after the overlap.

    A key from before scopes gets all scopes of its role, and 90 days. A user's key rotates the
    user's own keys, and none that may do more than itself.
    """
    return await rotate_key(call, key_id, body)


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
    """Ends the key's event streams; from now on all API processes refuse the key. A user's key
    revokes the user's own keys.

    What the key has made outlives it unless `webhooks` and `keys` are given: the answer lists it.
    """
    return await revoke_key(call, key_id, reason, webhooks=webhooks, keys=keys)


@image_router.get("", summary="List allowed images")
async def list_images(call: Call) -> ImageList:
    """Leaves out the image that the launcher was configured with, from which workers are launched
    in any case."""
    rows = await call.database.fetch(images.allowed_images)
    return ImageList(images=[ImageView.model_validate(image) for image in rows])


@image_router.put("", summary="Allow an image", responses=problems.responses(images.ImageNotExact))
async def allow_image(body: ImageRequest, call: Call) -> ImageView:
    """Lets workers of this image get tokens, and with them users' credentials. For
    administrators."""
    images.check_exact(call.services.settings.launcher, body.image)
    row = await call.database.write(
        images.allow_image, body.image, actor=call.actor, reason=body.reason
    )
    return ImageView.model_validate(row)


@image_router.delete(
    "", summary="Forbid an image", responses=problems.responses(images.ImageNotAllowed)
)
async def forbid_image(image: Image, call: Call, reason: Reason = "requested") -> ImageList:
    """Launches nothing from it any more; workers that run continue. For administrators."""
    await call.database.write(images.forbid_image, image, actor=call.actor, reason=reason)
    return await list_images(call)


@audit_router.get("", summary="Read the audit trail")
async def list_audit_entries(call: Call, query: Annotated[AuditQuery, Query()]) -> AuditPage:
    """Shows who did what to whom, the latest first. For operators and administrators."""
    filters = query.model_dump(exclude={"cursor", "limit"})
    rows = await call.database.fetch(
        audit.list_entries, **filters, before=query.cursor, limit=query.limit + 1
    )
    shown = [AuditEntryView.model_validate(row) for row in rows[: query.limit]]
    return AuditPage(entries=shown, next_cursor=shown[-1].id if len(rows) > query.limit else None)
