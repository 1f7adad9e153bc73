"""Routes for users: the addresses of their statements, their accounts' broker credentials and limits."""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

import structlog
from fastapi import APIRouter, status

from api.container import InServices, Services
from api.http import problems
from api.http.auth import Caller, require_staff, require_user
from api.http.errors import Forbidden, InvalidRequest, NotFound
from api.http.fields import AccountIdInPath, UserIdInPath
from api.users import schemas
from infra.database import accounts, audit, users
from infra.database.models import StatementAddress
from infra.database.trading import limits as trading_limits
from infra.database.trading.models import AccountLimits
from infra.database.users import UserExists
from infra.vault import vault
from worker_runtime.protocol.errors import BerthError, UnknownAccount
from worker_runtime.protocol.messages import Credentials

router = APIRouter(prefix="/users", tags=["users"])
credentials_router = APIRouter(prefix="/users", tags=["credentials"])
limit_router = APIRouter(prefix="/users", tags=["accounts"])

_ADDRESSES_PATH = "/{user_id}/statement-addresses"
_LIMITS_PATH = "/{user_id}/accounts/{account_id}/limits"


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    summary="Create a user",
    responses=problems.responses(UserExists, Forbidden),
)
async def create_user(
    body: schemas.UserRequest, caller: Caller, services: InServices
) -> schemas.UserWithKeyView:
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
    return schemas.UserWithKeyView(user_id=user.id, created_at=user.created_at, api_key=key.token)


@router.get(_ADDRESSES_PATH, summary="Look at statement addresses", responses=problems.responses(NotFound))
async def get_statement_addresses(
    user_id: UserIdInPath, caller: Caller, services: InServices
) -> schemas.StatementAddressesView:
    """Where the statement of each trading day goes."""
    await services.require_known_user(caller, user_id)
    async with services.database.session() as session:
        found = await users.get_addresses(session, user_id)
    return schemas.StatementAddressesView.model_validate(found)


@router.put(
    _ADDRESSES_PATH,
    summary="Set statement addresses",
    responses=problems.responses(Forbidden, NotFound),
)
async def put_statement_addresses(
    user_id: UserIdInPath, body: schemas.StatementAddressesRequest, caller: Caller, services: InServices
) -> schemas.StatementAddressesView:
    """Sets both; without any the user gets no statements. For operators and administrators, who have to know
    that the address is the user's: nothing is sent to confirm it."""
    require_staff(caller)
    if body.webhook_url is not None:
        _check_has_host(body.webhook_url)
    await services.require_known_user(caller, user_id)
    addresses = StatementAddress(email=body.email, webhook_url=body.webhook_url)
    async with services.database.session() as session:
        await users.put_addresses(session, user_id, addresses, actor=caller.actor)
    return schemas.StatementAddressesView.model_validate(addresses)


def _check_has_host(url: str) -> None:
    """Raises `InvalidRequest` for a URL of no host; the fleet checks where it leads."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise InvalidRequest("webhook_url: it has no host")


@credentials_router.put(
    "/{user_id}/accounts/{account_id}/credentials",
    summary="Store broker credentials",
    responses=problems.responses(NotFound),
)
async def store_credentials(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: schemas.CredentialsRequest,
    caller: Caller,
    services: InServices,
) -> schemas.CredentialsView:
    """Encrypts and stores the credentials of one account; they are never shown again.

    A running worker of the user is told to load them; if that fails, it has the old ones until
    `POST /v1/users/{user_id}/worker/reload-credentials`.
    """
    require_user(caller, user_id)
    encrypted = await vault.encrypt_credentials(
        Credentials(
            api_key=body.api_key.get_secret_value(),
            secret_key=body.secret_key.get_secret_value(),
            person_id=body.person_id.get_secret_value(),
            ca_certificate=body.ca_certificate,
            ca_password=body.ca_password.get_secret_value(),
        ),
        services.wrapper,
        user_id=user_id,
        account_id=account_id,
    )
    shown = body.model_dump(mode="json", include={"broker", "broker_type", "simulation"})
    async with services.database.session() as session:
        await users.get_user(session, user_id)
        version = await accounts.put_account(
            session, user_id=user_id, account_id=account_id, **shown, encrypted=encrypted
        )
        audit.append_entry(
            session,
            actor=caller.actor,
            action="credentials.stored",
            subject=f"account:{user_id}/{account_id}",
            version=version,
            broker=body.broker.value,
        )
    return schemas.CredentialsView(
        user_id=user_id,
        account_id=account_id,
        **shown,
        version=version,
        reload_signalled=await _signal_reload(services, user_id),
    )


async def _signal_reload(services: Services, user_id: str) -> bool:
    try:
        await services.control.signal(user_id, "reload_credentials")
    except BerthError as error:  # no worker, or no Temporal: what is stored counts from the next start
        structlog.get_logger().info("reload_not_signalled", user=user_id, code=error.code)
        return False
    return True


@limit_router.get(
    _LIMITS_PATH, summary="Look at limits", responses=problems.responses(NotFound, UnknownAccount)
)
async def get_limits(
    user_id: UserIdInPath, account_id: AccountIdInPath, caller: Caller, services: InServices
) -> schemas.AccountLimitsView:
    """What the account may do, where that differs from the settings."""
    require_user(caller, user_id)
    async with services.database.session() as session:
        await accounts.require_account(session, user_id, account_id)
        found = await trading_limits.get_limits(session, user_id, account_id)
    return schemas.AccountLimitsView.model_validate(found)


@limit_router.put(
    _LIMITS_PATH,
    summary="Set limits",
    responses=problems.responses(Forbidden, UnknownAccount),
)
async def put_limits(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: schemas.AccountLimitsRequest,
    caller: Caller,
    services: InServices,
) -> schemas.AccountLimitsView:
    """Sets all of them; what is left out is as the settings say. In force within 5 s. For operators and
    administrators."""
    require_staff(caller)
    limits = AccountLimits(**body.model_dump())
    async with services.database.session() as session:
        await accounts.require_account(session, user_id, account_id)
        await trading_limits.put_limits(session, user_id, account_id, limits, actor=caller.actor)
    return schemas.AccountLimitsView.model_validate(limits)
