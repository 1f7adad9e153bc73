"""Orders that need an operator's attention, and orders that block others."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text

from infra.database.engine import Database
from infra.database.models import AuditEntry, Order, WorkerSession
from infra.database.orders import acceptance, attention, recording
from infra.database.orders import checks as order_checks
from infra.database.orders.attention import OrderSettled, Resolution, ResolutionInvalid
from infra.database.orders.states import OrderNotFound
from infra.database.trading.models import Reconciliation
from tests.support.orders.model import OrderModel
from tests.support.orders.stored import make_new_order, make_order_event
from worker_runtime.protocol.contract_codes import may_be_same_contract, same_contract_pattern
from worker_runtime.protocol.errors import AccountBlocked, SymbolBlocked, UnknownAccount
from worker_runtime.protocol.messages import OrderOutcome, OrderState

CANCELLED = Resolution(
    state=OrderState.CANCELLED,
    filled_quantity=0,
    average_price=None,
    reason="seen in the broker's app",
)


async def placed(
    database: Database, client_order_id: str = "c-1", symbol: str = "2330"
) -> uuid.UUID:
    async with database.session() as session:
        new = replace(make_new_order(client_order_id), symbol=symbol)
        return (await acceptance.accept_order(session, new)).order.id


async def tell(database: Database, order_id: uuid.UUID, state: OrderState, filled: int = 0) -> None:
    async with database.session() as session:
        await recording.record_event(
            session, make_order_event(str(order_id), f"{order_id}:{state}", state, filled)
        )


async def row(database: Database, order_id: uuid.UUID) -> Order:
    async with database.session() as session:
        return await recording.get_order(session, order_id)


@pytest.mark.parametrize("by_answer", [True, False])
async def test_a_final_order_is_never_checked_again(database: Database, by_answer: bool) -> None:
    order_id = await placed(database)
    assert (await row(database, order_id)).verify_at is not None
    async with database.session() as session:
        assert await attention.demand_attention(session, order_id, "nobody knows")
    if by_answer:
        async with database.session() as session:
            outcome = OrderOutcome(
                order_id=str(order_id), state=OrderState.FILLED, filled_quantity=2
            )
            await recording.apply_outcome(session, outcome)
    else:
        await tell(database, order_id, OrderState.FILLED, 2)
    stored = await row(database, order_id)
    assert (stored.verify_at, stored.attention, stored.attention_at) == (None, None, None)
    async with database.session() as session:
        assert not await attention.demand_attention(session, order_id, "too late")
        assert await attention.orders_for_a_person(session) == []


async def test_a_demand_takes_the_order_from_the_sweeper_and_is_noted_once(
    database: Database,
) -> None:
    order_id = await placed(database)
    for _ in range(2):
        async with database.session() as session:
            assert await attention.demand_attention(
                session, order_id, "the broker does not list it"
            )
    stored = await row(database, order_id)
    assert (stored.verify_at, stored.attention) == (None, "the broker does not list it")
    async with database.session() as session:
        steps = [
            (step.state, step.data.get("reason"))
            for step in await recording.events_of_order(session, order_id)
        ]
    assert steps == [("accepted", None), ("needs_attention", "the broker does not list it")]


async def test_those_that_wait_longest_come_first_page_by_page(database: Database) -> None:
    ids = [await placed(database, f"c-{number}") for number in range(3)]
    for order_id in ids:
        async with database.session() as session:
            await attention.demand_attention(session, order_id, "?")
    async with database.session() as session:
        [first, second] = await attention.orders_for_a_person(session, limit=2)
        assert second.attention_at is not None
        rest = await attention.orders_for_a_person(session, after=(second.attention_at, second.id))
    assert [first.id, second.id, *(order.id for order in rest)] == ids


async def test_a_recheck_gives_the_order_back_to_the_sweeper_and_leaves_it_on_the_list(
    database: Database,
) -> None:
    order_id = await placed(database)
    async with database.session() as session:
        await attention.demand_attention(session, order_id, "?")
    async with database.session() as session:
        await attention.recheck_order(session, order_id, actor="key:7")
    stored = await row(database, order_id)
    assert stored.verify_at is not None
    assert stored.attention == "?"
    with pytest.raises(OrderNotFound):
        async with database.session() as session:
            await attention.recheck_order(session, uuid.uuid4(), actor="key:7")


async def test_a_person_ends_an_order_once_and_it_is_in_the_audit_trail(database: Database) -> None:
    order_id = await placed(database)
    await tell(database, order_id, OrderState.UNKNOWN)
    async with database.session() as session:
        await attention.demand_attention(session, order_id, "?")
    async with database.session() as session:
        await attention.resolve_order(session, order_id, CANCELLED, actor="key:7")
    await tell(database, order_id, OrderState.FILLED)
    stored = await row(database, order_id)
    assert (stored.state, stored.reason) == ("cancelled", "seen in the broker's app")
    assert (stored.verify_at, stored.attention) == (None, None)
    with pytest.raises(OrderSettled):
        async with database.session() as session:
            await attention.resolve_order(session, order_id, CANCELLED, actor="key:7")
    with pytest.raises(OrderSettled):
        async with database.session() as session:
            await attention.recheck_order(session, order_id, actor="key:7")
    async with database.session() as session:
        [entry] = await session.scalars(
            select(AuditEntry).where(AuditEntry.action == "order.resolved")
        )
    assert (entry.actor, entry.data["before"], entry.data["state"]) == (
        "key:7",
        "unknown",
        "cancelled",
    )


@pytest.mark.parametrize(
    ("state", "filled", "price"),
    [
        (OrderState.SUBMITTED, 1, Decimal(5)),
        (OrderState.FILLED, 1, Decimal(5)),
        (OrderState.FILLED, 3, Decimal(5)),
        (OrderState.FILLED, 2, None),
        (OrderState.CANCELLED, 0, None),
        (OrderState.CANCELLED, 2, Decimal(5)),
        (OrderState.REJECTED, 1, Decimal(5)),
    ],
)
async def test_an_end_that_cannot_be_is_refused(
    database: Database, state: OrderState, filled: int, price: Decimal | None
) -> None:
    order_id = await placed(database)
    await tell(database, order_id, OrderState.PART_FILLED, 1)
    resolution = Resolution(state=state, filled_quantity=filled, average_price=price, reason="r")
    with pytest.raises(ResolutionInvalid):
        async with database.session() as session:
            await attention.resolve_order(session, order_id, resolution, actor="key:7")
    assert (await row(database, order_id)).state == "part_filled"


async def test_an_unknown_order_blocks_its_symbol_until_it_is_settled(database: Database) -> None:
    order_id = await placed(database)
    await tell(database, order_id, OrderState.UNKNOWN)
    with pytest.raises(SymbolBlocked, match=str(order_id)):
        await placed(database, "c-2")
    assert await placed(database, "c-1") == order_id  # a repeat is answered as ever
    await placed(database, "c-3", symbol="2317")
    await tell(database, order_id, OrderState.FILLED, 2)
    await placed(database, "c-2")


async def test_a_blocking_order_is_not_searched_among_all_that_were_ever_submitting(
    database: Database,
) -> None:
    order_id = await placed(database)
    await tell(database, order_id, OrderState.UNKNOWN)
    copied = [column.name for column in Order.__table__.columns]
    changed = {
        "id": "gen_random_uuid()",
        "client_order_id": "'n' || n",
        "tag": "lpad(n || '', 6, '0')",
    }
    values = ", ".join(
        changed.get(name, "'filled'" if name == "state" else name) for name in copied
    )
    many = (
        # The names are the model's.
        f"insert into orders ({', '.join(copied)}) select {values} from orders, "  # noqa: S608
        "generate_series(2, 3000) n"
    )
    asked = {
        "unknown_blocks": "symbol",
        "user_id": "42",
        "account_id": "main",
        "symbol": "2330",
        "same_contract": same_contract_pattern("TXFL6"),
    }
    async with database.session() as session:
        await session.execute(text(many))
        await session.execute(text("analyze orders"))
        plan = "\n".join(
            await session.scalars(text(f"explain {order_checks.FIRST_UNSETTLED.text}"), asked)
        )
        assert str(await session.scalar(order_checks.FIRST_UNSETTLED, asked)) == str(order_id)
    assert "orders_unsettled" in plan, plan
    assert "orders_by_state" not in plan, plan


async def test_nor_are_all_events_read_for_it_while_the_tables_are_new(database: Database) -> None:
    asked = {
        "unknown_blocks": "symbol",
        "user_id": "42",
        "account_id": "main",
        "symbol": "2330",
        "same_contract": same_contract_pattern("TXFL6"),
    }
    async with database.session() as session:
        plan = "\n".join(
            await session.scalars(text(f"explain {order_checks.FIRST_UNSETTLED.text}"), asked)
        )
    assert "order_events_pkey" in plan, plan
    assert "Seq Scan on order_events" not in plan, plan


@pytest.mark.parametrize(
    ("unknown", "other", "blocked"),
    [
        ("TXFR1", "TXFK6", True),
        ("TXFK6", "TXFR1", True),
        ("TXFR1", "TXFR2", True),
        ("TXFK6", "TXFL6", False),
        ("TXFR1", "MXFK6", False),
        ("2330", "2317", False),
    ],
)
async def test_a_rolling_code_and_the_contracts_that_it_may_stand_for_block_each_other(
    database: Database, unknown: str, other: str, blocked: bool
) -> None:
    assert may_be_same_contract(unknown, other) is blocked  # the worker's rule is this one
    order_id = await placed(database, symbol=unknown)
    await tell(database, order_id, OrderState.UNKNOWN)
    if blocked:
        with pytest.raises(SymbolBlocked, match=str(order_id)):
            await placed(database, "c-2", symbol=other)
    else:
        await placed(database, "c-2", symbol=other)


@pytest.mark.parametrize(
    ("scope", "blocked"), [("symbol", False), ("account", True), ("off", False)]
)
async def test_a_setting_widens_or_narrows_what_an_unknown_order_blocks(
    database: Database, scope: str, blocked: bool
) -> None:
    order_id = await placed(database)
    await tell(database, order_id, OrderState.UNKNOWN)
    other = replace(make_new_order("c-2"), symbol="2317", unknown_blocks=scope)
    async with database.session() as session:
        if blocked:
            with pytest.raises(SymbolBlocked, match=str(order_id)):
                await acceptance.accept_order(session, other)
        else:
            assert (await acceptance.accept_order(session, other)).new


async def test_with_the_block_off_the_same_symbol_passes(database: Database) -> None:
    await tell(database, await placed(database), OrderState.UNKNOWN)
    async with database.session() as session:
        assert (
            await acceptance.accept_order(
                session, replace(make_new_order("c-2"), unknown_blocks="off")
            )
        ).new
        with pytest.raises(UnknownAccount):
            await acceptance.accept_order(
                session, replace(make_new_order("c-3", account_id="no"), unknown_blocks="off")
            )


@pytest.mark.parametrize(
    ("ended", "unknown_blocks"), [(True, "symbol"), (True, "off"), (False, "symbol")]
)
async def test_an_order_that_a_worker_was_submitting_when_it_ended_blocks_its_symbol(
    database: Database, ended: bool, unknown_blocks: str
) -> None:
    for claim, epoch in (("a former one", 0), ("the one that submits", 1)):  # as in `event`
        async with database.session() as session:
            over = datetime.now(UTC) if ended or epoch == 0 else None
            session.add(
                WorkerSession(
                    claim_id=claim,
                    user_id="42",
                    epoch=epoch,
                    pool="p",
                    worker_id=f"w{epoch}",
                    ended_at=over,
                )
            )
    order_id = await placed(database)
    await tell(database, order_id, OrderState.SUBMITTING)
    second = replace(make_new_order("c-2"), unknown_blocks=unknown_blocks)
    if ended and unknown_blocks == "symbol":
        with pytest.raises(SymbolBlocked, match=str(order_id)):
            async with database.session() as session:
                await acceptance.accept_order(session, second)
        await placed(database, "c-3", symbol="2317")
        await tell(database, order_id, OrderState.SUBMITTED)
    async with database.session() as session:
        assert (await acceptance.accept_order(session, second)).new


@pytest.mark.parametrize("blocks", [True, False])
async def test_an_open_difference_with_the_broker_blocks_the_account_if_it_says_so(
    database: Database, blocks: bool
) -> None:
    async with database.session() as session:
        session.add(
            Reconciliation(user_id="42", account_id="main", epoch=1, differences={}, blocks=blocks)
        )
    if not blocks:
        await placed(database)
        return
    with pytest.raises(AccountBlocked):
        await placed(database)
    async with database.session() as session:
        await session.execute(
            text("update reconciliations set resolved_at = now(), resolved_by = 'key:7'")
        )
    await placed(database)


TOLD = st.lists(
    st.lists(
        st.tuples(st.sampled_from(list(OrderState)), st.integers(0, 2)), min_size=1, max_size=5
    ),
    max_size=4,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=TOLD)
async def test_the_statements_do_what_the_state_machine_says(
    database: Database, batches: list[list[tuple[OrderState, int]]]
) -> None:
    order_id = await placed(database, uuid.uuid4().hex, symbol=uuid.uuid4().hex)
    expected = OrderModel()
    for number, batch in enumerate(batches):
        told = [
            make_order_event(str(order_id), f"{order_id}:{number}:{place}", state, filled)
            for place, (state, filled) in enumerate(batch)
        ]
        for order_event in told:
            expected = expected.after_event(order_event.state, order_event.filled_quantity)
        async with database.session() as session:
            await recording.record_events(session, told)
        stored = await row(database, order_id)
        assert stored.state == expected.state
        assert stored.filled_quantity == expected.filled_quantity
        assert (stored.verify_at is not None) == expected.watched
