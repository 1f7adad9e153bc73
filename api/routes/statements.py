"""Where a user's daily statements go."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import APIRouter

from api import problems
from api.auth import Caller, require_staff
from api.errors import BodyTooLarge, Forbidden, InvalidRequest, NotFound
from api.routes.services import InServices
from api.routes.workers import known
from api.schemas.fields import UserIdInPath
from api.schemas.statements import PutStatementAddresses, StatementAddresses
from infra.database import statement_addresses
from infra.database.statement_addresses import Addresses

router = APIRouter(tags=["users"])

_PATH = "/users/{user_id}/statement-addresses"


@router.get(_PATH, summary="Look at statement addresses", responses=problems.responses(NotFound))
async def get_statement_addresses(
    user_id: UserIdInPath, caller: Caller, services: InServices
) -> StatementAddresses:
    """Where the statement of each trading day goes."""
    await known(services, caller, user_id)
    async with services.database.session() as session:
        found = await statement_addresses.get(session, user_id)
    return StatementAddresses(email=found.email, webhook_url=found.webhook_url)


@router.put(
    _PATH,
    summary="Set statement addresses",
    responses=problems.responses(Forbidden, NotFound, BodyTooLarge),
)
async def put_statement_addresses(
    user_id: UserIdInPath, body: PutStatementAddresses, caller: Caller, services: InServices
) -> StatementAddresses:
    """Sets both; without any the user gets no statements. For operators and administrators, who have to know
    that the address is the user's: nothing is sent to confirm it."""
    require_staff(caller)
    if body.webhook_url is not None:
        _check(body.webhook_url)
    await known(services, caller, user_id)
    addresses = Addresses(email=body.email, webhook_url=body.webhook_url)
    async with services.database.session() as session:
        await statement_addresses.put(session, user_id, addresses, actor=f"key:{caller.key_id}")
    return StatementAddresses(email=addresses.email, webhook_url=addresses.webhook_url)


def _check(url: str) -> None:
    """Raises `InvalidRequest` for a URL of no host; the fleet checks where it leads."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise InvalidRequest("webhook_url: it has no host")
