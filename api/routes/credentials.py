"""Broker credentials of a user's account."""

from __future__ import annotations

from fastapi import APIRouter

from api import log, problems
from api.auth import Caller, require_user
from api.errors import BodyTooLarge, NotFound
from api.routes.services import InServices
from api.schemas.credentials import StoreCredentials, StoredCredentials
from api.schemas.fields import AccountIdInPath, UserIdInPath
from api.services.container import Services
from infra.database import accounts, audit, users
from infra.vault import vault
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Credentials

router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["credentials"])


@router.put(
    "/credentials",
    summary="Store broker credentials",
    responses=problems.responses(NotFound, BodyTooLarge),
)
async def store_credentials(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    body: StoreCredentials,
    caller: Caller,
    services: InServices,
) -> StoredCredentials:
    """Encrypts and stores the credentials of one account; they are never shown again.

    A running worker of the user is told to load them; if that fails, it has the old ones until
    `POST /v1/users/{user_id}/worker/reload-credentials`.
    """
    require_user(caller, user_id)
    encrypted = await vault.encrypt(
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
        await users.get(session, user_id)
        version = await accounts.put(
            session,
            user_id=user_id,
            account_id=account_id,
            broker=body.broker.value,
            broker_type=body.broker_type,
            simulation=body.simulation,
            encrypted=encrypted,
        )
        audit.append(
            session,
            actor=f"key:{caller.key_id}",
            action="credentials.stored",
            subject=f"account:{user_id}/{account_id}",
            version=version,
            broker=body.broker.value,
        )
    return StoredCredentials(
        user_id=user_id,
        account_id=account_id,
        broker=body.broker.value,
        broker_type=body.broker_type,
        simulation=body.simulation,
        version=version,
        reload_signalled=await _tell_worker(services, user_id),
    )


async def _tell_worker(services: Services, user_id: str) -> bool:
    try:
        await services.control.reload_credentials(user_id)
    except BerthError as error:  # no worker, or no Temporal: what is stored counts from the next start
        log.logger().info("reload_not_signalled", user=user_id, code=error.code)
        return False
    return True
