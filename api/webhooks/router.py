"""Routes for webhooks: created and revoked with an API key, posted to with a token and a secret."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from api.container import Call, InServices, VisibleUserId
from api.http import errors, problems
from api.http.fields import Rows, view_response
from api.orders.router import REFUSALS
from api.orders.schemas import OrderView
from api.webhooks import schemas
from api.webhooks.planning import QuantityUnit
from infra.database import accounts, users
from infra.database.engine import DatabaseUnavailable
from infra.database.models import BrokerAccount
from infra.database.trading import webhooks
from infra.database.trading.models import Webhook
from infra.database.users import UserNotFound
from worker_runtime.protocol import errors as protocol
from worker_runtime.protocol.installed_brokers import market_of

router = APIRouter(tags=["webhooks"])

Token = Annotated[str, Path(description="The webhook's token.", max_length=256)]


@router.post(
    "/users/{user_id}/webhooks",
    status_code=201,
    summary="Create a webhook",
    responses=problems.responses(
        UserNotFound, accounts.AccountNotFound, errors.InvalidRequest, webhooks.WebhookLimitReached
    ),
)
async def create_webhook(
    user_id: VisibleUserId, body: schemas.WebhookRequest, call: Call
) -> schemas.WebhookWithSecretsView:
    """Makes an address for one account's signals. Its token and secret are shown only in this
    answer."""
    token = call.services.tokens.make("")
    async with call.database.session() as session:
        await users.get_user(session, user_id)
        await accounts.require_account(session, user_id, body.account_id)
        await _require_unit(session, user_id, body.account_id, body.quantity_unit)
        await webhooks.require_room(session, user_id)
        row, secret = await webhooks.create_webhook(
            session,
            token,
            user_id=user_id,
            actor=call.actor,
            made_by=UUID(call.caller.key_id),
            **_columns_of(body),
        )
        shown = (await _view(session, row)).model_dump()
    path = call.link(f"/v1/webhooks/{token}/signals")
    return schemas.WebhookWithSecretsView(**shown, token=token, secret=secret, path=path)


@router.get("/users/{user_id}/webhooks", summary="List a user's webhooks")
async def list_webhooks(
    user_id: VisibleUserId,
    call: Call,
    limit: Rows = 100,
    cursor: Annotated[UUID | None, Query(description="`next_cursor` of the page before.")] = None,
) -> schemas.WebhookList:
    """Shows revoked ones, too, the newest first."""
    async with call.database.session() as session:
        rows = await webhooks.webhooks_of_user(session, user_id, after=cursor, limit=limit + 1)
        contracts = await webhooks.accounts_of_contracts(session, user_id)
    shown = [
        schemas.WebhookView.of(row, counts_contracts=row.account_id in contracts)
        for row in rows[:limit]
    ]
    return schemas.WebhookList(
        webhooks=shown, next_cursor=shown[-1].id if len(rows) > limit else None
    )


@router.delete("/users/{user_id}/webhooks/{webhook_id}", summary="Revoke a webhook")
async def revoke_webhook(
    user_id: VisibleUserId, webhook_id: UUID, call: Call
) -> schemas.WebhookView:
    """Takes no more signals. Its orders stay."""
    async with call.database.session() as session:
        row = await webhooks.revoke_webhook(session, user_id, webhook_id, actor=call.actor)
        if row is None:
            raise errors.NotFound
        return await _view(session, row)


@router.patch(
    "/users/{user_id}/webhooks/{webhook_id}",
    summary="Change a webhook",
    responses=problems.responses(
        errors.InvalidRequest, UserNotFound, errors.WebhookUnknown, webhooks.WebhookLimitReached
    ),
)
async def change_webhook(
    user_id: VisibleUserId, webhook_id: UUID, body: schemas.WebhookChange, call: Call
) -> schemas.WebhookView:
    """Sets what its quantities count and how its orders are made. Applies to signals that come from
    now on."""
    changes = _columns_of(body)
    async with call.database.session() as session:
        if "quantity_unit" in changes:
            row = await webhooks.get_webhook(session, user_id, webhook_id)
            await _require_unit(session, user_id, row.account_id if row else "", body.quantity_unit)
        if "expires_at" in changes and await webhooks.has_expired(session, user_id, webhook_id):
            await webhooks.require_room(session, user_id)  # it counts again
        row = await webhooks.change_webhook(
            session, user_id, webhook_id, actor=call.actor, action="webhook.changed", **changes
        )
        return await _view(session, _require_in_use(row))


async def _view(session: AsyncSession, row: Webhook) -> schemas.WebhookView:
    contracts = await webhooks.accounts_of_contracts(session, row.user_id)
    return schemas.WebhookView.of(row, counts_contracts=row.account_id in contracts)


def _require_in_use(row: Webhook | None) -> Webhook:
    """Raises `NotFound`, or `WebhookUnknown` for a revoked webhook, which nothing changes any
    more."""
    if row is None:
        raise errors.NotFound
    if row.revoked_at is not None:
        raise errors.WebhookUnknown("the webhook was revoked: make another one")
    return row


@router.post(
    "/users/{user_id}/webhooks/{webhook_id}/pause",
    summary="Pause a webhook",
    responses=problems.responses(errors.WebhookUnknown),
)
async def pause_webhook(
    user_id: VisibleUserId, webhook_id: UUID, call: Call
) -> schemas.WebhookView:
    """Refuses its signals with `WEBHOOK_PAUSED` until it is resumed; those already taken are
    carried out."""
    return await _set_pause(call, user_id, webhook_id, pause=True)


@router.post(
    "/users/{user_id}/webhooks/{webhook_id}/resume",
    summary="Resume a webhook",
    responses=problems.responses(errors.WebhookUnknown),
)
async def resume_webhook(
    user_id: VisibleUserId, webhook_id: UUID, call: Call
) -> schemas.WebhookView:
    """Takes signals again. Those that were refused while it was paused are not carried out."""
    return await _set_pause(call, user_id, webhook_id, pause=False)


async def _set_pause(
    call: Call, user_id: str, webhook_id: UUID, *, pause: bool
) -> schemas.WebhookView:
    async with call.database.session() as session:
        row = await webhooks.change_webhook(
            session,
            user_id,
            webhook_id,
            actor=call.actor,
            action="webhook.paused" if pause else "webhook.resumed",
            paused_at=await webhooks.database_time(session) if pause else None,
        )
        return await _view(session, _require_in_use(row))


@router.post(
    "/users/{user_id}/webhooks/{webhook_id}/rotate",
    summary="Rotate a webhook's secret",
    responses=problems.responses(errors.NotFound, errors.WebhookUnknown),
)
async def rotate_webhook(
    user_id: VisibleUserId, webhook_id: UUID, body: schemas.SecretRotationRequest, call: Call
) -> schemas.RotatedWebhookView:
    """Shows the new secret only in this answer. The old one is accepted for `overlap_s` more
    seconds."""
    async with call.database.session() as session:
        row, secret = await webhooks.rotate_secret(
            session, user_id, webhook_id, overlap_s=body.overlap_s, actor=call.actor
        )
        shown = (await _view(session, _require_in_use(row))).model_dump()
    return schemas.RotatedWebhookView(**shown, secret=secret)


def _columns_of(body: schemas.WebhookRequest | schemas.WebhookChange) -> dict[str, Any]:
    """Returns what is given, as the table's columns have it."""
    columns = body.model_dump(mode="json", exclude_none=True)
    if "expires_at" in body.model_fields_set:
        columns["expires_at"] = body.expires_at
    return columns


async def _require_unit(
    session: AsyncSession, user_id: str, account_id: str, unit: QuantityUnit | None
) -> None:
    """Raises `InvalidRequest` unless the unit is given for a market whose lots have several units,
    and for such a market only. Raises `BrokerNotInstalled`."""
    account = await session.get(BrokerAccount, (user_id, account_id))
    if account is None:
        return
    _, market = market_of(account.broker, account.broker_type)
    if market.lot_units == 1 and unit is not None:
        raise errors.InvalidRequest(
            f"{market.title} counts contracts, or single units: leave quantity_unit out"
        )
    if market.lot_units > 1 and unit is None:
        raise errors.InvalidRequest(
            'say what a quantity counts: "quantity_unit": "shares", which TradingView sends, or'
            f' "lots" of {market.lot_units:,} shares'
        )


_SIGNAL_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: problems.answer(
        OrderView | schemas.SignalOutcome, "A repeat: the outcome of the first one."
    ),
    202: problems.answer(
        OrderView | schemas.SignalOutcome, "Stored; the outcome is not known yet."
    ),
    **problems.responses(
        errors.InvalidRequest,
        errors.WebhookUnknown,
        errors.WebhookSecretWrong,
        errors.WebhookPaused,
        errors.WebhookExpired,
        errors.SourceNotAllowed,
        errors.AlertOutdated,
        errors.WebhookBusy,
        errors.CloseInvalid,
        errors.CloseNotFilled,
        errors.IntentExpired,
        errors.OddLotRefused,
        *REFUSALS,
        protocol.WorkerUnavailable,
        errors.ValkeyUnavailable,
        DatabaseUnavailable,
        protocol.BerthError,
    ),
}
_SIGNAL_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Signal"}}},
    }
}


@router.post(
    "/webhooks/{token}/orders",
    status_code=201,
    response_model=OrderView | schemas.SignalOutcome,
    summary="Send a signal (deprecated path)",
    openapi_extra=_SIGNAL_BODY,
    responses=_SIGNAL_RESPONSES,
    deprecated=True,
    operation_id="receive_signal_at_orders",
)
@router.post(
    "/webhooks/{token}/signals",
    status_code=201,
    response_model=OrderView | schemas.SignalOutcome,
    summary="Send a signal",
    openapi_extra=_SIGNAL_BODY,
    responses=_SIGNAL_RESPONSES,
)
async def receive_signal(token: Token, request: Request, services: InServices) -> Response:
    """Receives a signal from TradingView: no API key, but the token in the address and the secret
    in the body.

    A signal is stored before it is answered. Signals of one account and symbol are carried out one
    at a time, in the order in which they came; what cannot be done at once (another order works on
    the position, a fill is not in it yet) waits until the order deadline, which counts from the
    receipt.

    A plain `buy` or `sell` is answered with its order, all else with a `SignalOutcome`. An exit
    with nothing to close is a success: `nothing_to_close`. The same signal again, also years later,
    returns the outcome of the first, and does nothing. Answered within two seconds, if need be with
    202: then it continues without the caller.
    """
    source = request.client.host if request.client else ""
    taken = await services.webhooks.receive_signal(token, source, await request.body())
    status = 202 if not taken.settled else 201 if taken.new else 200
    return view_response(taken.view, status)
