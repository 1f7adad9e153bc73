"""Routes for users: their life, where their statements go, their accounts' credentials and
limits."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from api.container import Call, KnownUserId, VisibleUserId
from api.http import problems
from api.http.errors import GrantTooWide, NotFound, NoWorker, TemporalUnavailable
from api.http.fields import ID_PATTERN, AccountId, Reason, Rows, UserId, UserPrefix
from api.http.rights import Role
from api.users import schemas, service
from api.workers.schemas import GivenReason
from infra.database import accounts, users
from infra.database.accounts import AccountNotFound
from infra.database.models import StatementAddress
from infra.database.trading import limits as trading_limits
from infra.vault.certificates import CertificateFileRefused
from worker_runtime.protocol.errors import (
    CertificateExpired,
    LoginLimited,
)
from workflows.user_worker.messages import ShutdownRequest

router = APIRouter(prefix="/users", tags=["users"])
credentials_router = APIRouter(prefix="/users", tags=["credentials"])
limit_router = APIRouter(prefix="/users", tags=["accounts"])

IdPart = Annotated[str, Field(pattern=ID_PATTERN, max_length=64)]
Why = Annotated[Reason, Query(description="For the audit trail.")]

_ADDRESSES_PATH = "/{user_id}/statement-addresses"
_LIMITS_PATH = "/{user_id}/accounts/{account_id}/limits"


@router.post(
    "",
    status_code=201,
    summary="Create a user",
    responses=problems.responses(users.UserExists, GrantTooWide),
)
async def create_user(body: schemas.UserRequest, call: Call) -> schemas.UserWithKeyView:
    """Also creates the user's first API key, which is shown only in this answer.

    The key may do all that a user may do, unless `scopes` says less, and ends after 90 days; rotate
    it before. It gets no scope that the key that makes it does not have, and may be used from where
    that one may be used. For administrators.
    """
    return await service.create_user(call, body)


@router.get("", summary="List users")
async def list_users(
    call: Call,
    prefix: UserPrefix = None,
    disabled: Annotated[
        bool | None, Query(description="Only disabled ones, or only the others.")
    ] = None,
    limit: Rows = 100,
    cursor: Annotated[IdPart | None, Query(description="`next_cursor` of the page before.")] = None,
) -> schemas.UserPage:
    """Sorts by id, and leaves out users that were removed. For operators and administrators."""
    rows = await call.database.fetch(
        users.list_users, prefix=prefix, disabled=disabled, after=cursor, limit=limit + 1
    )
    shown = [schemas.UserView.model_validate(row) for row in rows[:limit]]
    return schemas.UserPage(
        users=shown, next_cursor=shown[-1].user_id if len(rows) > limit else None
    )


@router.get("/{user_id}", summary="Get a user", responses=problems.responses(users.UserNotFound))
async def get_user(user_id: VisibleUserId, call: Call) -> schemas.UserDetailView:
    """Includes the broker accounts and the state of their logins, but no secret."""
    async with call.database.session(autocommit=True) as session:
        user = await users.get_user(session, user_id)
        stored = await accounts.accounts_of_user(session, user_id)
        epoch = await accounts.serving_epoch(session, user_id)
    held = [schemas.AccountView.of(account, epoch) for account in stored]
    return schemas.UserDetailView(
        **schemas.UserView.model_validate(user).model_dump(), accounts=held
    )


@router.post(
    "/{user_id}/disable",
    summary="Disable a user",
    responses=problems.responses(users.UserNotFound, TemporalUnavailable),
)
async def disable_user(user_id: UserId, call: Call, reason: GivenReason) -> schemas.UserView:
    """Ends the user's worker. From now on the user's keys, signals and new orders are refused.

    Open orders stay at the broker: operators cancel them. Without Temporal the answer is an error,
    but the user is disabled; a repeat ends the worker.
    """
    user = await call.database.write(
        users.put_disabled, user_id, True, actor=call.actor, reason=reason
    )
    try:
        await call.services.control.signal(
            user_id, "shutdown", ShutdownRequest(reason=f"disabled: {reason}")
        )
    except NoWorker:
        pass
    except TemporalUnavailable:
        raise TemporalUnavailable(
            "The user is disabled, but their worker still runs. Repeat the call."
        ) from None
    return schemas.UserView.model_validate(user)


@router.post(
    "/{user_id}/enable", summary="Enable a user", responses=problems.responses(users.UserNotFound)
)
async def enable_user(user_id: UserId, call: Call, reason: GivenReason) -> schemas.UserView:
    """Accepts the keys, signals and orders of a disabled user again. For administrators."""
    user = await call.database.write(
        users.put_disabled, user_id, False, actor=call.actor, reason=reason
    )
    return schemas.UserView.model_validate(user)


@router.delete(
    "/{user_id}",
    status_code=204,
    summary="Remove a user for good",
    responses=problems.responses(users.UserNotFound, accounts.StillInUse),
)
async def remove_user(user_id: UserId, call: Call, reason: Why = "requested") -> None:
    """Deletes the user's accounts, credentials, webhooks and keys. The user must be disabled, and
    nothing of theirs open.

    Orders and the audit trail are kept, so the id is not given again. For administrators.
    """
    await call.database.write(users.remove_user, user_id, actor=call.actor, reason=reason)


@router.get(_ADDRESSES_PATH, summary="Get a user's statement addresses")
async def get_statement_addresses(
    user_id: KnownUserId, call: Call
) -> schemas.StatementAddressesView:
    """Names the mail address and the webhook that receive the statement of each trading day."""
    addresses = await call.database.fetch(users.get_addresses, user_id)
    return schemas.StatementAddressesView.model_validate(addresses)


@router.put(
    _ADDRESSES_PATH,
    summary="Set a user's statement addresses",
    responses=problems.responses(NotFound),
)
async def put_statement_addresses(
    user_id: KnownUserId, body: schemas.StatementAddressesRequest, call: Call
) -> schemas.StatementAddressesView:
    """Replaces both; a user without any gets no statements. For administrators, who have to know
    that the address is the user's: nothing is sent to confirm it."""
    addresses = StatementAddress(email=body.email, webhook_url=body.webhook_url)
    await call.database.write(users.put_addresses, user_id, addresses, actor=call.actor)
    return schemas.StatementAddressesView.model_validate(addresses)


@credentials_router.put(
    "/{user_id}/accounts/{account_id}/credentials",
    summary="Store an account's broker credentials",
    responses=problems.responses(
        accounts.TooManyAccounts,
        accounts.AccountDiffers,
        accounts.LiveAccountRefused,
        CertificateFileRefused,
        CertificateExpired,
        LoginLimited,
    ),
)
async def store_credentials(
    user_id: VisibleUserId, account_id: AccountId, body: schemas.CredentialsRequest, call: Call
) -> schemas.CredentialsView:
    """Encrypts them; they are never shown again.

    Of a live account's certificate the end is read first: one that no program can open with this
    password, or that has expired, is refused (`CERTIFICATE_REFUSED`, `CERTIFICATE_EXPIRED`), and
    what was stored stays.

    Where a broker allows it, they are tried at once: `login` says what came of it. A running worker
    of the user is told to load them; if that fails, it has the old ones until
    `POST /v1/users/{user_id}/worker/reload-credentials`. A user of whose logins the broker has
    rejected 10 within an hour waits before they store more (`LOGIN_LIMITED`); administrators may
    store them meanwhile.
    """
    return await service.store_credentials(call, user_id, account_id, body)


@credentials_router.post(
    "/{user_id}/accounts/{account_id}/retry",
    summary="Retry a rejected login",
    responses=problems.responses(accounts.AccountNotFound, LoginLimited),
)
async def retry_login(
    user_id: VisibleUserId, account_id: AccountId, call: Call
) -> schemas.AccountView:
    """Uses the stored credentials, in the running worker or the next one. An account that was not
    rejected, and has no session, is only tried sooner. The limit is the one for storing
    credentials."""
    async with call.database.session() as session:
        if call.caller.role is Role.USER:
            await accounts.require_login_tries(session, user_id)
        stored = await accounts.retry_login(session, user_id, account_id, actor=call.actor)
        view = schemas.AccountView.of(stored, await accounts.serving_epoch(session, user_id))
    await call.services.control.signal_reload(user_id)
    return view


@credentials_router.delete(
    "/{user_id}/accounts/{account_id}",
    status_code=204,
    summary="Remove an account for good",
    responses=problems.responses(accounts.AccountNotFound, accounts.StillInUse),
)
async def remove_account(
    user_id: VisibleUserId, account_id: AccountId, call: Call, reason: Why = "requested"
) -> None:
    """Deletes its credentials, limits and webhooks. No worker may run for the user, and no order of
    the account may be open."""
    await call.database.write(
        accounts.remove_account, user_id, account_id, actor=call.actor, reason=reason
    )


@limit_router.get(
    _LIMITS_PATH, summary="Get an account's limits", responses=problems.responses(AccountNotFound)
)
async def get_limits(
    user_id: VisibleUserId, account_id: AccountId, call: Call
) -> schemas.AccountLimitsView:
    """Shows only the limits that differ from the settings."""
    async with call.database.session() as session:
        await accounts.require_account(session, user_id, account_id)
        limits = await trading_limits.get_limits(session, user_id, account_id)
    return schemas.AccountLimitsView.model_validate(limits)


@limit_router.put(
    _LIMITS_PATH, summary="Set an account's limits", responses=problems.responses(AccountNotFound)
)
async def put_limits(
    user_id: UserId, account_id: AccountId, body: schemas.AccountLimitsRequest, call: Call
) -> schemas.AccountLimitsView:
    """Replaces all of them: a limit that is left out is the settings' one. They apply within 5 s.
    An operator cannot set a limit wider than the settings' one or the account's present one."""
    limits = await service.put_limits(call, user_id, account_id, body)
    return schemas.AccountLimitsView.model_validate(limits)
