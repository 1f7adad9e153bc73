"""Checks by instruments over the API: steps of prices, limits of the day, values and ends of
contracts; from a broker's list where one was loaded, else from its record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import msgspec
import pytest

from infra.database.orders.checks import CheckedTerms
from infra.database.trading import instruments
from infra.database.trading.models import InstrumentLoad, InstrumentRow
from infra.market.calendar import zone_of_market
from tests.support.api.accounts import put_account, set_account_limits
from tests.support.api.webhooks import await_signal_outcome, create_webhook, make_signal
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from worker_runtime.protocol.errors import UnknownSymbol
from worker_runtime.protocol.installed_brokers import built_in_brokers
from worker_runtime.protocol.instruments import Instrument, InstrumentKind, PriceStep

STOCK = Instrument(
    code="2330",
    market="stock",
    kind=InstrumentKind.STOCK,
    lot_units=1000,
    lot_value=Decimal(1000),
    ticks=(PriceStep(below=Decimal(1000), tick=Decimal(1)), PriceStep(tick=Decimal(5))),
    limit_up=Decimal(1100),
    limit_down=Decimal(900),
)
FUTURE = Instrument(
    code="CDFL6",
    market="futures",
    kind=InstrumentKind.FUTURE,
    lot_units=1,
    lot_value=Decimal(2000),
)


def today() -> date:
    """The day of the stock market."""
    return datetime.now(
        zone_of_market(built_in_brokers()["paper"].record.markets["stock"].zone)
    ).date()


async def load(api: ServedApi, *listed: Instrument, day: date | None = None) -> None:
    """A list of the paper exchange's instruments, as it was loaded on a day."""
    day = day or today()
    async with api.services.database.session() as session:
        load = InstrumentLoad(
            broker="paper",
            user_id=api.user,
            account_id="main",
            trading_day=day,
            state="loaded",
            markets=sorted({instrument.market for instrument in listed}),
        )
        session.add(load)
        session.add_all(
            InstrumentRow(broker="paper", loaded_on=day, **instruments.told_values(instrument))
            for instrument in listed
        )


@pytest.fixture
async def caller(api: ServedApi, start_worker: StartWorker) -> AsyncIterator[httpx.AsyncClient]:
    """A caller of an API that checks paper accounts like all others."""
    await start_worker(api.user)
    changed = api.settings.model_copy(update={"check_symbols": "all", "check_prices": "all"})
    async with running_api(changed) as strict, strict.client(api.key) as client:
        yield client


async def place(
    api: ServedApi, caller: httpx.AsyncClient, number: int, **changes: Any
) -> tuple[int, str, dict[str, Any]]:
    answer = await caller.post(f"/users/{api.user}/orders", json=an_order(number, **changes))
    body = answer.json()
    return answer.status_code, body.get("code") or body["state"], body


@pytest.mark.parametrize(
    ("symbol", "price", "neighbours"),
    [
        ("2330", "1002", "1000 and 1005"),
        ("0050", "49.999", "49.99 and 50"),
        ("030001", "10.05", "10 and 10.1"),
        ("TXO20000A6", "10.1", "10 and 10.5"),
        ("MX1A6", "20000.5", "20000 and 20001"),
        ("2330", "0.001", "The lowest price is 0.01"),
    ],
)
async def test_a_price_between_two_steps_is_refused_with_the_next_ones(
    api: ServedApi, caller: httpx.AsyncClient, symbol: str, price: str, neighbours: str
) -> None:
    status, code, body = await place(api, caller, 1, symbol=symbol, price=price)
    assert (status, code) == (422, "PRICE_OFF_TICK")
    assert neighbours in body["detail"]


@pytest.mark.parametrize(("side", "price"), [("buy", "1000"), ("sell", "1005")])
async def test_a_price_is_rounded_to_the_passive_side_where_the_order_asks_for_it(
    api: ServedApi, caller: httpx.AsyncClient, side: str, price: str
) -> None:
    terms = {"side": side, "price": "1002", "price_rounding": "passive"}
    status, _, body = await place(api, caller, 1, **terms)
    assert (status, body["price"]) == (201, price)
    # A repeat is the same request, and the same order.
    status, _, again = await place(api, caller, 1, **terms)
    assert (status, again["id"], again["price"]) == (200, body["id"], price)
    status, code, _ = await place(api, caller, 1, side=side, price="1002")
    assert (status, code) == (409, "CLIENT_ORDER_ID_REUSED")


async def test_a_safe_limit_is_rounded_by_the_brokers_own_steps(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    await load(api, msgspec.structs.replace(FUTURE, ticks=(PriceStep(tick=Decimal("0.5")),)))
    limit = {"symbol": "CDFL6", "price_type": "LMT", "price": "101.33"}
    safe = await create_webhook(api)
    for action, price in (("buy", "101"), ("sell", "101.5")):
        said = {"action": action, "quantity": 1, **limit}
        tested = await caller.post(
            f"/users/{api.user}/webhooks/{safe['id']}/test", json={"signal": said}
        )
        assert tested.json()["plan"]["orders"][0]["price"] == price
        placed = await await_signal_outcome(api, safe, make_signal(safe, **said))
        assert (placed.status_code, placed.json()["price"]) == (201, price)
    strict = await create_webhook(api, price_rounding="refuse")
    refused = await await_signal_outcome(api, strict, make_signal(strict, **limit))
    assert (refused.status_code, refused.json()["code"]) == (422, "PRICE_OFF_TICK")
    assert "`safe`" in refused.json()["detail"]


async def test_a_continuous_future_is_a_contract_that_the_broker_lists(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    made = await create_webhook(api)
    path = f"/users/{api.user}/webhooks/{made['id']}/test"
    said = {"signal": {"action": "buy", "symbol": "UDF1!", "quantity": 1}}
    unknown = await caller.post(path, json=said)
    assert (unknown.status_code, unknown.json()["code"]) == (422, "UNKNOWN_SYMBOL")
    assert "no list of its contracts" in unknown.json()["detail"]
    ends = {"UDFC7": 120, "UDFL6": 30, "UDFA6": -300, "UDOA6": 1}
    await load(
        api,
        *(
            msgspec.structs.replace(FUTURE, code=code, expires_on=today() + timedelta(days=days))
            for code, days in ends.items()
        ),
    )
    changed = api.settings.model_copy(update={"check_symbols": "all"})
    async with running_api(changed) as later, later.client(api.key) as user:
        for sent, symbol in (("UDF1!", "UDFL6"), ("UDF2!", "UDFC7")):
            said["signal"]["symbol"] = sent
            tested = await user.post(path, json=said)
            assert (tested.status_code, tested.json().get("symbol")) == (200, symbol), tested.text


async def test_a_buy_below_the_lowest_price_is_refused_and_not_made_dearer(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    terms = {"price": "0.001", "price_rounding": "passive"}
    status, code, body = await place(api, caller, 1, side="buy", **terms)
    assert (status, code) == (422, "PRICE_OFF_TICK")
    assert "The lowest price is 0.01" in body["detail"]
    status, _, body = await place(api, caller, 2, side="sell", **terms)
    assert (status, body["price"]) == (201, "0.01")


@pytest.mark.parametrize("symbol", ["TXO20000A6", "MX1A6", "CDFA6", "030001"])
async def test_options_weeklies_single_stock_futures_and_warrants_pass_without_a_list(
    api: ServedApi, caller: httpx.AsyncClient, symbol: str
) -> None:
    status, state, _ = await place(api, caller, 1, symbol=symbol, price="600")
    assert (status, state) == (201, "filled")


async def test_an_account_of_another_market_counts_the_lots_of_the_symbols_own(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    # Release 0.1.0 stored accounts of any type: this one is of the stock market.
    await set_account_limits(api, max_notional=Decimal(200_000))
    assert (await place(api, caller, 1, symbol="MXFA6", price="2000", quantity=2))[0] == 201
    _, code, body = await place(api, caller, 2, symbol="MXFA6", price="2001", quantity=2)
    assert code == "NOTIONAL_LIMIT"
    assert "200100 TWD is above" in body["detail"]


async def test_by_default_a_paper_account_trades_at_any_price(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    assert (await place(api, user, 1, price="1002"))[0] == 201
    await put_account(api, "real", "shioaji", "stock")
    changed = api.settings.model_copy(update={"check_market_open": "off"})
    async with running_api(changed) as other, other.client(api.key) as live:
        refused = await place(api, live, 2, price="1002", account_id="real")
        assert refused[:2] == (422, "PRICE_OFF_TICK")


async def test_the_brokers_list_decides_steps_limits_and_which_codes_exist(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    await load(api, STOCK, FUTURE)
    assert (await place(api, caller, 1, price="999.5"))[1] == "PRICE_OFF_TICK"
    _, code, body = await place(api, caller, 2, price="1105")
    assert code == "PRICE_LIMIT"
    assert "highest price of 2330, which is 1100" in body["detail"]
    _, code, body = await place(api, caller, 3, price="899")
    assert code == "PRICE_LIMIT"
    assert "lowest price of 2330, which is 900" in body["detail"]
    assert (await place(api, caller, 4, price="1100"))[0] == 201
    assert (await place(api, caller, 5, symbol="2317", price="100"))[1] == "UNKNOWN_SYMBOL"
    assert (await place(api, caller, 6, symbol="TXFR1", price="100"))[0] == 201


async def test_a_list_of_one_market_refuses_no_code_of_another(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    await load(api, STOCK)
    assert (await place(api, caller, 1, symbol="2317", price="100"))[1] == "UNKNOWN_SYMBOL"
    assert (await place(api, caller, 2, symbol="TXFL6", price="100"))[0] == 201


async def test_what_closes_a_position_is_not_refused_for_a_code_that_the_list_lacks(
    api: ServedApi,
) -> None:
    await load(api, STOCK)
    terms = CheckedTerms(
        user_id=api.user,
        account_id="main",
        symbol="2317",
        quantity=1,
        price_type="LMT",
        price=Decimal(100),
        time_in_force="ROD",
        trading_day=today(),
    )
    changed = api.settings.model_copy(update={"check_symbols": "all"})
    async with running_api(changed) as strict:
        checks = strict.services.placer.checks
        with pytest.raises(UnknownSymbol):
            await checks.check(terms)
        await checks.check(replace(terms, reduce_only=True))


async def test_limits_and_absent_codes_of_an_old_list_refuse_nothing(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    await load(api, STOCK, day=today() - timedelta(days=30))
    assert (await place(api, caller, 1, price="1105"))[0] == 201
    assert (await place(api, caller, 2, symbol="2317", price="100"))[0] == 201


async def test_the_value_of_a_lot_is_the_lists_and_of_a_code_that_tells_none_not_checked(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    await set_account_limits(api, max_notional=Decimal(1_000_000))
    assert (await place(api, caller, 1, symbol="CDFL6", price="600"))[0] == 201
    await load(api, FUTURE)
    changed = api.settings.model_copy(update={"check_symbols": "all"})
    async with running_api(changed) as later, later.client(api.key) as client:
        _, code, body = await place(api, client, 2, symbol="CDFL6", price="600")
        assert code == "NOTIONAL_LIMIT"
        assert "1200000 TWD is above" in body["detail"]
    await set_account_limits(api, max_notional=Decimal(0))
    async with running_api(changed) as later, later.client(api.key) as client:
        _, code, body = await place(api, client, 3, symbol="CDFA7", price="600")
        assert code == "UNKNOWN_SYMBOL"


async def test_an_account_that_may_trade_nothing_does_not_trade_what_has_no_known_value(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    await set_account_limits(api, max_notional=Decimal(0))
    assert (await place(api, caller, 1, symbol="CDFL6", price="600"))[1] == "NOTIONAL_LIMIT"


async def test_a_contract_whose_last_day_is_over_is_refused(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    ended = Instrument(
        code="TXFA6",
        market="futures",
        kind=InstrumentKind.FUTURE,
        lot_units=1,
        lot_value=Decimal(200),
        expires_on=today() - timedelta(days=1),
    )
    await load(api, ended)
    _, code, body = await place(api, caller, 1, symbol="TXFA6", price="20000")
    assert code == "INSTRUMENT_EXPIRED"
    assert f"traded until {ended.expires_on}" in body["detail"]


async def test_a_rolling_code_trades_on_after_the_contract_for_which_it_stood_has_ended(
    api: ServedApi, caller: httpx.AsyncClient
) -> None:
    """As in the evening session of a settlement day, with the list of that morning."""
    rolling = Instrument(
        code="TXFR1",
        market="futures",
        kind=InstrumentKind.FUTURE,
        lot_units=1,
        lot_value=Decimal(200),
        expires_on=today() - timedelta(days=1),
    )
    await load(api, rolling)
    assert (await place(api, caller, 1, symbol="TXFR1", price="20000"))[0] == 201


async def test_a_code_is_looked_up_once_for_many_orders(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    await load(api, STOCK)
    changed = api.settings.model_copy(update={"check_prices": "all"})
    async with running_api(changed) as other, other.client(api.key) as client:
        assert (await place(api, client, 1, price="1000"))[0] == 201
        async with api.services.database.session() as session:
            (await session.get_one(InstrumentRow, ("paper", "2330"))).limit_up = Decimal(950)
        assert (await place(api, client, 2, price="1000"))[0] == 201
