"""Users."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, status

from api import problems
from api.auth import Caller, require_staff
from api.errors import BodyTooLarge, Forbidden
from api.routes.services import InServices
from api.schemas.users import NewUser, UserWithKey
from infra.database import api_keys, audit, users
from infra.database.users import UserExists

router = APIRouter(prefix="/users", tags=["users"])


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    summary="Create a user",
    responses=problems.responses(UserExists, Forbidden, BodyTooLarge),
)
async def create_user(body: NewUser, caller: Caller, services: InServices) -> UserWithKey:
    """Creates a user and an API key for it, which is shown this once. For operators and administrators."""
    require_staff(caller)
    user_id = body.user_id or f"u-{secrets.token_hex(8)}"
    async with services.database.session() as session:
        user = await users.create(session, user_id)
        key = await api_keys.create(session, "user", user_id)
        audit.append(
            session,
            actor=f"key:{caller.key_id}",
            action="user.created",
            subject=f"user:{user_id}",
            key_id=str(key.id),
        )
    return UserWithKey(user_id=user.id, created_at=user.created_at, api_key=key.token)
