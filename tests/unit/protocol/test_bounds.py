"""Numbers of strangers have bounds: no message makes its reader write or hold much more than
itself."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.http.fields import plain_price
from api.positions.schemas import PositionView
from worker_runtime.protocol.bounds import (
    MAX_DIGITS,
    MAX_EXPONENT,
    MAX_PRICE,
    MAX_PRICE_LENGTH,
    MIN_EXPONENT,
    check_amounts,
    check_prices,
    plain_number,
    round_price,
)
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import MAX_MESSAGE_BYTES, Answer, Event, decode
from worker_runtime.protocol.requests import Request, decode_report

#: Numbers whose text is short and which are long when they are written without an exponent.
HIDDEN = ["1E-999999", "-1E-999999", "0E-999999", "1E+999999", "0E+999999", "1E-999999999999999999"]

triples = st.tuples(st.just(0), st.lists(st.integers(0, 9), max_size=40), st.integers(-60, 60))
numbers = st.one_of(
    st.decimals(allow_nan=True, allow_infinity=True),
    triples.map(Decimal),
    st.sampled_from([Decimal(text) for text in HIDDEN]),
)


@pytest.mark.parametrize(
    "text", [*HIDDEN, "NaN", "sNaN", "Infinity", "-1", "9" * 13, "999999999999.9999999"]
)
def test_a_value_that_is_not_a_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a price is finite"):
        check_prices(price=Decimal(text))


@pytest.mark.parametrize("text", [*HIDDEN, "NaN", "-Infinity", "-1000000000000"])
def test_a_value_that_is_not_an_amount_of_money_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a price is finite"):
        check_amounts(cash=Decimal(text))


@pytest.mark.parametrize(
    ("exponent", "accepted"),
    [
        (MIN_EXPONENT - 1, False),
        (MIN_EXPONENT, True),
        (MAX_EXPONENT, True),
        (MAX_EXPONENT + 1, False),
    ],
)
def test_exponents_are_accepted_up_to_their_bounds(exponent: int, accepted: bool) -> None:
    zero = Decimal((0, (0,), exponent))
    if accepted:
        check_prices(price=zero)
    else:
        with pytest.raises(ValueError, match="exponent"):
            check_prices(price=zero)


@pytest.mark.parametrize(("digits", "accepted"), [(MAX_DIGITS, True), (MAX_DIGITS + 1, False)])
def test_digits_are_accepted_up_to_their_bound(digits: int, accepted: bool) -> None:
    price = Decimal((0, (1,) * digits, MIN_EXPONENT))
    if accepted:
        check_prices(price=price)
    else:
        with pytest.raises(ValueError, match="digits"):
            check_prices(price=price)


def test_a_real_average_cost_is_accepted_and_reported_with_six_places() -> None:
    cost = Decimal(1661) / 3
    check_prices(average_price=cost)
    assert round_price(cost) == Decimal("553.666667")


def test_an_adapter_changes_no_number_that_has_six_places() -> None:
    assert str(round_price(Decimal("553.47"))) == "553.47"
    assert str(round_price(Decimal("1E+11"))) == "1E+11"


@given(numbers)
@example(MAX_PRICE)
@example(Decimal((0, (9,) * MAX_DIGITS, MIN_EXPONENT)))
@example(Decimal((0, (1,), MIN_EXPONENT)))
def test_an_accepted_number_is_never_written_longer_than_its_bound(number: Decimal) -> None:
    try:
        check_amounts(amount=number)
    except ValueError:
        return
    for value in (number, round_price(number)):
        text = plain_number(value)
        assert len(text) <= MAX_PRICE_LENGTH
        assert Decimal(text) == value
        assert "E" not in text


@given(numbers)
def test_rounding_raises_nothing_and_keeps_what_is_refused(number: Decimal) -> None:
    rounded = round_price(number)
    if number.is_finite() and number.adjusted() < MAX_EXPONENT:
        assert abs(rounded.copy_abs().compare(number.copy_abs())) <= 1
    else:
        assert rounded is number


def hostile(item: bytes, before: bytes, behind: bytes) -> bytes:
    """Returns the longest message that is still read, with as many of this item as a list may
    have."""
    room = MAX_MESSAGE_BYTES - len(before) - len(behind)
    return before + b",".join([item] * min(MAX_LISTED, room // (len(item) + 1))) + behind


#: `bounds.LIST_BOUNDS`.
MAX_LISTED = 4_000


def position(price: str) -> bytes:
    return b'{"symbol":"","quantity":1,"average_price":"%s"}' % price.encode()


REPORT = b'{"type":"answer","request_id":"r","report":{'
POSITIONS = (
    REPORT
    + b'"account_id":"a","taken_at_ms":1795410000000,"complete":true,'
    + b'"absence_certain":true,"positions":['
)
INSTRUMENTS = b'{"type":"answer","request_id":"r","instruments":{"instruments":['
INSTRUMENT = b'{"code":"a","market":"a","kind":"stock","lot_units":1,"lot_value":"1","ticks":[%s]}'
NESTED = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 40_000,
}


@pytest.mark.parametrize(
    "message",
    [
        *(
            hostile(position(price), POSITIONS, b"]}}")
            for price in (*HIDDEN, "1E-28", "0." + "3" * 28)
        ),
        hostile(b"[]", REPORT + b'"x":[', b"]}}"),
        hostile(b"{}", REPORT + b'"x":[', b"]}}"),
        hostile(b'{"":0}', REPORT + b'"x":[', b"]}}"),
        hostile(b"0", REPORT + b'"x":[', b"]}}"),
        *(hostile(INSTRUMENT % ticks, INSTRUMENTS, b"]}}") for ticks in (b"", b'{"tick":"1"}')),
        hostile(b'{"tick":"1"}', INSTRUMENTS + INSTRUMENT[:-3], b"]}]}}"),
        *(REPORT + b'"x":' + nested for nested in NESTED.values()),
        REPORT + b'"x":' + b"9" * 100_000 + b"}}",
        REPORT + b'"x":"' + b"\\ud800" * 20_000 + b'"}}',
    ],
    ids=lambda message: f"{message[len(REPORT):][-40:]!r}",
)  # fmt: skip
def test_a_message_makes_its_reader_hold_little_more_than_itself(message: bytes) -> None:
    # What is made once does not count for the message.
    show_positions(b'{"type":"answer","request_id":"r"}')
    assert allocated(show_positions, message) <= 50 * len(message) + 2**20


@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=2000), st.sampled_from([Request, Event, Answer]))
def test_garbage_makes_its_reader_hold_little_more_than_itself(garbage: bytes, kind: Any) -> None:
    def read(message: bytes) -> None:
        with pytest.raises(MalformedMessage):
            decode(message, kind)

    read(b"")
    assert allocated(read, garbage) <= 50 * len(garbage) + 2**20


def show_positions(message: bytes) -> None:
    """Reads a worker's answer and writes the API's, if it can be read."""
    try:
        answer: Answer = decode(message, Answer)
        report = decode_report(answer.report or {})
    except MalformedMessage:
        return
    shown = [PositionView.of(position) for position in report.positions]
    assert (
        len(msgspec.json.encode([plain_price(view.average_price) for view in shown]))
        <= MAX_MESSAGE_BYTES
    )
    assert all(view.model_dump_json() for view in shown)


def allocated(act: Callable[[bytes], object], message: bytes) -> int:
    """Returns the bytes that were allocated at the highest point of a call."""
    tracemalloc.start()
    try:
        act(message)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
