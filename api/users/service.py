"""Creates users, stores credentials and limits: each in one transaction, with the audit entry."""

import asyncio
import math
import secrets
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

from api.container import AuthorizedCall
from api.http.errors import Forbidden
from api.http.grants import require_grant
from api.http.rights import SCOPES_OF, Role
from api.users import schemas
from infra.database import accounts, api_keys, audit, certificates, users
from infra.database.trading import limits as trading_limits
from infra.database.trading.models import AccountLimits
from infra.settings import Settings
from infra.vault import vault
from worker_runtime.protocol.credential_check import CheckedCredentials, CredentialCheck
from worker_runtime.protocol.errors import BerthError, LoginRejected
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import Credentials, decode, encode

#: Seconds that the paper exchange may take to check keys; it needs about a millisecond.
LOGIN_TIMEOUT_S = 2.0


async def create_user(call: AuthorizedCall, body: schemas.UserRequest) -> schemas.UserWithKeyView:
    """Creates a user with an API key. Raises `UserExists` and `GrantTooWide`."""
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
            datetime.now(UTC) + api_keys.KEY_LIFETIME,
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


async def store_credentials(
    call: AuthorizedCall, user_id: str, account_id: str, body: schemas.CredentialsRequest
) -> schemas.CredentialsView:
    """Encrypts credentials, tries them where the broker allows it, stores them, and has a running
    worker load them.

    Raises `LiveAccountRefused`, `CertificateFileRefused`, `CertificateExpired`, `LoginLimited`,
    `TooManyAccounts` and `AccountDiffers`.
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
        details = {"version": version, "broker": body.broker, "login": login}
        audit.append_entry(
            session, call.actor, "credentials.stored", f"account:{user_id}/{account_id}", **details
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


async def _try_login(
    broker: str, address: str, account: str, keys: Credentials
) -> tuple[schemas.LoginTrial, str]:
    """Tries these keys if the broker can check them without a login. Returns the result and why."""
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


async def put_limits(
    call: AuthorizedCall, user_id: str, account_id: str, body: schemas.AccountLimitsRequest
) -> AccountLimits:
    """Sets all limits of an account. Raises `AccountNotFound`, and `Forbidden` if an operator
    widens one."""
    limits = AccountLimits(**body.model_dump())
    async with call.database.session() as session:
        account = await accounts.require_account(session, user_id, account_id, lock=True)
        if call.caller.role is Role.OPERATOR:
            present = await trading_limits.get_limits(session, user_id, account_id)
            plugin = installed_brokers().get(account.broker)
            daily_limit = plugin and plugin.record.market(account.broker_type).daily_limit
            _check_not_wider(body, present, call.services.settings, daily_limit)
        await trading_limits.put_limits(session, user_id, account_id, limits, actor=call.actor)
    return limits


def _check_not_wider(
    body: schemas.AccountLimitsRequest,
    present: AccountLimits,
    settings: Settings,
    daily_limit: Decimal | None,
) -> None:
    """Raises `Forbidden` for a limit above the settings' one, or above the account's `present` one.

    `daily_limit`: of the account's market.
    """
    limits = (
        (body.max_quantity, present.max_quantity, settings.check_max_quantity),
        (body.max_notional, present.max_notional, settings.check_max_notional or math.inf),
        (body.max_daily_orders, present.max_daily_orders, settings.check_daily_orders),
        (body.price_band, present.price_band, settings.price_band(daily_limit) or math.inf),
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
