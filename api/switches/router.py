"""Routes for kill switches: for everybody, a user or an account."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from api.container import InServices
from api.http import problems
from api.http.auth import Caller, Principal, require_user
from api.http.errors import Forbidden, InvalidRequest, NotFound
from api.http.fields import ID_PATTERN
from api.switches import schemas
from infra.database.trading import models as trading_models
from infra.database.trading.switches import TradingScope
from infra.database.users import UserNotFound
from worker_runtime.protocol.errors import UnknownAccount

router = APIRouter(tags=["switches"])

OfUser = Annotated[str | None, Query(pattern=ID_PATTERN, max_length=64, description="Only for this user.")]


@router.put(
    "/switches",
    summary="Halt, reduce or open",
    response_model=schemas.SwitchSetView,
    responses={
        202: {"model": schemas.SwitchSetView, "description": "It is set; Valkey did not answer yet."},
        **problems.responses(NotFound, Forbidden, UserNotFound, UnknownAccount),
    },
)
async def put_switch(
    body: schemas.SwitchRequest, caller: Caller, services: InServices, response: Response
) -> schemas.SwitchSetView:
    """Sets a switch: `halted` takes no new order, `reducing` only those that make a position smaller.

    Cancels always pass. It holds when this is answered, also for orders that are queued already; only what is
    inside the broker's SDK by then goes on. Operators switch everybody, a user or an account. A user's key
    sets the user's own switch, which stands beside the operators': nobody opens what another has closed.
    """
    row, in_force = await services.switches.set_switch(
        _requested_scope(body, caller), body.state, actor=caller.actor, reason=body.reason
    )
    if not in_force:
        response.status_code = 202
    return schemas.SwitchSetView(in_force=in_force, **_switch_fields(row))


@router.get(
    "/switches",
    summary="Look at switches",
    responses=problems.responses(NotFound, UserNotFound),
)
async def list_switches(caller: Caller, services: InServices, user_id: OfUser = None) -> schemas.SwitchList:
    """Every switch that was ever set. With a user, and with a user's key, those that can hold for the user,
    and what counts."""
    user_id = user_id or caller.user_id
    if user_id is not None:
        require_user(caller, user_id)
    rows, effective = await services.switches.list_switches(user_id)
    counts = None
    if effective is not None:
        counts = schemas.EffectiveSwitchView(
            version=effective.version, all_accounts=effective.every, accounts=dict(effective.accounts)
        )
    return schemas.SwitchList(
        switches=[schemas.SwitchView(**_switch_fields(row)) for row in rows], effective=counts
    )


def _requested_scope(body: schemas.SwitchRequest, caller: Principal) -> TradingScope:
    """Raises `Forbidden`, `NotFound`, `InvalidRequest`."""
    if body.scope is schemas.SwitchScope.ALL:
        if not caller.staff:
            raise Forbidden
        return TradingScope()
    if not caller.staff and body.held_by is schemas.SwitchHolder.OPERATOR:
        raise Forbidden
    user_id = body.user_id or caller.user_id
    if user_id is None:
        raise InvalidRequest("not valid: user_id is missing")
    require_user(caller, user_id)
    by_user = not caller.staff or body.held_by is schemas.SwitchHolder.USER
    return TradingScope(user_id, body.account_id or "", by_user=by_user)


def _switch_fields(row: trading_models.Switch) -> dict[str, Any]:
    scope = TradingScope.parse(row.scope)
    name = (
        schemas.SwitchScope.ACCOUNT
        if scope.account_id
        else schemas.SwitchScope.USER
        if scope.user_id
        else schemas.SwitchScope.ALL
    )
    return {
        "scope": name,
        "user_id": scope.user_id or None,
        "account_id": scope.account_id or None,
        "held_by": schemas.SwitchHolder.USER if scope.by_user else schemas.SwitchHolder.OPERATOR,
        "state": row.state,
        "actor": row.actor,
        "reason": row.reason,
        "at": row.at,
        "version": row.version,
    }
