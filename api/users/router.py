"""Routes for users: their life, where their statements go, their accounts' credentials and
limits."""

import asyncio
import math
import secrets
from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field

from api.container import Call, KnownUserId, VisibleUserId
from api.http import problems
from api.http.errors import Forbidden, GrantTooWide, NotFound, NoWorker, TemporalUnavailable
from api.http.fields import ID_PATTERN, AccountId, Reason, Rows, UserId, UserPrefix
from api.http.grants import require_grant
from api.http.rights import SCOPES_OF, Role
from api.users import schemas
from api.workers.schemas import GivenReason
from infra.database import accounts, api_keys, audit, certificates, users
from infra.database.accounts import AccountNotFound
from infra.database.models import StatementAddress
from infra.database.trading import limits as trading_limits
from infra.database.trading.models import AccountLimits
from infra.settings import Settings
from infra.vault import vault
from infra.vault.certificates import CertificateFileRefused
from worker_runtime.protocol.credential_check import CheckedCredentials, CredentialCheck
from worker_runtime.protocol.errors import (
    BerthError,
    CertificateExpired,
    LoginLimited,
    LoginRejected,
)
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import Credentials, decode, encode
from workflows.user_worker.messages import ShutdownRequest

router = APIRouter(prefix="/users", tags=["users"])
credentials_router = APIRouter(prefix="/users", tags=["credentials"])
limit_router = APIRouter(prefix="/users", tags=["accounts"])

IdPart = Annotated[str, Field(pattern=ID_PATTERN, max_length=64)]
Why = Annotated[Reason, Query(description="For the audit trail.")]

#: Seconds that the paper exchange may take to check keys; it needs about a millisecond.
LOGIN_TIMEOUT_S = 2.0
_ADDRESSES_PATH = "/{user_id}/statement-addresses"
_LIMITS_PATH = "/{user_id}/accounts/{account_id}/limits"


@router.post(
    "",
    status_code=201,
    summary="Create a user",
    responses=problems.responses(users.UserExists, GrantTooWide),
)
async def create_user(body: schemas.UserRequest, call: Call) -> schemas.UserWithKeyView:
    """Creates a user and an API key for it, which is shown this once.

    The key may do all that a user may do, unless `scopes` says less, and ends after 90 days; rotate
    it before. It gets no scope that the key that makes it does not have, and may be used from where
    that one may be used. For administrators.
    """
    scopes = SCOPES_OF[Role.USER] if body.scopes is None else frozenset(body.scopes)
    sources = [str(network) for network in call.caller.sources]
    require_grant(call.caller, scopes, sources)
    user_id = body.user_id or f"u-{secrets.token_hex(8)}"
    async with call.database.session() as session:
        user = await users.create_user(session, user_id)
        token = call.services.tokens.make()
        key = await api_keys.create_api_key(
            session,
            token,
            "user",
            user_id,
            "the first key",
            datetime.now(UTC) + api_keys.KEY_LIFE,
            scopes=scopes,
            sources=sources,
            made_by=UUID(call.caller.key_id),
        )
        audit.append_entry(
            session,
            call.actor,
            "user.created",
            f"user:{user_id}",
            key_id=str(key.id),
            scopes=key.scopes,
            sources=sources,
        )
    return schemas.UserWithKeyView(
        user_id=user.id, created_at=user.created_at, api_key=token, expires_at=key.expires_at
    )


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
    """All users by id, without those that were removed. For operators and administrators."""
    rows = await call.database.fetch(
        users.list_users, prefix=prefix, disabled=disabled, after=cursor, limit=limit + 1
    )
    shown = [schemas.UserView.model_validate(row) for row in rows[:limit]]
    return schemas.UserPage(
        users=shown, next_cursor=shown[-1].user_id if len(rows) > limit else None
    )


@router.get(
    "/{user_id}", summary="Look at a user", responses=problems.responses(users.UserNotFound)
)
async def get_user(user_id: VisibleUserId, call: Call) -> schemas.UserDetailView:
    """The user and its broker accounts with the state of their logins, without anything secret."""
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
    """Refuses the user's keys, alerts and all new orders for it, and ends its worker.

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
            "the user is disabled, its worker still runs: repeat this"
        ) from None
    return schemas.UserView.model_validate(user)


@router.post(
    "/{user_id}/enable", summary="Enable a user", responses=problems.responses(users.UserNotFound)
)
async def enable_user(user_id: UserId, call: Call, reason: GivenReason) -> schemas.UserView:
    """Takes the user's keys, alerts and orders again. For administrators."""
    user = await call.database.write(
        users.put_disabled, user_id, False, actor=call.actor, reason=reason
    )
    return schemas.UserView.model_validate(user)


@router.delete(
    "/{user_id}",
    status_code=204,
    summary="Remove a user",
    responses=problems.responses(users.UserNotFound, accounts.StillInUse),
)
async def remove_user(user_id: UserId, call: Call, reason: Why = "requested") -> None:
    """For good, with accounts, credentials, webhooks and keys, once it is disabled and nothing is
    open.

    Orders and the audit trail are kept, so the id is not given again. For administrators.
    """
    await call.database.write(users.remove_user, user_id, actor=call.actor, reason=reason)


@router.get(_ADDRESSES_PATH, summary="Look at statement addresses")
async def get_statement_addresses(
    user_id: KnownUserId, call: Call
) -> schemas.StatementAddressesView:
    """Where the statement of each trading day goes."""
    addresses = await call.database.fetch(users.get_addresses, user_id)
    return schemas.StatementAddressesView.model_validate(addresses)


@router.put(
    _ADDRESSES_PATH, summary="Set statement addresses", responses=problems.responses(NotFound)
)
async def put_statement_addresses(
    user_id: KnownUserId, body: schemas.StatementAddressesRequest, call: Call
) -> schemas.StatementAddressesView:
    """Sets both; without any the user gets no statements. For administrators, who have to know that
    the address is the user's: nothing is sent to confirm it."""
    addresses = StatementAddress(email=body.email, webhook_url=body.webhook_url)
    await call.database.write(users.put_addresses, user_id, addresses, actor=call.actor)
    return schemas.StatementAddressesView.model_validate(addresses)


@credentials_router.put(
    "/{user_id}/accounts/{account_id}/credentials",
    summary="Store broker credentials",
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
    """Encrypts and stores the credentials of one account; they are never shown again.

    Of a live account's certificate the end is read first: one that no program can open with this
    password, or that has expired, is refused (`CERTIFICATE_REFUSED`, `CERTIFICATE_EXPIRED`), and
    what was stored stays.

    Where a broker allows it, they are tried at once: `login` says what came of it. A running worker
    of the user is told to load them; if that fails, it has the old ones until
    `POST /v1/users/{user_id}/worker/reload-credentials`. A user of whose logins the broker has
    rejected 10 within an hour waits before they store more (`LOGIN_LIMITED`); administrators may
    store them meanwhile.
    """
    live = accounts.is_live(body.broker, body.simulation)
    if live and not call.services.settings.live_accounts:
        raise accounts.LiveAccountRefused
    credentials = Credentials(
        api_key=body.api_key.get_secret_value(),
        secret_key=body.secret_key.get_secret_value(),
        person_id=body.person_id.get_secret_value(),
        ca_certificate=body.ca_certificate,
        ca_password=body.ca_password.get_secret_value(),
    )
    key = {"user_id": user_id, "account_id": account_id}
    ends = None
    if live and body.ca_certificate:
        read = await call.services.certificates.read(
            credentials.ca_certificate, credentials.ca_password
        )
        ends = read.ends
    encrypted = await vault.encrypt_credentials(credentials, call.services.wrapper, **key)
    number = body.broker_account
    settings = call.services.settings
    address = settings.broker_options.get(body.broker, {}).get("address", settings.exchange_address)
    login, why = await _try_login(body.broker, address, number or account_id, credentials)
    shown = key | body.model_dump(mode="json", include={"broker", "simulation"})
    shown["broker_type"] = body.market
    async with call.database.session() as session:
        await users.get_user(session, user_id, lock=True)  # nobody removes it meanwhile
        if call.caller.role is Role.USER:
            await accounts.require_login_tries(session, user_id)
        version = await accounts.put_account(session, encrypted=encrypted, number=number, **shown)
        if ends is not None:
            await certificates.set_expiry(session, user_id, account_id, ends)
        said = {"version": version, "broker": body.broker, "login": login}
        audit.append_entry(
            session, call.actor, "credentials.stored", f"account:{user_id}/{account_id}", **said
        )
    signalled = await call.services.control.signal_reload(user_id)
    return schemas.CredentialsView(
        **shown,
        version=version,
        login=login,
        login_detail=why,
        reload_signalled=signalled,
        certificate_expires_at=ends,
    )


@credentials_router.post(
    "/{user_id}/accounts/{account_id}/retry",
    summary="Try a rejected login again",
    responses=problems.responses(accounts.AccountNotFound, LoginLimited),
)
async def retry_login(
    user_id: VisibleUserId, account_id: AccountId, call: Call
) -> schemas.AccountView:
    """With what is stored, by the running worker or the next one. An account that was not rejected,
    and has no session, is only tried sooner. Limited as new credentials are."""
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
    summary="Remove an account",
    responses=problems.responses(accounts.AccountNotFound, accounts.StillInUse),
)
async def remove_account(
    user_id: VisibleUserId, account_id: AccountId, call: Call, reason: Why = "requested"
) -> None:
    """For good, with its credentials, limits and webhooks, once no worker runs and no order of it
    is open."""
    await call.database.write(
        accounts.remove_account, user_id, account_id, actor=call.actor, reason=reason
    )


async def _try_login(
    broker: str, address: str, account: str, keys: Credentials
) -> tuple[schemas.LoginTrial, str]:
    """What the broker says to these keys, and why, where it answers without a login that counts."""
    if not installed_brokers()[broker].record.credential_check:
        return "not_tried", f"{broker} counts each login: the user's worker tries them"
    host, _, port = address.rpartition(":")
    check = CredentialCheck(
        account=account,
        api_key=keys.api_key,
        secret_key=keys.secret_key,
        person_id=keys.person_id,
    )
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            with closing(writer):
                writer.write(encode(check) + b"\n")
                reply: CheckedCredentials = decode(await reader.readline(), CheckedCredentials)
    except (OSError, ValueError, OverflowError, BerthError) as error:
        return "not_tried", f"the broker's server did not answer: {type(error).__name__}"
    if reply.error is None:
        return "verified", ""
    rejected = reply.error == LoginRejected.code
    return "rejected" if rejected else "not_tried", f"{reply.error}: {reply.detail}"


@limit_router.get(
    _LIMITS_PATH, summary="Look at limits", responses=problems.responses(AccountNotFound)
)
async def get_limits(
    user_id: VisibleUserId, account_id: AccountId, call: Call
) -> schemas.AccountLimitsView:
    """What the account may do, where that differs from the settings."""
    async with call.database.session() as session:
        await accounts.require_account(session, user_id, account_id)
        limits = await trading_limits.get_limits(session, user_id, account_id)
    return schemas.AccountLimitsView.model_validate(limits)


@limit_router.put(_LIMITS_PATH, summary="Set limits", responses=problems.responses(AccountNotFound))
async def put_limits(
    user_id: UserId, account_id: AccountId, body: schemas.AccountLimitsRequest, call: Call
) -> schemas.AccountLimitsView:
    """Sets all of them; what is left out is as the settings say. In force within 5 s. For
    operators, who set none that is wider than the settings or than the account's own one, and
    administrators."""
    limits = AccountLimits(**body.model_dump())
    async with call.database.session() as session:
        await accounts.require_account(session, user_id, account_id, lock=True)
        if call.caller.role is Role.OPERATOR:
            present = await trading_limits.get_limits(session, user_id, account_id)
            _check_not_wider(body, present, call.services.settings)
        await trading_limits.put_limits(session, user_id, account_id, limits, actor=call.actor)
    return schemas.AccountLimitsView.model_validate(limits)


def _check_not_wider(
    body: schemas.AccountLimitsRequest, present: AccountLimits, settings: Settings
) -> None:
    """Raises `Forbidden` for a limit above the settings' one, or above the account's `present`
    one."""
    limits = (
        (body.max_quantity, present.max_quantity, settings.check_max_quantity),
        (body.max_notional, present.max_notional, settings.check_max_notional or math.inf),
        (body.max_daily_orders, present.max_daily_orders, settings.check_daily_orders),
        (body.price_band, present.price_band, settings.check_price_band or math.inf),
    )
    wider = any(
        (default if requested is None else requested)
        > (default if own is None else min(own, default))
        for requested, own, default in limits
    )
    default = settings.check_duplicate_window  # a shorter one is the wider one
    window = default if body.duplicate_window_s is None else body.duplicate_window_s
    if wider or window < max(default, present.duplicate_window_s or 0):
        raise Forbidden(
            "only an administrator sets limits wider than the settings or the account's own ones"
        )
