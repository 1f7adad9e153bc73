"""An account's own limits for the pre-trade checks."""

from __future__ import annotations

from fastapi import APIRouter

from api import problems
from api.auth import Caller, require_staff, require_user
from api.errors import BodyTooLarge, Forbidden, NotFound
from api.routes.services import InServices
from api.schemas.fields import AccountIdInPath, UserIdInPath
from api.schemas.limits import AccountLimits, PutLimits
from infra.database import accounts, trading_limits
from infra.database.trading_limits import Limits
from worker_runtime.protocol.errors import UnknownAccount

router = APIRouter(tags=["accounts"])

_PATH = "/users/{user_id}/accounts/{account_id}/limits"


@router.get(_PATH, summary="Look at limits", responses=problems.responses(NotFound, UnknownAccount))
async def get_limits(
    user_id: UserIdInPath, account_id: AccountIdInPath, caller: Caller, services: InServices
) -> AccountLimits:
    """What the account may do, where that differs from the settings."""
    require_user(caller, user_id)
    async with services.database.session() as session:
        if not await accounts.exists(session, user_id, account_id):
            raise UnknownAccount(f"user {user_id} has no account {account_id}")
        found = await trading_limits.get(session, user_id, account_id)
    return _view(found)


@router.put(
    _PATH,
    summary="Set limits",
    responses=problems.responses(Forbidden, UnknownAccount, BodyTooLarge),
)
async def put_limits(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: PutLimits,
    caller: Caller,
    services: InServices,
) -> AccountLimits:
    """Sets all of them; what is left out is as the settings say. In force within 5 s. For operators and
    administrators."""
    require_staff(caller)
    limits = Limits(**{name: getattr(body, name) for name in PutLimits.model_fields})
    async with services.database.session() as session:
        if not await accounts.exists(session, user_id, account_id):
            raise UnknownAccount(f"user {user_id} has no account {account_id}")
        await trading_limits.put(session, user_id, account_id, limits, actor=f"key:{caller.key_id}")
    return _view(limits)


def _view(limits: Limits) -> AccountLimits:
    return AccountLimits(**{name: getattr(limits, name) for name in AccountLimits.model_fields})
