"""Routes for a user's account: its broker credentials, and its limits for the pre-trade checks."""

from __future__ import annotations

from fastapi import APIRouter

from api.container import InServices, Services
from api.http import log, problems
from api.http.auth import Caller, require_staff, require_user
from api.http.errors import Forbidden, NotFound
from api.http.fields import AccountIdInPath, UserIdInPath
from api.users.schemas import AccountLimitsRequest, AccountLimitsView, CredentialsRequest, CredentialsView
from infra.database import accounts, audit, users
from infra.database.trading import limits as trading_limits
from infra.database.trading.models import AccountLimits
from infra.vault import vault
from worker_runtime.protocol.errors import BerthError, UnknownAccount
from worker_runtime.protocol.messages import Credentials

router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["credentials"])


@router.put(
    "/credentials",
    summary="Store broker credentials",
    responses=problems.responses(NotFound),
)
async def store_credentials(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: CredentialsRequest,
    caller: Caller,
    services: InServices,
) -> CredentialsView:
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
    async with services.database.session() as session:
        await users.get_user(session, user_id)
        version = await accounts.put_account(
            session,
            user_id=user_id,
            account_id=account_id,
            broker=body.broker.value,
            broker_type=body.broker_type,
            simulation=body.simulation,
            encrypted=encrypted,
        )
        audit.append_entry(
            session,
            actor=caller.actor,
            action="credentials.stored",
            subject=f"account:{user_id}/{account_id}",
            version=version,
            broker=body.broker.value,
        )
    return CredentialsView(
        user_id=user_id,
        account_id=account_id,
        broker=body.broker.value,
        broker_type=body.broker_type,
        simulation=body.simulation,
        version=version,
        reload_signalled=await _signal_reload(services, user_id),
    )


async def _signal_reload(services: Services, user_id: str) -> bool:
    try:
        await services.control.reload_credentials(user_id)
    except BerthError as error:  # no worker, or no Temporal: what is stored counts from the next start
        log.logger().info("reload_not_signalled", user=user_id, code=error.code)
        return False
    return True


limit_router = APIRouter(tags=["accounts"])

_LIMITS_PATH = "/users/{user_id}/accounts/{account_id}/limits"


@limit_router.get(
    _LIMITS_PATH, summary="Look at limits", responses=problems.responses(NotFound, UnknownAccount)
)
async def get_limits(
    user_id: UserIdInPath, account_id: AccountIdInPath, caller: Caller, services: InServices
) -> AccountLimitsView:
    """What the account may do, where that differs from the settings."""
    require_user(caller, user_id)
    async with services.database.session() as session:
        await accounts.require_account(session, user_id, account_id)
        found = await trading_limits.get_limits(session, user_id, account_id)
    return AccountLimitsView.model_validate(found)


@limit_router.put(
    _LIMITS_PATH,
    summary="Set limits",
    responses=problems.responses(Forbidden, UnknownAccount),
)
async def put_limits(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: AccountLimitsRequest,
    caller: Caller,
    services: InServices,
) -> AccountLimitsView:
    """Sets all of them; what is left out is as the settings say. In force within 5 s. For operators and
    administrators."""
    require_staff(caller)
    limits = AccountLimits(**body.model_dump())
    async with services.database.session() as session:
        await accounts.require_account(session, user_id, account_id)
        await trading_limits.put_limits(session, user_id, account_id, limits, actor=caller.actor)
    return AccountLimitsView.model_validate(limits)
