"""Routes for users and the addresses of their daily statements."""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

from fastapi import APIRouter, status

from api.container import InServices
from api.http import problems
from api.http.auth import Caller, require_staff
from api.http.errors import Forbidden, InvalidRequest, NotFound
from api.http.fields import UserIdInPath
from api.users.schemas import StatementAddressesRequest, StatementAddressesView, UserRequest, UserWithKeyView
from api.workers.router import require_known_user
from infra.database import audit, users
from infra.database.models import StatementAddress
from infra.database.users import UserExists

router = APIRouter(prefix="/users", tags=["users"])


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    summary="Create a user",
    responses=problems.responses(UserExists, Forbidden),
)
async def create_user(body: UserRequest, caller: Caller, services: InServices) -> UserWithKeyView:
    """Creates a user and an API key for it, which is shown this once. For operators and administrators."""
    require_staff(caller)
    user_id = body.user_id or f"u-{secrets.token_hex(8)}"
    async with services.database.session() as session:
        user = await users.create_user(session, user_id)
        key = await users.create_api_key(session, "user", user_id)
        audit.append_entry(
            session,
            actor=caller.actor,
            action="user.created",
            subject=f"user:{user_id}",
            key_id=str(key.id),
        )
    return UserWithKeyView(user_id=user.id, created_at=user.created_at, api_key=key.token)


statement_router = APIRouter(tags=["users"])

_ADDRESSES_PATH = "/users/{user_id}/statement-addresses"


@statement_router.get(
    _ADDRESSES_PATH, summary="Look at statement addresses", responses=problems.responses(NotFound)
)
async def get_statement_addresses(
    user_id: UserIdInPath, caller: Caller, services: InServices
) -> StatementAddressesView:
    """Where the statement of each trading day goes."""
    await require_known_user(services, caller, user_id)
    async with services.database.session() as session:
        found = await users.get_addresses(session, user_id)
    return StatementAddressesView.model_validate(found)


@statement_router.put(
    _ADDRESSES_PATH,
    summary="Set statement addresses",
    responses=problems.responses(Forbidden, NotFound),
)
async def put_statement_addresses(
    user_id: UserIdInPath, body: StatementAddressesRequest, caller: Caller, services: InServices
) -> StatementAddressesView:
    """Sets both; without any the user gets no statements. For operators and administrators, who have to know
    that the address is the user's: nothing is sent to confirm it."""
    require_staff(caller)
    if body.webhook_url is not None:
        _check_has_host(body.webhook_url)
    await require_known_user(services, caller, user_id)
    addresses = StatementAddress(email=body.email, webhook_url=body.webhook_url)
    async with services.database.session() as session:
        await users.put_addresses(session, user_id, addresses, actor=caller.actor)
    return StatementAddressesView.model_validate(addresses)


def _check_has_host(url: str) -> None:
    """Raises `InvalidRequest` for a URL of no host; the fleet checks where it leads."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise InvalidRequest("webhook_url: it has no host")
