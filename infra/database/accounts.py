"""Broker accounts, their encrypted credentials, and how their logins stand.

User and account id name an account; its broker, and whether it is a simulation, never change.
Credentials that the broker has rejected are remembered by their version: nobody logs in with them
again before there is another version, by new credentials or `retry_login`.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit, budgets, certificates
from infra.database.locks import wait_for_turn
from infra.database.models import (
    BrokerAccount,
    EncryptedCredentials,
    FailedLogin,
    Order,
    StoredCredentials,
    WorkerSession,
    upsert,
)
from infra.database.orders.states import OPEN_STATES
from infra.database.trading.models import AccountLimits, Webhook
from worker_runtime.protocol.bounds import MAX_ACCOUNTS
from worker_runtime.protocol.errors import BerthError, LoginLimited, LoginRejected, UnknownAccount
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import AccountLogin

#: Characters of a broker's own words that are kept.
_MAX_WORDS_LENGTH = 1000
#: Logins of one user that a broker may reject within `FAILED_LOGIN_WINDOW_S`: all users behind an
#: address are banned with the one who exceeds what the broker tolerates. Somebody who mistypes gets
#: through; 240 a day are a quarter of what a broker allows one person.
MAX_FAILED_LOGINS = 10
FAILED_LOGIN_WINDOW_S = 3600


class TooManyAccounts(BerthError, code="TOO_MANY_ACCOUNTS", status=409):
    """The user has the maximum number of broker accounts. Remove one that is no longer needed."""


class AccountNotFound(UnknownAccount, code="ACCOUNT_NOT_FOUND", status=404):
    """The user has no such broker account."""


class StillInUse(BerthError, code="STILL_IN_USE", status=409):
    """It cannot be removed yet: a worker runs, or an order is not final."""


class AccountDiffers(BerthError, code="ACCOUNT_DIFFERS", status=409):
    """An account id cannot change to another account at the broker, or between simulation and live;
    and no account at the broker can be stored under two ids."""


class LiveAccountRefused(BerthError, code="LIVE_ACCOUNT_REFUSED", status=403):
    """This installation takes no accounts that trade for real. Use the broker's simulation, or ask
    an operator to set `BERTH_LOCAL_LIVE_ACCOUNTS` (`BERTH_LIVE_ACCOUNTS` outside of `make run`)."""


class LoginState(StrEnum):
    """How the login of an account stands."""

    IDLE = "idle"  # no worker runs, or it has not reported this account yet
    CONNECTED = "connected"
    RETRYING = "retrying"  # the worker tries again by itself
    REJECTED = "rejected"  # not tried again before new credentials or a retry


async def put_account(
    session: AsyncSession,
    *,
    user_id: str,
    account_id: str,
    broker: str,
    broker_type: str,
    simulation: bool,
    encrypted: EncryptedCredentials,
    number: str | None = None,
) -> int:
    """Stores an account with new credentials; returns their version, which grows by one each time.

    Raises `TooManyAccounts` for one more than `MAX_ACCOUNTS`: all are sealed and logged in with
    each claim; `AccountDiffers` if it would turn into another account of a broker, or be the same
    one as another of the user. `number`: the broker's own id of it; None: as it was, and at first
    the same as ours.
    """
    key = {"user_id": user_id, "account_id": account_id}
    # One after the other, so that two calls at once are counted, too.
    await wait_for_turn(session, f"accounts {user_id}")
    rows = await session.scalars(select(BrokerAccount).filter_by(user_id=user_id))
    held = {
        row.account_id: (row.broker, row.simulation, row.number or row.account_id) for row in rows
    }
    placed = (
        broker,
        simulation,
        number or held.get(account_id, (broker, simulation, account_id))[2],
    )
    for name, at_broker in held.items():
        if (name == account_id) != (at_broker == placed):
            kind = "simulation" if at_broker[1] else "live"
            raise AccountDiffers(
                f"account {name} is {at_broker[2]} at {at_broker[0]}, {kind}. Store "
                "another account under another id, or remove this one first."
            )
    if len(held.keys() - {account_id}) >= MAX_ACCOUNTS:
        raise TooManyAccounts(f"user {user_id} has {MAX_ACCOUNTS} accounts, which is the maximum")
    shown = {
        "broker": broker,
        "broker_type": broker_type,
        "simulation": simulation,
        "number": placed[2],
    }
    fresh = {"rejected_version": 0, "login_rejected": False} | certificates.UNKNOWN
    await session.execute(upsert(BrokerAccount, key, shown, **fresh))
    grown = {"version": StoredCredentials.version + 1, "updated_at": func.now()}
    stored = upsert(StoredCredentials, key, {"version": 1, **asdict(encrypted)}, **grown)
    version = await session.scalar(stored.returning(StoredCredentials.version))
    return int(version or 0)


def is_live(broker: str, simulation: bool) -> bool:
    """Return True if orders of such an account trade for real, as those of an unknown broker
    may."""
    plugin = installed_brokers().get(broker)
    return not simulation and (plugin is None or plugin.record.trades_live)


async def live_accounts(session: AsyncSession) -> list[str]:
    """Return the accounts that trade for real, as `user/account`."""
    rows = await session.scalars(select(BrokerAccount).filter_by(simulation=False))
    return [
        f"{row.user_id}/{row.account_id}" for row in rows if is_live(row.broker, row.simulation)
    ]


async def has_accounts_at(session: AsyncSession, broker: str) -> bool:
    """Returns True if any user has an account at this broker."""
    return bool(await session.scalar(select(exists().where(BrokerAccount.broker == broker))))


async def require_account(
    session: AsyncSession, user_id: str, account_id: str, *, lock: bool = False
) -> BrokerAccount:
    """Returns an account, with or without credentials. Raises `AccountNotFound`.

    `lock`: until the transaction ends, nobody else locks or changes its row; orders continue.
    """
    for_update = {"key_share": True} if lock else None
    account = await session.get(BrokerAccount, (user_id, account_id), with_for_update=for_update)
    if account is None:
        raise AccountNotFound(f"user {user_id} has no account {account_id}")
    return account


async def require_login(session: AsyncSession, user_id: str, account_id: str | None = None) -> None:
    """Raises `LoginRejected` if the broker has rejected what is stored for the account, or, without
    one, for each of the user's; `AccountNotFound`."""
    account_filter = {} if account_id is None else {"account_id": account_id}
    held = (
        await session.scalars(select(BrokerAccount).filter_by(user_id=user_id, **account_filter))
    ).all()
    if not held and account_id is not None:
        raise AccountNotFound(f"user {user_id} has no account {account_id}")
    if held and all(account.login_rejected for account in held):
        raise rejection_of(held[0])


def rejection_of(account: BrokerAccount) -> LoginRejected:
    why = account.login_detail or LoginRejected.title()
    return LoginRejected(
        f"{account.account_id}: {why}; new credentials or a retry make another try"
    )


async def require_login_tries(session: AsyncSession, user_id: str) -> None:
    """Raises `LoginLimited` if the broker has rejected too many of the user's logins of late."""
    now = func.clock_timestamp()
    since = func.extract("epoch", now - func.min(FailedLogin.at))
    recent = FailedLogin.at > now - timedelta(seconds=FAILED_LOGIN_WINDOW_S)
    query = select(func.count(), since).where(FailedLogin.user_id == user_id, recent)
    count, oldest_s = (await session.execute(query)).one()
    if count >= MAX_FAILED_LOGINS:
        wait_s = max(1, FAILED_LOGIN_WINDOW_S - int(oldest_s))
        raise LoginLimited(
            f"The broker has rejected {count} logins of user {user_id} within an hour. Check the "
            f"credentials, and store them again in {wait_s // 60 + 1} minutes.",
            retry_after=wait_s,
        )


async def record_logins(
    session: AsyncSession, user_id: str, epoch: int, at_ms: int, logins: Collection[AccountLogin]
) -> None:
    """Writes how the logins stand by the worker of `epoch` at `at_ms` (Unix ms); an earlier report
    that comes late changes nothing, nor does the rejection of credentials that were replaced
    since."""
    if not logins:
        return
    rows = select(BrokerAccount).filter_by(user_id=user_id).order_by(BrokerAccount.account_id)
    # Locked, so that a version is the newest until the commit.
    await session.execute(
        rows.with_for_update(key_share=True).execution_options(populate_existing=True)
    )
    stored = {
        credentials.account_id: credentials
        for credentials in await accounts_of_user(session, user_id)
    }
    confirmed = []
    for login in logins:
        credentials_row = stored.get(login.account_id)
        if credentials_row is None or (
            credentials_row.account.login_epoch,
            credentials_row.account.login_ms,
        ) > (epoch, at_ms):
            continue
        account = credentials_row.account
        account.login_epoch, account.login_ms = epoch, at_ms
        account.login_code, account.login_detail = login.code, login.detail[:_MAX_WORDS_LENGTH]
        if login.rejected == credentials_row.version:
            if account.rejected_version != login.rejected:
                session.add(FailedLogin(user_id=user_id))
            account.rejected_version = login.rejected
        elif not login.code:
            confirmed.append(credentials_row)
        if login.certificate_ends_ms and login.version == credentials_row.version:
            ends = datetime.fromtimestamp(login.certificate_ends_ms / 1000, UTC)
            certificates.note_reported(account, ends)
        is_out = (
            account.rejected_version == credentials_row.version and login.code == LoginRejected.code
        )
        account.login_rejected = is_out
    budgets.note_confirmed(confirmed)


async def split_rejected(
    session: AsyncSession, stored: Sequence[StoredCredentials], *, starts: bool
) -> tuple[list[StoredCredentials], LoginRejected | None]:
    """Returns the accounts that may log in, and why the others may not. With `starts`, a session
    that has none yet starts without those, so their orders are refused from now on."""
    out = [
        credentials
        for credentials in stored
        if credentials.account.rejected_version == credentials.version
    ]
    if out and starts:
        rows = update(BrokerAccount).filter_by(user_id=out[0].user_id, login_rejected=False)
        await session.execute(
            rows.where(BrokerAccount.rejected_version > 0).values(login_rejected=True)
        )
    return [credentials for credentials in stored if credentials not in out], rejection_of(
        out[0].account
    ) if out else None


async def retry_login(
    session: AsyncSession, user_id: str, account_id: str, *, actor: str
) -> StoredCredentials:
    """Lets credentials that the broker has rejected be tried again, as a version of their own.

    Raises `AccountNotFound`. An account that was not rejected stays as it is.
    """
    await require_account(session, user_id, account_id, lock=True)
    credentials = await session.get_one(StoredCredentials, (user_id, account_id))
    if credentials.account.rejected_version == credentials.version:
        credentials.version += 1
    credentials.account.rejected_version, credentials.account.login_rejected = 0, False
    subject = f"account:{user_id}/{account_id}"
    audit.append_entry(
        session, actor, "account.login_retried", subject, version=credentials.version
    )
    return credentials


async def serving_epoch(session: AsyncSession, user_id: str) -> int:
    """Returns the epoch of the user's worker, or 0 if none runs."""
    serving = select(func.max(WorkerSession.epoch)).filter_by(user_id=user_id, ended_at=None)
    return int(await session.scalar(serving) or 0)


def login_of(stored: StoredCredentials, epoch: int) -> dict[str, str]:
    """Returns how an account's login stands, and what is wrong. `epoch` is that of the user's
    worker, or 0."""
    account, state, code = stored.account, LoginState.IDLE, ""
    rejected = account.rejected_version == stored.version
    reported = account.login_epoch == epoch > 0
    if reported:
        code = account.login_code
        state = LoginState.RETRYING if code else LoginState.CONNECTED
    if rejected:
        code = LoginRejected.code
        state = state if state is LoginState.CONNECTED else LoginState.REJECTED
    return {
        "login": state,
        "login_code": code,
        "login_detail": account.login_detail if code else "",
    }


async def accounts_of_user(session: AsyncSession, user_id: str) -> Sequence[StoredCredentials]:
    """Returns the credentials of all accounts of a user, by account id."""
    stored = (
        select(StoredCredentials).filter_by(user_id=user_id).order_by(StoredCredentials.account_id)
    )
    return (await session.scalars(stored)).all()


async def remove_account(
    session: AsyncSession, user_id: str, account_id: str, *, actor: str, reason: str
) -> None:
    """Removes an account for good, with its credentials, limits and webhooks; its orders are kept.

    Raises `AccountNotFound`, `StillInUse`.
    """
    await require_account(session, user_id, account_id, lock=True)
    await delete_accounts(session, user_id, account_id)
    subject = f"account:{user_id}/{account_id}"
    audit.append_entry(session, actor, "account.removed", subject, reason=reason)


async def delete_accounts(
    session: AsyncSession, user_id: str, account_id: str | None = None
) -> None:
    """Deletes one account of a user, or all, and what belongs to them. Raises `StillInUse`."""
    serving = select(WorkerSession).filter_by(user_id=user_id, ended_at=None)
    if worker_session := await session.scalar(serving.limit(1)):
        worker = (
            f"worker {worker_session.worker_id}"
            if worker_session.worker_id
            else "a worker being claimed"
        )
        raise StillInUse(f"{worker} of user {user_id} runs: stop it first")
    of = (
        {"user_id": user_id}
        if account_id is None
        else {"user_id": user_id, "account_id": account_id}
    )
    unsettled = select(Order.id).filter_by(**of).where(Order.state.in_(OPEN_STATES))
    if order_id := await session.scalar(unsettled.limit(1)):
        raise StillInUse(f"order {order_id} is not final: cancel or settle it first")
    for table in (Webhook, AccountLimits, StoredCredentials, BrokerAccount):
        await session.execute(delete(table).filter_by(**of))


async def count_credentials_under_other_keys(session: AsyncSession, key_id: str) -> int:
    """Counts the stored credentials that another master key than `key_id` wraps."""
    others = StoredCredentials.master_key_id != key_id
    return await session.scalar(select(func.count(StoredCredentials.version)).where(others)) or 0


async def lock_credentials_under_other_key(
    session: AsyncSession, key_id: str
) -> StoredCredentials | None:
    """Locks and returns one row that another master key than `key_id` wraps; skips rows that
    somebody else has locked."""
    others = select(StoredCredentials).where(StoredCredentials.master_key_id != key_id)
    return await session.scalar(
        others.limit(1).with_for_update(of=StoredCredentials, skip_locked=True)
    )
