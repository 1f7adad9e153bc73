"""Routes for kill switches: for everybody, a user or an account."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from api.container import AuthorizedCall, Call
from api.http import problems
from api.http.errors import Forbidden, InvalidRequest, NotFound
from api.http.fields import OfUser, Rows, UserPrefix
from api.switches.schemas import (
    EffectiveSwitchView,
    SwitchHolder,
    SwitchList,
    SwitchRequest,
    SwitchScope,
    SwitchSetView,
    SwitchView,
)
from infra.database.accounts import AccountNotFound
from infra.database.trading import models as trading_models
from infra.database.trading.switches import TradingScope
from infra.database.users import UserNotFound
from worker_runtime.protocol.requests import SwitchState

router = APIRouter(tags=["switches"])

Cursor = Annotated[
    int | None, Query(ge=1, le=2**63 - 1, description="`next_cursor` of the page before.")
]


@router.put(
    "/switches",
    summary="Halt, reduce or open trading",
    response_model=SwitchSetView,
    responses={
        202: problems.answer(SwitchSetView, "It is set; Valkey did not answer yet."),
        **problems.responses(NotFound, Forbidden, UserNotFound, AccountNotFound),
    },
)
async def put_switch(body: SwitchRequest, call: Call, response: Response) -> SwitchSetView:
    """`halted` refuses every new order, `reducing` all but those that make a position smaller, and
    `open` none.

    Cancels always pass. It holds when this is answered, also for orders that are queued already;
    only what is inside the broker's SDK by then continues. Operators switch everybody, a user or an
    account. A user's key sets the user's own switch, which is kept next to the operators': nobody
    opens what another has closed.
    """
    row, in_force, also = await call.services.switches.set_switch(
        _requested_scope(body, call), body.state, actor=call.actor, reason=body.reason
    )
    if not in_force:
        response.status_code = 202
    return SwitchSetView.model_validate(_switch_fields(row) | {"in_force": in_force, "also": also})


@router.get(
    "/switches", summary="List switches", responses=problems.responses(NotFound, UserNotFound)
)
async def list_switches(
    call: Call,
    user_id: OfUser = None,
    prefix: UserPrefix = None,
    state: Annotated[SwitchState | None, Query(description="Only those in this state.")] = None,
    limit: Rows = 100,
    cursor: Cursor = None,
) -> SwitchList:
    """Shows every switch that was ever set, the newest change first. For one user (a user's key, or
    `user_id`), shows those that can apply to them, and what applies now."""
    user_id = user_id or call.caller.user_id
    if user_id is not None:
        call.require_user(user_id)
    rows, effective = await call.services.switches.list_switches(
        user_id, prefix=prefix, state=state, before=cursor, limit=limit + 1
    )
    counts = None
    if effective is not None:
        counts = EffectiveSwitchView(
            version=effective.version,
            all_accounts=effective.every,
            accounts=dict(effective.accounts),
        )
    shown = [SwitchView.model_validate(_switch_fields(row)) for row in rows[:limit]]
    end = shown[-1].version if len(rows) > limit else None
    return SwitchList(switches=shown, next_cursor=end, effective=counts)


def _requested_scope(body: SwitchRequest, call: AuthorizedCall) -> TradingScope:
    """Raises `Forbidden`, `NotFound`, `InvalidRequest`."""
    if body.scope is SwitchScope.ALL:
        if not call.caller.staff:
            raise Forbidden
        return TradingScope()
    if not call.caller.staff and body.held_by is SwitchHolder.OPERATOR:
        raise Forbidden
    user_id = body.user_id or call.caller.user_id
    if user_id is None:
        raise InvalidRequest(
            "user_id is missing. Name the user whose trading to switch, or use the scope `all`."
        )
    call.require_user(user_id)
    by_user = not call.caller.staff or body.held_by is SwitchHolder.USER
    return TradingScope(user_id, body.account_id or "", by_user=by_user)


def _switch_fields(row: trading_models.Switch) -> dict[str, Any]:
    scope = TradingScope.parse(row.scope)
    return vars(row) | {
        "scope": "account" if scope.account_id else "user" if scope.user_id else "all",
        "user_id": scope.user_id or None,
        "account_id": scope.account_id or None,
        "held_by": SwitchHolder.USER if scope.by_user else SwitchHolder.OPERATOR,
    }
