"""Tests of a broker that lists its instruments (`ListsInstruments` of
`worker_runtime/brokers/port.py`). Import them next to those of `suite`."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
import pytest

from worker_runtime.brokers.port import Broker, Instrument, ListsInstruments, OrderState
from worker_runtime.protocol.errors import SessionDown

from .harness import API_KEY, MAX_STANDSTILL_S, SECRET_KEY, BrokerStage, HeardOrders

#: Seconds that one wait for the broker may take.
BROKER_TIMEOUT_S = 10.0
#: Seconds that a whole list may take.
LIST_TIMEOUT_S = 120.0
_decoder = msgspec.json.Decoder(Instrument)


def listing(broker: Broker) -> list[Instrument]:
    """Returns the broker's list, read within its time limits."""
    assert isinstance(broker, ListsInstruments), "the adapter has no method `instruments`"
    began = last = time.monotonic()
    instruments = []
    for instrument in broker.instruments(BROKER_TIMEOUT_S):
        now = time.monotonic()
        assert now - last < BROKER_TIMEOUT_S + MAX_STANDSTILL_S, (
            "one wait took longer than its timeout"
        )
        assert now - began < LIST_TIMEOUT_S
        last = now
        instruments.append(instrument)
    return instruments


def test_the_list_has_each_code_once_and_what_the_stage_trades(
    broker: Broker, stage: BrokerStage
) -> None:
    codes = [instrument.code for instrument in listing(broker)]
    assert len(codes) == len(set(codes))
    assert set(stage.facts.symbols) <= set(codes)


def test_every_listed_instrument_has_terms_that_make_sense(broker: Broker) -> None:
    yesterday = (datetime.now(UTC) - timedelta(days=1)).date()
    for instrument in listing(broker):
        assert _decoder.decode(msgspec.json.encode(instrument)) == instrument
        ends = [step.below for step in instrument.ticks]
        rising = [end for end in ends[:-1] if end is not None]
        assert len(rising) == len(ends[:-1]), f"{instrument.code}: only the last step has no end"
        assert rising == sorted(set(rising)), f"{instrument.code}: the steps do not rise"
        low, high = instrument.limit_down, instrument.limit_up
        middle = instrument.reference
        known = [price for price in (low, middle, high) if price is not None]
        assert known == sorted(known), f"{instrument.code}: {low} ≤ {middle} ≤ {high}"
        for price in (low, high):
            tick = tick_at(instrument, price)
            assert not tick or not price or price % tick == 0, f"{instrument.code}: {price} is off"
        assert instrument.expires_on is None or instrument.expires_on >= yesterday


def tick_at(instrument: Instrument, price: Decimal | None) -> Decimal | None:
    if price is None:
        return None
    steps = (step for step in instrument.ticks if step.below is None or price < step.below)
    return next((step.tick for step in steps), None)


def test_two_lists_in_a_row_are_the_same(broker: Broker) -> None:
    first, second = listing(broker), listing(broker)
    assert {item.code: item for item in first} == {item.code: item for item in second}


def test_an_order_is_placed_while_the_list_is_read(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    """The session reads the list in a thread of its own."""
    assert isinstance(broker, ListsInstruments)
    entries = iter(broker.instruments(BROKER_TIMEOUT_S))
    first = next(entries)
    rest: list[Instrument] = []
    reader = threading.Thread(target=lambda: rest.extend(entries), daemon=True)
    reader.start()
    sent = stage.facts.market_order(0)
    heard.outcome(broker.place(sent, 5.0), OrderState.FILLED)
    reader.join(LIST_TIMEOUT_S)
    assert not reader.is_alive()
    assert {first.code, *(item.code for item in rest)} == {item.code for item in listing(broker)}
    assert [taken.tag for taken in stage.taken(account)] == [sent.tag]


def test_there_is_no_list_without_a_session(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    stage.register(account, API_KEY, SECRET_KEY)
    early = stage.broker(account, heard)
    broker.close()
    for dead in (early, broker):
        with pytest.raises(SessionDown):
            listing(dead)
    early.close()
