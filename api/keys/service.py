"""Makes, rotates and revokes API keys: in one transaction each, with the audit entry."""

from datetime import timedelta
from uuid import UUID

from api.container import AuthorizedCall
from api.http.grants import require_grant
from api.http.rights import (
    SCOPES_OF,
    Role,
    jobs_scope,
    known_applications,
    known_scopes,
)
from api.keys.schemas import (
    ApiKeyRequest,
    ApiKeyView,
    MadeWebhookView,
    NewApiKeyView,
    RevokedApiKeyView,
    RotationRequest,
)
from infra.database import api_keys, audit, users
from infra.database.trading import webhooks as stored_webhooks

#: Webhooks, and keys, made by a revoked key that the answer lists.
MAX_LISTED_PER_KIND = 100


async def create_key(call: AuthorizedCall, body: ApiKeyRequest) -> NewApiKeyView:
    """Makes a key. Raises `GrantTooWide`, `UserNotFound`, `ApplicationNotFound` and
    `ApiKeyLimitReached`."""
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


async def rotate_key(call: AuthorizedCall, key_id: UUID, body: RotationRequest) -> NewApiKeyView:
    """Makes a key with the rights of `key_id`, which ends after the overlap.

    Raises `GrantTooWide`, `ApiKeyNotFound` and `ApiKeyLimitReached`.
    """
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


async def revoke_key(
    call: AuthorizedCall, key_id: UUID, reason: str, *, webhooks: bool, keys: bool
) -> RevokedApiKeyView:
    """Revokes a key and, if asked, the `webhooks` and `keys` that it has made. Raises
    `ApiKeyNotFound`."""
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
        made_webhooks = await stored_webhooks.webhooks_made_by(session, ended)
        if webhooks:
            for hook in made_webhooks:
                await stored_webhooks.revoke_webhook(
                    session, hook.user_id, hook.id, actor=call.actor
                )
            for hook in made_webhooks:
                await session.refresh(hook)
        webhooks_revoked = len(made_webhooks) if webhooks else 0
        about = {"reason": reason, "webhooks": webhooks_revoked, "keys": len(ended) - 1}
        audit.append_entry(session, call.actor, "api_key.revoked", f"key:{key_id}", **about)
        if keys:
            for made_key in made_keys:
                await session.refresh(made_key)
    for ended_id in ended:  # PostgreSQL's notification comes to this process later, too
        call.services.authenticator.forget(str(ended_id))
    return RevokedApiKeyView(
        **ApiKeyView.model_validate(key).model_dump(exclude={"unrestricted"}),
        webhooks_revoked=webhooks_revoked,
        webhooks_left=len(made_webhooks) - webhooks_revoked,
        webhooks=[
            MadeWebhookView.model_validate(hook) for hook in made_webhooks[:MAX_LISTED_PER_KIND]
        ],
        api_keys=[
            ApiKeyView.model_validate(made_key) for made_key in made_keys[:MAX_LISTED_PER_KIND]
        ],
    )
