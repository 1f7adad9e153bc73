"""A broker's record is read, and a broken one is refused."""

from __future__ import annotations

import shutil
from decimal import Decimal
from pathlib import Path

import pytest

import worker_runtime
from worker_runtime.protocol import installed_brokers
from worker_runtime.protocol.broker_record import BrokerRecordRefused, MarketRule
from worker_runtime.protocol.errors import BerthError, OrderTermsRule, PriceTypeRule

BROKERS = Path(worker_runtime.__path__[0]) / "brokers"
STOCK = installed_brokers.built_in_brokers()["paper"].record.markets["stock"]
FUTURES = installed_brokers.built_in_brokers()["paper"].record.markets["futures"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes a copy of a record that can be broken."""
    for name in ("taiwan.toml", "taiwan_holidays.json"):
        shutil.copy(BROKERS / name, tmp_path / name)
    (tmp_path / "paper").mkdir()
    shutil.copy(BROKERS / "paper" / "broker.toml", tmp_path / "paper" / "broker.toml")
    return tmp_path


def test_the_brokers_that_come_with_berth_have_records() -> None:
    assert {"paper", "shioaji"} <= set(installed_brokers.built_in_brokers())
    assert {"paper=3", "shioaji=3"} <= set(installed_brokers.announced_brokers().split())


@pytest.mark.parametrize(
    ("market", "terms", "error"),
    [
        (STOCK, ("common", "LMT", "ROD", "margin", "auto"), None),
        (STOCK, ("odd", "LMT", "ROD", "cash", "auto"), None),
        (STOCK, ("odd", "MKT", "ROD", "cash", "auto"), PriceTypeRule),
        (STOCK, ("odd", "LMT", "ROD", "margin", "auto"), OrderTermsRule),
        (STOCK, ("common", "MKP", "IOC", "cash", "auto"), PriceTypeRule),
        (STOCK, ("common", "LMT", "ROD", "cash", "new"), OrderTermsRule),
        (FUTURES, ("common", "MKP", "IOC", "cash", "cover"), None),
        (FUTURES, ("common", "MKT", "ROD", "cash", "auto"), PriceTypeRule),
        (FUTURES, ("odd", "LMT", "ROD", "cash", "auto"), OrderTermsRule),
    ],
)
def test_terms_are_taken_in_the_combinations_of_the_record(
    market: MarketRule, terms: tuple[str, str, str, str, str], error: type[BerthError] | None
) -> None:
    refusal = market.refusal(*terms)
    assert market.takes(*terms) is (refusal is None)
    assert (type(refusal) if refusal else None) is error


def test_a_refusal_says_what_is_possible_and_where_that_is_written() -> None:
    refusal = FUTURES.refusal("common", "MKT", "ROD", "cash", "auto")
    assert refusal is not None
    assert "`ROD` with lot `common`, price type `MKT`" in refusal.detail
    assert "Possible here: FOK, IOC (code 9938" in refusal.detail


@pytest.mark.parametrize(
    ("symbol", "price", "tick"),
    [("2330", "9.99", "0.01"), ("2330", "1000", "5"), ("0050", "60", "0.05"), ("233", "9", None)],
)
def test_the_tick_depends_on_symbol_and_price(symbol: str, price: str, tick: str | None) -> None:
    assert STOCK.tick(symbol, Decimal(price)) == (None if tick is None else Decimal(tick))


@pytest.mark.parametrize(
    ("written", "instead", "sentence"),
    [
        ("schema = 1", "schema = 2", "schema is 2, and this release of Berth reads 1"),
        ("tag_length", "tag_lenght", "unknown field `tag_lenght`"),
        ("tag_length = 6", 'tag_length = "six"', "tag_length"),
        ("schema = 1", "schema = ", "Invalid value"),
        ("tag_length = 6", "tag_length = 5", "tags have 6 characters"),
        ('reach = "always"', 'reach = "long"', "reach"),
        ("day_begins = 16:00:00", 'day_begins = "noon"', "day_begins"),
        ('adapter = "', 'adapter = "no path: ', "adapter"),
        ("[credentials.api_key]", "[credentials.pin]", "credentials.pin: Berth stores api_key"),
        (
            'counted_per = "account"',
            'counted_per = "planet"',
            "$.limits.counted_per`. Possible: person, key, account",
        ),
        ("../taiwan.toml", "../atlantis.toml", "atlantis.toml"),
        ("unconfirmed = []", "unconfirmed = []\nmarkets = []", "markets are tables"),
        ('markets_from = "../taiwan.toml"', "markets_from = 5", "markets_from names a file"),
        ("lag_s = 0", "lag_s = inf", "lists.lag_s is inf"),
        ("queries_per_5s = 25", "queries_per_5s = 25\ncool_down_s = nan", "limits.cool_down_s"),
        ("day_begins = 16:00:00", 'day_begins = "16:00:00Z"', "without an offset"),
        ("life_s = 86400", "life_s = 9", "session.life_s"),
        ("life_s = 86400", "life_s = inf", "session.life_s is inf"),
        ("life_s = 86400", 'ends_at = "05:00:00Z"', "session.ends_at has the time 05:00:00+00:00"),
        ("[session]", "[limits.address]\norders_per_10s = 0\n[session]", "limits.address.orders"),
        ("[session]", "[limits.address]\nbans = 1\n[session]", "unknown field `bans`"),
    ],
)
def test_a_broken_record_is_refused_with_a_sentence(
    folder: Path, written: str, instead: str, sentence: str
) -> None:
    path = folder / "paper" / "broker.toml"
    text = path.read_text(encoding="utf-8")
    assert written in text
    path.write_text(text.replace(written, instead, 1), encoding="utf-8")
    with pytest.raises(BrokerRecordRefused) as refused:
        installed_brokers.load_plugin(path)
    assert str(path) in refused.value.detail
    assert sentence in refused.value.detail


@pytest.mark.parametrize(
    ("written", "instead", "sentence"),
    [
        ("[stock.lots.odd]", "[stock.lots.tiny]", "Possible: common, odd, intraday_odd, fixing"),
        ('price_types = ["LMT", "MKT"]', 'price_types = ["LIMIT"]', "Possible: LMT, MKT, MKP"),
        ('price_types = ["LMT", "MKT"]', "price_types = []", "stock.orders[0]: lots, price_types"),
        ("opens = 08:30:00", "opens = 18:30:00", "stock.day: it opens at 18:30:00, the bell is"),
        ("bell = 09:00:00", "bell = 08:00:00", "stock.day: it opens at 08:30:00, the bell is"),
        ('{ tick = "5" }', '{ below = "5", tick = "5" }', "must rise by `below`"),
        (
            '{ below = "10", tick = "0.01" }',
            '{ below = "10", tick = "0.01" }, { below = "10", tick = "0.02" }',
            "must rise by `below`",
        ),
        (
            "bell = 15:00:00",
            "bell = 14:00:00",
            "futures.evening: it opens at 14:50:00, the bell is at 14:00:00, and it closes at 05:0",
        ),
        ("closes = 05:00:00", "closes = 15:00:00", "futures.evening: it opens at 14:50:00"),
        ("closes = 05:00:00", "closes = 14:50:00", "futures.evening: it opens at 14:50:00"),
        ("closes = 05:00:00", "closes = 09:00:00", "14:50:00 to 09:00:00 overlaps the day"),
        ("opens = 14:50:00", "opens = 13:40:00", "13:40:00 to 05:00:00 overlaps the day"),
        ("after_close_min = [10, 60]", "after_close_min = [60, 10]", "60 to 10 minutes after 13:3"),
        ("after_close_min = [10, 60]", "after_close_min = [10, 630]", "no time of that day"),
        (r"\d{4,6}[A-Z]?", r"\d{4,6}[A-Z", "is no pattern"),
        ("max_quantity = 999", "max_quantity = 0", "max_quantity"),
        ("taiwan_holidays.json", "nowhere.json", "names nowhere.json"),
        ("units = 1000", "units = 100", "odd lots are for markets whose common lot has 1000 units"),
        ("[stock.lots.odd]\nunits = 1\n", "[stock.lots.odd]\nunits = 2\n", "counts single units"),
        ("rolling = 'R[12]'", "rolling = 'R(1|2)'", "has a group"),
        ("product = '", "product = '(", "is no pattern"),
        ('months = "ABCDEFGHIJKL"', 'months = "FGHJ"', "months has twelve characters"),
        ('currency = "TWD"', 'currency = "dollars"', "currency"),
        ('{ tick = "5" }', '{ tick = "NaN" }', "has the number NaN; write one above 0"),
        ('{ tick = "5" }', '{ tick = "Infinity" }', "has the number Infinity"),
        ('{ tick = "5" }', '{ tick = "0" }', "has the number 0"),
        ('{ tick = "5" }', '{ tick = "five" }', "tick"),
        ('below = "10"', 'below = "NaN"', "has the number NaN"),
        ('below = "10"', 'below = "-10"', "has the number -10"),
        ('lot_value = "1000"', 'lot_value = "NaN"', "has the number NaN"),
        ('lot_value = "1000"', 'lot_value = "sNaN"', "has the number sNaN"),
        ('daily_limit = "0.1"', 'daily_limit = "-1"', "stock.daily_limit has the number -1"),
        ("opens = 08:30:00", 'opens = "08:30:00+08:00"', "stock.day has the time 08:30:00+08:00"),
        (
            "weekday = 2\nweek = 3\ncloses = 13:30:00",
            'weekday = 2\nweek = 3\ncloses = "13:30:00Z"',
            "without an offset",
        ),
    ],
)
def test_a_broken_market_is_refused_with_a_sentence(
    folder: Path, written: str, instead: str, sentence: str
) -> None:
    path = folder / "taiwan.toml"
    text = path.read_text(encoding="utf-8")
    assert written in text
    path.write_text(text.replace(written, instead, 1), encoding="utf-8")
    with pytest.raises(BrokerRecordRefused, match=r"broker\.toml") as refused:
        installed_brokers.load_plugin(folder / "paper" / "broker.toml")
    assert sentence in refused.value.detail


def test_the_limits_of_an_address_are_so_many_persons_calls_and_are_optional(
    folder: Path,
) -> None:
    path = folder / "paper" / "broker.toml"
    assert installed_brokers.load_plugin(path).record.limits.address_persons() == {}
    text = path.read_text(encoding="utf-8")
    of_address = "[limits.address]\nconnections = 20\norders_per_10s = 125\n\n[session]"
    path.write_text(text.replace("[session]", of_address), encoding="utf-8")
    persons = installed_brokers.load_plugin(path).record.limits.address_persons()
    assert persons == {"connections": 4.0, "orders": 0.5}


def test_the_end_of_a_session_is_optional(folder: Path) -> None:
    path = folder / "paper" / "broker.toml"
    assert installed_brokers.load_plugin(path).record.session.life_s == 86_400
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("[session]\nlife_s = 86400\n", ""), encoding="utf-8")
    life = installed_brokers.load_plugin(path).record.session
    assert (life.life_s, life.ends_at) == (None, None)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (b'{"holidays": ["2026-01-01"], "last": "2026-\xff"}', "codec can't decode"),
        (b'{"holidays": ["2026-13-01"], "last": "2026-12-31"}', "holidays"),
        (b'{"holidays": ["2027-01-01"], "last": "2026-12-31"}', "2027-01-01 is after `last`"),
        (b"[]", "Expected"),
    ],
)
def test_a_broken_table_of_holidays_is_refused_with_a_sentence(
    folder: Path, table: bytes, sentence: str
) -> None:
    (folder / "taiwan_holidays.json").write_bytes(table)
    with pytest.raises(BrokerRecordRefused, match=r"taiwan_holidays\.json") as refused:
        installed_brokers.load_plugin(folder / "paper" / "broker.toml")
    assert sentence in refused.value.detail


def test_a_look_up_of_terms_reads_no_file_and_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_brokers.installed_brokers()

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "glob", refuse)
    plugin, market = installed_brokers.market_of("paper", "stock")
    assert market.takes("common", "LMT", "ROD", "cash", "auto")
    assert plugin.record.name == "paper"
