"""The database: migrated once, orders accepted once, epochs that only grow, a trail nobody can
change."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from datetime import UTC, date, datetime

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from infra.database import accounts, audit, dead_letters, kept_jobs, reports, startup, users
from infra.database.engine import IDLE_IN_TRANSACTION_TIMEOUT_S, Database, DatabaseUnavailable
from infra.database.migrate import alembic_config, migrate
from infra.database.models import Base, WorkerSession
from infra.database.orders import acceptance, recording
from infra.database.orders.states import OrderNotFound, rank
from infra.database.trading import limits
from infra.database.trading import models as trading_models
from infra.database.workers import launches, passes
from infra.database.workers import sessions as worker_sessions
from infra.jobs import registry
from infra.local.process import free_port
from infra.local.servers import PostgresServer
from infra.vault import vault
from infra.vault.key_pairs import MasterKeyRing
from tests.support.databases import assign_launched_worker
from tests.support.orders.stored import RING, SECRET, make_new_order, make_order_event, put_account
from worker_runtime.protocol.errors import UnknownAccount
from worker_runtime.protocol.messages import OrderOutcome, OrderState


async def test_models_and_migrations_agree(database: Database) -> None:
    def difference(connection: Connection) -> list[object]:
        # Their tables are known, too.
        of_features = dead_letters.DeadLetterRow, passes.MaintenancePass, kept_jobs.KeptJob
        assert registry.JobTypeRow.metadata is Base.metadata
        for elsewhere in (
            trading_models.Switch,
            reports.DailyReport,
            startup.StartupTaskRow,
            *of_features,
        ):
            assert elsewhere.metadata is Base.metadata
        return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))

    async with database.engine.connect() as connection:
        assert await connection.run_sync(difference) == []


async def test_eight_processes_that_start_together_migrate_once(empty_database: str) -> None:
    newest = ScriptDirectory.from_config(alembic_config()).get_current_head()
    await asyncio.gather(*(migrate(empty_database) for _ in range(8)))
    await migrate(empty_database)
    database = Database(empty_database)
    async with database.session() as session:
        assert (await session.scalars(text("select version_num from alembic_version"))).all() == [
            newest
        ]
    await database.close()


async def test_twenty_simultaneous_repeats_make_one_order(database: Database) -> None:
    async def accept() -> tuple[uuid.UUID, bool]:
        async with database.session() as session:
            accepted = await acceptance.accept_order(session, make_new_order())
            return accepted.order.id, accepted.new

    results = await asyncio.gather(*(accept() for _ in range(20)))
    assert len({order_id for order_id, _ in results}) == 1
    assert sum(new for _, new in results) == 1
    async with database.session() as session:
        count = await session.scalar(
            text("select count(*) from audit_trail where action = 'order.accepted'")
        )
        assert count == 1
        assert [
            event.state for event in await recording.events_of_order(session, results[0][0])
        ] == ["accepted"]


async def test_a_repeat_with_another_body_is_seen(database: Database) -> None:
    async with database.session() as session:
        await acceptance.accept_order(session, make_new_order(fingerprint="one"))
    async with database.session() as session:
        repeated = await acceptance.accept_order(session, make_new_order(fingerprint="two"))
    assert not repeated.new
    assert not repeated.same_request


async def test_an_order_for_an_account_that_is_not_there_is_refused(database: Database) -> None:
    with pytest.raises(UnknownAccount):
        async with database.session() as session:
            await acceptance.accept_order(session, make_new_order(account_id="other"))


async def test_tags_are_unique_and_six_characters(database: Database) -> None:
    async def accept(number: int) -> str:
        async with database.session() as session:
            return (await acceptance.accept_order(session, make_new_order(f"c-{number}"))).order.tag

    tags = await asyncio.gather(*(accept(number) for number in range(60)))
    assert len(set(tags)) == 60
    assert {len(tag) for tag in tags} == {6}
    new = make_new_order("c-0")
    async with database.session() as session:
        usage = await limits.account_usage(session, new.user_id, new.account_id, new.trading_day)
    # Orders are counted only where more tags were used than an account may place.
    assert usage is not None
    assert usage.tags == 60


async def test_a_tag_does_not_come_again_on_another_day(database: Database) -> None:
    days = [date(2026, 1, 1), date(2026, 11, 20), date(2026, 11, 21), date(2028, 2, 29)]
    tags = []
    async with database.session() as session:
        for number, day in enumerate([*days, days[-1]]):
            new = replace(make_new_order(f"day-{number}"), trading_day=day)
            tags.append((await acceptance.accept_order(session, new)).order.tag)
    # The number on a day follows the clock; a day that has not come yet begins at 1.
    assert [tag[:2] for tag in tags] == ["00", "8Z", "90", "LX", "LX"]
    assert tags[3:] == ["LX0001", "LX0002"]


async def test_epochs_grow_by_one_under_concurrency_and_a_repeated_claim_keeps_its_own(
    database: Database,
) -> None:
    async def assign(claim_id: str) -> int:
        async with database.session() as session:
            assigned = await worker_sessions.assign_epoch(
                session, user_id="42", claim_id=claim_id, pool="p"
            )
            return assigned.epoch

    epochs = await asyncio.gather(*(assign(f"claim-{number}") for number in range(25)))
    assert sorted(epochs) == list(range(1, 26))
    assert await assign("claim-7") == epochs[7]
    with pytest.raises(users.UserNotFound):
        async with database.session() as session:
            await worker_sessions.assign_epoch(session, user_id="nobody", claim_id="x", pool="p")


async def test_a_worker_session_keeps_its_first_times_and_its_first_reason(
    database: Database,
) -> None:
    async with database.session() as session:
        await worker_sessions.assign_epoch(session, user_id="42", claim_id="c", pool="p")
        for _ in range(2):
            await assign_launched_worker(session, "c", "w")
        await worker_sessions.set_connected(session, claim_id="c", at=1_000.0)
        await worker_sessions.set_connected(session, claim_id="c", at=2_000.0)
        open_row = await worker_sessions.latest_session(session, worker_id="w", ended_at=None)
        assert open_row is not None
        assert await launches.assigned_workers(session, {"w", "free"}) == {"w"}
        await worker_sessions.end_session(session, claim_id="c", reason="first")
        await worker_sessions.end_session(session, claim_id="c", reason="second")
    async with database.session() as session:
        row = await worker_sessions.latest_session(session, user_id="42")
        assert row is not None
        assert (row.end_reason, row.connected_at) == ("first", datetime.fromtimestamp(1_000.0, UTC))
        assert await worker_sessions.latest_session(session, worker_id="w", ended_at=None) is None
        assert await launches.assigned_workers(session, {"w", "free"}) == set()


async def test_no_worker_is_assigned_while_the_end_of_another_is_not_confirmed(
    database: Database,
) -> None:
    async def assign(claim_id: str) -> worker_sessions.AssignmentResult:
        async with database.session() as session:
            return await worker_sessions.assign_epoch(
                session, user_id="42", claim_id=claim_id, pool="p"
            )

    await assign("one")
    async with database.session() as session:
        await assign_launched_worker(session, "one", "w")
    beside = await assign("two")
    assert (beside.epoch, beside.unended and beside.unended.worker_id) == (0, "w")
    repeated = await assign("one")
    assert (repeated.epoch, repeated.worker_id, repeated.ended, repeated.unended) == (
        1,
        "w",
        False,
        None,
    )
    async with database.session() as session:
        assert await worker_sessions.end_session(session, claim_id="one", reason="stopped") == "w"
        assert not await worker_sessions.end_session(session, claim_id="one", reason="again")
    assert (await assign("one")).ended
    assert await assign("two") == worker_sessions.AssignmentResult(epoch=2)


async def test_no_transaction_keeps_its_locks_while_its_process_stands_still(
    database: Database,
) -> None:
    async with database.session() as session:
        limit = await session.scalar(text("show idle_in_transaction_session_timeout"))
    assert limit == f"{IDLE_IN_TRANSACTION_TIMEOUT_S}s"


async def served(
    database: Database, claim_id: str, *, crashed: bool, connected: bool = True
) -> None:
    async with database.session() as session:
        await worker_sessions.assign_epoch(session, user_id="42", claim_id=claim_id, pool="p")
        if connected:
            await worker_sessions.set_connected(session, claim_id=claim_id, at=1_000.0)
        await worker_sessions.end_session(
            session, claim_id=claim_id, reason="ended", crashed=crashed
        )


async def crashes(
    database: Database, claim_id: str, window: float = 600.0
) -> worker_sessions.AssignmentResult:
    async with database.session() as session:
        return await worker_sessions.assign_epoch(
            session, user_id="42", claim_id=claim_id, pool="p", crash_limit=2, crash_window=window
        )


async def test_crashes_of_late_keep_a_new_claim_from_being_assigned(database: Database) -> None:
    await served(database, "one", crashed=True)
    assert len((await crashes(database, "two")).crashes) == 1
    await served(database, "three", crashed=True, connected=False)
    refused = await crashes(database, "four")
    assert refused.epoch == 0
    assert list(refused.crashes) == sorted(refused.crashes)
    assert abs(refused.crashes[-1] - datetime.now(UTC).timestamp()) < 60
    assert await crashes(database, "four") == refused
    # A repeat of a claim that has its assignment, crashes that are long ago, and one who does not
    # ask.
    assert (await crashes(database, "two")).epoch == 2
    assert (await crashes(database, "five", window=0.0)).epoch == 4
    async with database.session() as session:
        plain = await worker_sessions.assign_epoch(session, user_id="42", claim_id="six", pool="p")
    assert plain == worker_sessions.AssignmentResult(epoch=5)


async def test_a_worker_that_served_and_ended_in_order_clears_earlier_crashes(
    database: Database,
) -> None:
    await served(database, "one", crashed=True)
    await served(database, "two", crashed=True)
    await served(database, "three", crashed=False, connected=False)
    assert (await crashes(database, "four")).epoch == 0
    await served(database, "five", crashed=False)
    assert (await crashes(database, "six")).crashes == ()


async def test_a_crash_is_recorded_even_after_an_orderly_end(database: Database) -> None:
    async with database.session() as session:
        await worker_sessions.assign_epoch(session, user_id="42", claim_id="c", pool="p")
        await worker_sessions.end_session(session, claim_id="c", reason="worker closed")
    before = await latest(database)
    for crashed in (True, True, False):
        async with database.session() as session:
            await worker_sessions.end_session(
                session, claim_id="c", reason="killed", crashed=crashed
            )
    after = await latest(database)
    assert (before.crashed, after.crashed) == (False, True)
    assert (after.end_reason, after.ended_at) == ("worker closed", before.ended_at)


async def latest(database: Database) -> WorkerSession:
    async with database.session() as session:
        row = await worker_sessions.latest_session(session, user_id="42")
    assert row is not None
    return row


@pytest.mark.parametrize(
    "statement", ["update audit_trail set actor = 'x'", "delete from audit_trail"]
)
async def test_the_audit_trail_cannot_be_changed(database: Database, statement: str) -> None:
    async with database.session() as session:
        audit.append_entry(session, "a", "b", "c", field=1)
    with pytest.raises(DBAPIError, match="append-only"):
        async with database.session() as session:
            await session.execute(text(statement))


async def test_new_credentials_get_a_new_version_and_the_old_master_key_can_be_retired(
    database: Database,
) -> None:
    async with database.session() as session:
        assert await put_account(database, session_user="42", session=session) == 2
    old = next(iter(RING._keys.values()))
    new = X25519PrivateKey.generate()
    assert (
        await vault.rewrap_all_data_keys(
            database, MasterKeyRing(new, old), MasterKeyRing(new).public
        )
        == 1
    )
    async with database.session() as session:
        [account] = await accounts.accounts_of_user(session, "42")
    assert account.version == 2
    assert (
        await vault.decrypt_credentials(
            account.encrypted, MasterKeyRing(new), user_id="42", account_id="main"
        )
        == SECRET
    )


async def test_an_event_of_an_unknown_order_is_refused(database: Database) -> None:
    unknown = str(uuid.uuid4())
    with pytest.raises(OrderNotFound):
        async with database.session() as session:
            await recording.record_event(
                session, make_order_event(unknown, f"{unknown}:e", OrderState.SUBMITTED)
            )


LATER = [state for state in OrderState if state is not OrderState.ACCEPTED]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    happened=st.lists(st.tuples(st.sampled_from(LATER), st.integers(0, 2)), min_size=1, max_size=6),
    shuffle=st.randoms(use_true_random=False),
)
async def test_repeated_late_and_reordered_events_never_move_an_order_back(
    database: Database, happened: list[tuple[OrderState, int]], shuffle: object
) -> None:
    async with database.session() as session:
        # A symbol of its own: an unknown order of an earlier example would block it.
        new = replace(make_new_order(uuid.uuid4().hex), symbol=uuid.uuid4().hex)
        order = (await acceptance.accept_order(session, new)).order
    told = [
        make_order_event(str(order.id), f"{order.id}:{number}", state, filled)
        for number, (state, filled) in enumerate(happened)
    ]
    told = told + told
    shuffle.shuffle(told)  # type: ignore[attr-defined]
    best = OrderState.ACCEPTED
    for order_event in told:
        async with database.session() as session:
            await recording.record_event(session, order_event)
        if rank(order_event.state) > rank(best):
            best = order_event.state
        async with database.session() as session:
            now = await recording.get_order(session, order.id)
        assert now.state == best.value
    assert now.filled_quantity == max(filled for _, filled in happened)
    async with database.session() as session:
        assert len(await recording.events_of_order(session, order.id)) == len(happened) + 1


async def test_the_answer_and_its_events_agree_in_any_order(database: Database) -> None:
    async with database.session() as session:
        order = (await acceptance.accept_order(session, make_new_order())).order
        outcome = OrderOutcome(
            order_id=str(order.id), state=OrderState.FILLED, broker_order_id="b", filled_quantity=2
        )
        await recording.apply_outcome(session, outcome)
        await recording.record_event(
            session, make_order_event(str(order.id), f"{order.id}:late", OrderState.SUBMITTED)
        )
    async with database.session() as session:
        now = await recording.get_order(session, order.id)
    assert (now.state, now.broker_order_id, now.filled_quantity) == ("filled", "b", 2)


async def test_no_secret_is_in_the_database(
    database: Database, postgres_server: PostgresServer
) -> None:
    async with database.session() as session:
        rows = (await session.execute(text("select * from credentials"))).all()
    assert rows
    assert b"canary" not in repr(rows).encode()


async def test_a_database_that_is_away_is_named_at_once() -> None:
    database = Database(f"postgresql+asyncpg://berth@127.0.0.1:{free_port()}/berth")
    with pytest.raises(DatabaseUnavailable):
        async with database.session():
            pass
    await database.close()
