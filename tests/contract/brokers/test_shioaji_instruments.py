"""Shioaji's contracts as instruments, and the contracts that orders reach."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from infra.exchange.exchange import PaperExchange
from infra.exchange.instruments import InstrumentSettings
from infra.exchange.ledger import ExchangeLedger
from infra.lab.shioaji.stand_in import StandInContracts
from tests.support.brokers.shioaji_client import REAL
from worker_runtime.brokers.port import Instrument, InstrumentKind, PriceStep
from worker_runtime.brokers.shioaji import sdk
from worker_runtime.brokers.shioaji.instruments import read_instruments
from worker_runtime.protocol.errors import InstrumentsUnavailable, OrderRejected

TAIPEI = ZoneInfo("Asia/Taipei")


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[PaperExchange]:
    ledger = ExchangeLedger(tmp_path / "ledger.db")
    made = PaperExchange(ledger, lambda seconds, call: None)
    made.instruments.set(InstrumentSettings(day=date(2026, 1, 5)))
    yield made
    ledger.close()


def api_of(exchange: PaperExchange) -> Any:
    """The stand-in's client, of which only the contracts count here."""

    def page(after: str) -> Any:
        try:
            return exchange.instruments.page(after)
        except InstrumentsUnavailable:
            raise REAL.ServerError("StatusCode: 500, Detail: no contracts") from None

    return SimpleNamespace(contracts=BoundContracts(StandInContracts(REAL, page)))


class BoundContracts:
    """Checks each call against the installed SDK's `ContractsApi`."""

    def __init__(self, contracts: StandInContracts) -> None:
        self._contracts = contracts

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(REAL.ContractsApi, name))

        def call(*args: Any, **words: Any) -> Any:
            signature.bind(None, *args, **words)
            return getattr(self._contracts, name)(*args, **words)

        return call


def listed(api: Any, broker_type: str) -> dict[str, Instrument]:
    today = datetime.now(TAIPEI).date()
    instruments = list(read_instruments(api, broker_type, lambda work: work(), 5000, today))
    assert len({instrument.code for instrument in instruments}) == len(instruments)
    return {instrument.code: instrument for instrument in instruments}


def test_a_stock_account_lists_shares_funds_and_warrants(exchange: PaperExchange) -> None:
    instruments = listed(api_of(exchange), "stock")
    assert {instrument.kind for instrument in instruments.values()} == {"stock", "fund", "warrant"}
    assert instruments["2330"] == Instrument(
        code="2330",
        name="台積電",
        market="stock",
        kind=InstrumentKind.STOCK,
        lot_units=1000,
        lot_value=Decimal(1000),
        reference=Decimal(553),
        limit_up=Decimal(608),
        limit_down=Decimal(498),
        day_trade=True,
    )
    warrant = instruments["030001"]
    assert (warrant.underlying, warrant.expires_on) == ("2330", date(2026, 7, 15))
    assert (warrant.lot_units, warrant.reference) == (1000, Decimal("5.5"))
    assert instruments["5483"].day_trade is False


def test_a_futures_account_lists_futures_weeklies_and_options(exchange: PaperExchange) -> None:
    instruments = listed(api_of(exchange), "futures")
    assert {instrument.kind for instrument in instruments.values()} == {"future", "option"}
    weekly = instruments["MX1A6"]
    assert (int(weekly.lot_value), weekly.ticks) == (50, (PriceStep(tick=Decimal(1)),))
    assert (weekly.expires_on, weekly.underlying) == (date(2026, 1, 7), "TAIEX")
    assert instruments["CDFA6"].lot_value == 2000
    option = instruments["TXO20000A6"]
    # Its tick depends on the price: the record says how, until somebody has seen the SDK's table.
    assert (option.kind.value, option.ticks, int(option.lot_value)) == ("option", (), 50)
    assert (option.limit_up, option.limit_down) == (Decimal(2200), Decimal("0.1"))


@pytest.mark.parametrize("broker_type", ["stock", "futures"])
def test_contracts_with_the_prices_of_yesterday_are_listed_without_them(
    exchange: PaperExchange, broker_type: str
) -> None:
    """As before the vendor updates them in the morning."""
    priced = listed(api_of(exchange), broker_type)
    exchange.instruments.set(InstrumentSettings(day=date(2026, 1, 5), prices_due=True))
    instruments = listed(api_of(exchange), broker_type)
    assert instruments.keys() == priced.keys()
    assert not any(instrument.prices_due for instrument in priced.values())
    for instrument in instruments.values():
        assert instrument.prices_due
        assert (instrument.reference, instrument.limit_up, instrument.limit_down) == (
            None,
            None,
            None,
        )


@pytest.mark.parametrize("days", [1, 3, -1])
def test_each_contract_has_its_prices_on_the_day_of_its_update_only(days: int) -> None:
    other_day = datetime.now(TAIPEI).date() - timedelta(days=days)
    instruments = read({"A": terms(), "B": terms(update_date=other_day)})
    assert (instruments["A"].limit_up, instruments["A"].prices_due) == (Decimal(22000), False)
    assert (instruments["B"].limit_up, instruments["B"].prices_due) == (None, True)


@pytest.mark.parametrize("broker_type", ["stock", "futures"])
def test_missing_contracts_are_an_error(exchange: PaperExchange, broker_type: str) -> None:
    """Sinotrade/Shioaji #19."""
    exchange.instruments.set(InstrumentSettings(missing=True))
    with pytest.raises(InstrumentsUnavailable):
        listed(api_of(exchange), broker_type)


class Contracts:
    """`api.contracts` with the bases and terms of a test."""

    def __init__(self, infos: dict[str, Any], targets: dict[str, str]) -> None:
        self.infos = infos
        self.targets = targets

    def preload(self, kinds: list[str], info: bool, timeout: int) -> None: ...

    def list(self, kind: str) -> list[Any]:
        codes = [*self.infos, *self.targets] if kind == "FUT" else ["TXO1"]
        return [self.base(code, kind) for code in codes]

    def base(self, code: str, kind: str) -> Any:
        return REAL.BaseContract(kind, "TAIFEX", code, target_code=self.targets.get(code))

    def get(self, code: str, security_type: str) -> Any:
        return self.base(code, security_type) if code in self.infos else None

    def info(self, base: Any) -> Any:
        info = terms() if base.code == "TXO1" else self.infos.get(base.code)
        if info is None:
            raise ValueError("no info")
        return info


def terms(**changes: Any) -> Any:
    known: dict[str, Any] = {
        "name": "name",
        "multiplier": 200.0,
        "contract_size": None,
        "tick": 1.0,
        "tick_rule": None,
        "last_trading_date": None,
        "delivery_date": date(2026, 1, 21),
        "underlying_code": None,
        "root": "TXF",
        "reference": 20000.0,
        "limit_up": 22000.0,
        "limit_down": 18000.0,
        "update_date": datetime.now(TAIPEI).date(),
    }
    return SimpleNamespace(**known | changes)


def read(infos: dict[str, Any], **targets: str) -> dict[str, Instrument]:
    return listed(SimpleNamespace(contracts=Contracts(infos, targets)), "futures")


def test_a_rolling_code_has_the_terms_of_what_it_stands_for_and_no_last_day() -> None:
    instruments = read({"TXFA6": terms()}, TXFR1="TXFA6")
    assert instruments["TXFR1"].lot_value == 200
    assert [instruments[code].expires_on for code in ("TXFA6", "TXFR1")] == [
        date(2026, 1, 21),
        None,
    ]


@pytest.mark.parametrize("nothing", [None, 0.0, float("nan"), -1.0])
def test_a_number_that_the_sdk_does_not_know_is_none(nothing: float | None) -> None:
    instruments = read(
        {"A": terms(reference=nothing, limit_up=nothing, limit_down=nothing, tick=nothing)}
    )["A"]
    assert (instruments.reference, instruments.limit_up, instruments.limit_down) == (
        None,
        None,
        None,
    )
    assert instruments.ticks == ()


def test_floats_of_the_sdk_become_the_decimals_that_they_show() -> None:
    instrument = read({"A": terms(reference=1234.05, multiplier=None, contract_size=0.1)})["A"]
    assert (instrument.reference, instrument.lot_value) == (Decimal("1234.05"), Decimal("0.1"))


def test_limits_that_contradict_each_other_are_left_out() -> None:
    instrument = read({"A": terms(limit_up=1.0)})["A"]
    assert (instrument.limit_up, instrument.limit_down) == (None, None)


def test_few_contracts_without_terms_are_left_out_and_many_are_an_error() -> None:
    many = {f"F{number}": terms() for number in range(20)}
    assert "GONE" not in read(many | {"GONE": None})
    with pytest.raises(InstrumentsUnavailable, match="3 of 23"):
        read(many | dict.fromkeys(("X", "Y", "Z"), terms(multiplier=None)))


@pytest.mark.parametrize(
    ("broker_type", "code", "kind"),
    [
        ("stock", "2330", "STK"),
        ("stock", "0050", "STK"),
        ("stock", "030001", "WRT"),
        ("stock", "03000P", "WRT"),
        ("futures", "TXFA6", "FUT"),
        ("futures", "MX1A6", "FUT"),
        ("futures", "CDFA6", "FUT"),
        ("futures", "TXO20000A6", "OPT"),
        ("futures", "TX120000M6", "OPT"),
    ],
)
def test_an_order_reaches_the_contract_of_its_code(
    exchange: PaperExchange, broker_type: str, code: str, kind: str
) -> None:
    contract = sdk.find_contract(api_of(exchange), broker_type, code, float("inf"))
    assert (
        contract.code,
        str(getattr(contract.security_type, "value", contract.security_type)),
    ) == (
        code,
        kind,
    )
    other = "futures" if broker_type == "stock" else "stock"
    with pytest.raises(OrderRejected):
        sdk.find_contract(api_of(exchange), other, code)


def test_the_fields_that_are_read_are_those_of_the_sdk() -> None:
    fields = {
        "StockInfo": (
            "name",
            "unit",
            "day_trade",
            "reference",
            "limit_up",
            "limit_down",
            "update_date",
        ),
        "FuturesInfo": tuple(vars(terms())),
        "OptionInfo": tuple(vars(terms())),
        "WarrantInfo": (
            "code",
            "name",
            "underlying_code",
            "last_trading_date",
            "expiry_date",
            "reference",
            "limit_up",
            "limit_down",
            "update_date",
        ),
    }
    # The classes themselves answer for their fields only when they have values.
    stub = ast.parse(Path(REAL.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    for name, read_fields in fields.items():
        own = [*classes["_ContractInfoBase"].body, *classes[name].body]
        known = {ast.unparse(line.target) for line in own if isinstance(line, ast.AnnAssign)}
        assert set(read_fields) <= known, name
