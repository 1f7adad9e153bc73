"""Routes for the calls that came to a webhook: listed, exported, and tests of a signal."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response

from api.container import Call, KnownUserId, VisibleUserId
from api.http import errors, problems
from api.orders.router import REFUSALS
from api.webhook_calls import schemas, service
from infra.database.trading import webhook_calls
from infra.database.trading.webhook_calls import MAX_SHOWN_CALLS
from worker_runtime.protocol import errors as protocol

router = APIRouter(prefix="/users/{user_id}/webhooks/{webhook_id}", tags=["webhooks"])

Bom = Annotated[
    bool, Query(description="Begin with a byte order mark, which Excel needs to read UTF-8.")
]


@router.get(
    "/calls", summary="List a webhook's calls", responses=problems.responses(errors.NotFound)
)
async def list_calls(
    user_id: VisibleUserId,
    webhook_id: UUID,
    call: Call,
    limit: Annotated[
        int, Query(ge=1, le=MAX_SHOWN_CALLS, description="Rows of a page, at most.")
    ] = 50,
    cursor: Annotated[
        int | None, Query(ge=1, le=2**63 - 1, description="`next_cursor` of the page before.")
    ] = None,
) -> schemas.WebhookCallList:
    """Covers the last 200, the newest first: signals with their orders, refusals with
    their reason; besides the last 20 without the webhook's secret or from another address."""
    await service.get_webhook(call.database, user_id, webhook_id)
    rows = await call.database.fetch(
        webhook_calls.list_calls, webhook_id, before=cursor, limit=limit + 1
    )
    shown = [schemas.WebhookCallView.of(row) for row in rows[:limit]]
    return schemas.WebhookCallList(
        calls=shown, next_cursor=shown[-1].id if len(rows) > limit else None
    )


@router.get(
    "/calls.csv",
    summary="Export a webhook's calls as CSV",
    response_class=Response,
    responses={
        **problems.content("CSV (RFC 4180) with a header, the newest first.", "text/csv"),
        **problems.responses(errors.NotFound),
    },
)
async def export_calls(
    user_id: VisibleUserId, webhook_id: UUID, call: Call, bom: Bom = False
) -> Response:
    """Covers the same calls as the list. Times are in the home zone."""
    await service.get_webhook(call.database, user_id, webhook_id)
    data = await service.export_calls(call.database, webhook_id, bom=bom)
    headers = {
        "Content-Disposition": f'attachment; filename="webhook-{webhook_id}.csv"',
        "Cache-Control": "no-store",
    }
    return Response(data, media_type="text/csv; charset=utf-8; header=present", headers=headers)


@router.post(
    "/test",
    summary="Test a signal",
    responses=problems.responses(
        *problems.WITHOUT_WORKER,
        errors.NotFound,
        errors.InvalidRequest,
        errors.WebhookUnknown,
        errors.WebhookPaused,
        errors.WebhookExpired,
        errors.OddLotRefused,
        errors.CloseInvalid,
        *REFUSALS,
        errors.NoAnswer,
        protocol.RateLimited,
        protocol.BrokerError,
    ),
)
async def test_signal(
    user_id: KnownUserId, webhook_id: UUID, body: schemas.SignalTestRequest, call: Call
) -> schemas.SignalTestView:
    """Checks and plans a signal as if it came now, and places no order: what the signal would be
    refused for is this answer, too. It says whether the signal would be a repeat, and what it would
    wait for. The test is listed among the calls."""
    webhook = await service.get_webhook(call.database, user_id, webhook_id)
    return await call.services.signal_tester.test_signal(webhook, body)
