"""Routes for webhooks: created and revoked with an API key, posted to with a token and a secret."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Request, Response

from api.container import Call, InServices, VisibleUserId
from api.http import errors, problems
from api.http.fields import view_response
from api.orders.outcomes import UNANSWERED
from api.orders.router import REFUSALS
from api.orders.schemas import OrderView
from api.webhooks import schemas
from infra.database import accounts, users
from infra.database.engine import DatabaseUnavailable
from infra.database.trading import webhooks
from infra.database.users import UserNotFound
from worker_runtime.protocol import errors as protocol

router = APIRouter(tags=["webhooks"])

Token = Annotated[str, Path(description="The webhook's token.", max_length=256)]


@router.post(
    "/users/{user_id}/webhooks",
    status_code=201,
    summary="Create a webhook",
    responses=problems.responses(UserNotFound, accounts.AccountNotFound),
)
async def create_webhook(
    user_id: VisibleUserId, body: schemas.WebhookRequest, call: Call
) -> schemas.WebhookWithSecretsView:
    """Makes an address for one account's signals. Its token and secret are shown this once."""
    token = call.services.tokens.make("")
    async with call.database.session() as session:
        await users.get_user(session, user_id)
        await accounts.require_account(session, user_id, body.account_id)
        row, secret = await webhooks.create_webhook(
            session, token, user_id=user_id, actor=call.actor, **body.model_dump()
        )
    shown = schemas.WebhookView.model_validate(row).model_dump()
    path = f"/v1/webhooks/{token}/orders"
    return schemas.WebhookWithSecretsView(**shown, token=token, secret=secret, path=path)


@router.get("/users/{user_id}/webhooks", summary="List webhooks")
async def list_webhooks(user_id: VisibleUserId, call: Call) -> schemas.WebhookList:
    """A user's webhooks, also those that were revoked."""
    rows = await call.database.fetch(webhooks.webhooks_of_user, user_id)
    return schemas.WebhookList(webhooks=[schemas.WebhookView.model_validate(row) for row in rows])


@router.delete("/users/{user_id}/webhooks/{webhook_id}", summary="Revoke a webhook")
async def revoke_webhook(user_id: VisibleUserId, webhook_id: UUID, call: Call) -> schemas.WebhookView:
    """From now on nothing is taken there. Its orders stay."""
    row = await call.database.write(webhooks.revoke_webhook, user_id, webhook_id, actor=call.actor)
    if row is None:
        raise errors.NotFound
    return schemas.WebhookView.model_validate(row)


@router.post(
    "/webhooks/{token}/orders",
    status_code=201,
    response_model=OrderView | schemas.SignalOutcome,
    summary="Place the orders of a signal",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Signal"}}},
        }
    },
    responses={
        200: problems.answer(OrderView | schemas.SignalOutcome, "A repeat: the outcome of the first one."),
        202: problems.answer(OrderView | schemas.SignalOutcome, "Accepted; the outcome is not known yet."),
        **problems.responses(
            *(errors.InvalidRequest, errors.WebhookUnknown, errors.WebhookSecretWrong),
            *(errors.SourceNotAllowed, errors.AlertOutdated, errors.WebhookBusy, errors.NoPosition),
            *(errors.PositionBusy, errors.CloseInvalid, errors.CloseNotFilled, errors.IntentExpired),
            *(*REFUSALS, protocol.WorkerUnavailable, errors.ValkeyUnavailable),
            *(DatabaseUnavailable, protocol.BerthError),
        ),
    },
)
async def deliver_signal(token: Token, request: Request, services: InServices) -> Response:
    """For TradingView's alerts: no API key, but the token in the address and the secret in the body.

    `buy` and `sell` are answered with their order, all other actions with an `SignalOutcome`: they are those
    of `…/intents`, and `close` is `…/positions/{symbol}/close`. `reduce_only` makes a close of a buy or sale.

    The same signal again, also years later, returns the outcome of the first, and does nothing. A signal
    whose time is too far from ours is refused. Answered within two seconds, if need be with 202: then it
    goes on without the caller, until the order deadline.
    """
    peer = request.client.host if request.client else ""
    forwarded = request.headers.getlist("x-forwarded-for")
    taken = await services.webhooks.receive_signal(token, peer, forwarded, await request.body())
    settled = taken.complete and all(leg.state not in UNANSWERED for leg in taken.legs)
    found: OrderView | schemas.SignalOutcome
    if taken.signal.plain and taken.legs:
        found = taken.legs[0]
    else:
        found = schemas.SignalOutcome(
            client_order_id=taken.client_order_id,
            action=taken.signal.action,
            legs=list(taken.legs),
            complete=taken.complete,
        )
    status = 202 if not settled else 201 if taken.new else 200
    return view_response(found, status)
