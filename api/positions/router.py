"""Routes for the positions and the balance of an account, as its broker has them now."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.container import InServices
from api.http import errors, problems
from api.http.auth import Caller
from api.http.fields import AccountIdInPath, UserIdInPath
from api.positions.schemas import BalanceView, PositionList, PositionView, taken_at
from api.workers.router import require_known_user
from worker_runtime.protocol import errors as protocol
from worker_runtime.protocol.errors import BrokerError

router = APIRouter(prefix="/users/{user_id}/accounts/{account_id}", tags=["accounts"])

Seconds = Annotated[
    float,
    Query(alias="wait", gt=0, le=60, allow_inf_nan=False, description="Seconds to wait for the broker."),
]
#: Enough for a worker's start, its login and a broker that takes its time.
BROKER_WAIT = 20.0

#: What every question to a broker may fail with.
BROKER_PROBLEMS = (
    errors.NotFound,
    errors.NoAnswer,
    errors.ValkeyUnavailable,
    errors.TemporalUnavailable,
    errors.OrchestratorUnavailable,
    protocol.UnknownAccount,
    protocol.Parked,
    protocol.LoginRejected,
    protocol.LoginLimited,
    protocol.RateLimited,
    protocol.BrokerUnreachable,
    protocol.WorkerUnavailable,
    BrokerError,
)


@router.get("/positions", summary="Look at positions", responses=problems.responses(*BROKER_PROBLEMS))
async def get_positions(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    caller: Caller,
    services: InServices,
    seconds: Seconds = BROKER_WAIT,
) -> PositionList:
    """Asks the broker through the user's worker, which is started if there is none."""
    await require_known_user(services, caller, user_id)
    report = await services.portfolio.report(user_id, account_id, seconds, positions=True)
    held = sorted((one for one in report.positions if one.quantity), key=lambda one: one.symbol)
    return PositionList(
        user_id=user_id,
        account_id=account_id,
        taken_at=taken_at(report),
        positions=[PositionView.of(one) for one in held],
    )


@router.get("/balance", summary="Look at the balance", responses=problems.responses(*BROKER_PROBLEMS))
async def get_balance(
    user_id: UserIdInPath,
    account_id: AccountIdInPath,
    caller: Caller,
    services: InServices,
    seconds: Seconds = BROKER_WAIT,
) -> BalanceView:
    """Asks the broker through the user's worker, which is started if there is none."""
    await require_known_user(services, caller, user_id)
    report = await services.portfolio.report(user_id, account_id, seconds, balance=True)
    assert report.balance is not None  # the portfolio has seen to it  # noqa: S101
    return BalanceView(
        user_id=user_id,
        account_id=account_id,
        taken_at=taken_at(report),
        currency=report.balance.currency,
        cash=report.balance.cash,
        available=report.balance.available,
    )
