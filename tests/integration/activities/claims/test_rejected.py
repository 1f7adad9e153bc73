"""What a broker has rejected is remembered by its version, and never sealed to a worker again."""

import asyncio

import pytest

from activities.events.recorder import Recorder
from infra.database import accounts, users
from infra.database.accounts import LoginState
from infra.database.models import BrokerAccount
from infra.vault import vault
from tests.support.activities.harness import SECRET, ActivityHarness
from tests.support.workers.pool_worker import ScriptedPoolWorker
from worker_runtime.protocol.errors import LoginRejected
from worker_runtime.protocol.messages import (
    AccountLogin,
    AccountReported,
    Claim,
    Failure,
    WorkerEvent,
    WorkerEventKind,
)
from worker_runtime.protocol.requests import AccountReport, encode_report
from workflows.user_worker.messages import ClaimResult, ClaimStatus, StopWorker, WorkerRef

REJECTED = Failure(code="LOGIN_REJECTED", detail="wrong key")


async def put(harness: ActivityHarness, user: str, account_id: str = "main") -> int:
    encrypted = await vault.encrypt_credentials(
        SECRET, harness.ring.public, user_id=user, account_id=account_id
    )
    async with harness.database.session() as session:
        return await accounts.put_account(
            session,
            user_id=user,
            account_id=account_id,
            broker="paper",
            broker_type="stock",
            simulation=True,
            encrypted=encrypted,
        )


async def record(
    harness: ActivityHarness, user: str, epoch: int, at_ms: int, *logins: AccountLogin
) -> None:
    async with harness.database.session() as session:
        await accounts.record_logins(session, user, epoch, at_ms, logins)


async def standing(
    harness: ActivityHarness, user: str, epoch: int = 0, account_id: str = "main"
) -> tuple[str, str, str]:
    async with harness.database.session() as session:
        [stored] = [
            account
            for account in await accounts.accounts_of_user(session, user)
            if account.account_id == account_id
        ]
        login, code, detail = accounts.login_of(stored, epoch).values()
        return login, code, detail


async def orders_refused(harness: ActivityHarness, user: str, account_id: str = "main") -> bool:
    async with harness.database.session() as session:
        account = await session.get(BrokerAccount, (user, account_id))
        assert account is not None
        return account.login_rejected


def rejected(version: int = 1, account_id: str = "main") -> AccountLogin:
    return AccountLogin(
        account_id=account_id, code="LOGIN_REJECTED", rejected=version, detail="wrong key"
    )


async def claimed(
    harness: ActivityHarness, user: str, worker: ScriptedPoolWorker, claim_id: str
) -> ClaimResult:
    request = harness.claim(user, claim_id)
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, request), worker.serve()
    )
    return result


async def stopped(harness: ActivityHarness, user: str, claim_id: str) -> None:
    ref = WorkerRef(worker_id="", task_id="", epoch=0, claim_id=claim_id, pool="default")
    await harness.run(
        harness.stopping.stop_worker, StopWorker(user_id=user, worker=ref, reason="test")
    )


async def test_a_rejected_login_takes_no_second_worker_until_there_are_other_credentials(
    harness: ActivityHarness,
) -> None:
    user, worker, other = await harness.user(), await harness.worker(), await harness.worker()
    worker.failures, worker.logins = [REJECTED], [rejected()]
    first = await claimed(harness, user, worker, "c1")
    assert (first.status, first.failure_code) == (ClaimStatus.FAILED, "LOGIN_REJECTED")
    assert first.worker is not None
    await harness.run(
        harness.stopping.stop_worker,
        StopWorker(user_id=user, worker=first.worker, reason="LOGIN_REJECTED"),
    )
    for number in (2, 3):
        again = await harness.run(harness.claiming.claim_worker, harness.claim(user, f"c{number}"))
        assert (again.failure_code, again.retryable, again.worker) == (
            "LOGIN_REJECTED",
            False,
            None,
        )
        assert "wrong key" in again.failure_detail
        await stopped(harness, user, f"c{number}")
    assert other.received == []
    assert await standing(harness, user) == (LoginState.REJECTED, "LOGIN_REJECTED", "wrong key")
    assert await put(harness, user) == 2
    assert await standing(harness, user) == (LoginState.IDLE, "", "")
    assert (await claimed(harness, user, other, "c4")).status == ClaimStatus.ACTIVE


async def test_a_claim_continues_without_the_account_that_was_rejected(
    harness: ActivityHarness,
) -> None:
    user, worker = await harness.user(), await harness.worker()
    await put(harness, user, "second")
    await record(harness, user, 1, 1000, rejected())
    assert (await claimed(harness, user, worker, "c1")).status == ClaimStatus.ACTIVE
    [claim] = worker.received
    assert isinstance(claim, Claim)
    assert [account.account_id for account in claim.accounts] == ["second"]


async def test_a_retry_is_a_version_of_its_own_and_late_news_of_the_one_before_changes_nothing(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    await record(harness, user, 1, 1000, rejected())
    assert await orders_refused(harness, user)
    with pytest.raises(LoginRejected, match="main: wrong key"):
        async with harness.database.session() as session:
            await accounts.require_login(session, user)
    async with harness.database.session() as session:
        tried = await accounts.retry_login(session, user, "main", actor="test")
        assert tried.version == 2
    async with harness.database.session() as session:  # not rejected: nothing to try again
        assert (await accounts.retry_login(session, user, "main", actor="test")).version == 2
    await record(harness, user, 1, 1000, rejected())
    await record(harness, user, 9, 9000, rejected(version=2**53))
    assert not await orders_refused(harness, user)
    assert (await standing(harness, user))[0] == LoginState.IDLE
    await record(harness, user, 9, 9001, rejected(version=2))
    assert await orders_refused(harness, user)


async def test_an_older_report_never_covers_a_newer_one(harness: ActivityHarness) -> None:
    user = await harness.user()
    await record(harness, user, 2, 5000, rejected())
    await record(harness, user, 2, 4000, AccountLogin(account_id="main"))
    await record(harness, user, 1, 9000, AccountLogin(account_id="main"))
    await record(harness, user, 3, 1, AccountLogin(account_id="no such account"))
    assert (await standing(harness, user, 2))[0] == LoginState.REJECTED


async def test_an_account_that_continues_with_older_credentials_takes_orders(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    assert await put(harness, user) == 2
    await record(
        harness, user, 1, 1000, AccountLogin(account_id="main", rejected=2, detail="wrong key")
    )
    assert not await orders_refused(harness, user)
    state, code, detail = await standing(harness, user, 1)
    assert (state, code) == (LoginState.CONNECTED, "LOGIN_REJECTED")
    assert detail == "wrong key"
    assert (await standing(harness, user))[0] == LoginState.REJECTED  # its worker has ended


async def test_an_account_that_is_away_says_so_only_while_its_worker_runs(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    await record(
        harness,
        user,
        1,
        1000,
        AccountLogin(account_id="main", code="BROKER_UNREACHABLE", detail="x" * 5000),
    )
    state, code, detail = await standing(harness, user, 1)
    assert (state, code, len(detail)) == (LoginState.RETRYING, "BROKER_UNREACHABLE", 1000)
    assert (await standing(harness, user, 2))[0] == LoginState.IDLE
    assert not await orders_refused(harness, user)


async def test_the_recorder_and_new_credentials_never_wait_for_each_other(
    harness: ActivityHarness,
) -> None:
    """A login changes its account's row twice, and the second time PostgreSQL looks at the user's
    row."""
    user = await harness.user()
    login = WorkerEvent(
        worker_id="w",
        user_id=user,
        epoch=1,
        sequence=1,
        kind=WorkerEventKind.CONNECTED,
        at_ms=1000,
        logins=[AccountLogin(account_id="main")],
    )
    report = AccountReport(
        account_id="main",
        taken_at_ms=1_795_410_000_000,
        complete=True,
        absence_certain=True,
        orders=[],
        positions=[],
    )
    reported = AccountReported(
        worker_id="w",
        user_id=user,
        account_id="main",
        epoch=1,
        at_ms=1000,
        report=encode_report(report),
    )
    async with harness.database.session() as session:
        await users.get_user(session, user, lock=True)  # as a PUT of credentials begins
        async with asyncio.timeout(5):
            await Recorder(harness.database).handle([login, reported])
    assert await put(harness, user) == 2
