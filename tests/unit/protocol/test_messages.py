"""Messages: what is written is read back, and everything else is refused with one kind of error."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.database.models import Order
from infra.database.orders.acceptance import place_request
from worker_runtime.protocol import keys, messages, requests
from worker_runtime.protocol.errors import (
    BerthError,
    Fenced,
    MalformedMessage,
    UnsupportedSchema,
    from_code,
)
from worker_runtime.protocol.instruments import (
    Instrument,
    InstrumentKind,
    InstrumentPage,
    PriceStep,
)
from worker_runtime.protocol.messages import (
    Answer,
    Claim,
    ClaimReply,
    Connect,
    Credentials,
    Event,
    Failure,
    Fill,
    InboxMessage,
    OrderEvent,
    OrderOutcome,
    OrderState,
    PlaceOrder,
    PriceType,
    ReleaseClaim,
    ReloadCredentials,
    SealedAccount,
    Shutdown,
    Side,
    TimeInForce,
    WorkerEvent,
    WorkerEventKind,
    decode,
    encode,
)
from worker_runtime.protocol.requests import (
    BooksCompared,
    ControlMessage,
    ListInstruments,
    Request,
)

ORDER = PlaceOrder(
    request_id="r",
    order_id="o",
    user_id="42",
    account_id="a",
    symbol="2330",
    side=Side.BUY,
    quantity=1,
    price_type=PriceType.LIMIT,
    price=Decimal("612.5"),
    time_in_force=TimeInForce.ROD,
    tag="00000A",
    reply_to="berth:answers:x",
    generation="g",
)
ACCOUNT = SealedAccount(
    account_id="a",
    broker="paper",
    broker_type="stock",
    simulation=True,
    version=1,
    budgets=["b"],
    sealed=b"\x00\xff",
)
FILL = Fill(fill_id="f", quantity=1, price=Decimal("612.5"), at_ms=1_795_410_000_001)
OPTION = Instrument(
    code="TXO20000A6",
    name="臺指選擇權\u3000買權",
    market="futures",
    kind=InstrumentKind.OPTION,
    lot_units=1,
    lot_value=Decimal(50),
    ticks=(PriceStep(below=Decimal(10), tick=Decimal("0.1")), PriceStep(tick=Decimal("0.5"))),
    limit_down=Decimal(0),
    expires_on=date(2026, 1, 21),
)
EVERY = [
    (ORDER, Request),
    (Answer(request_id="r", outcome=OrderOutcome(order_id="o", state=OrderState.FILLED)), Answer),
    (Answer(request_id="r", failure=Failure.of(Fenced())), Answer),
    (
        ListInstruments(
            request_id="r",
            user_id="42",
            account_id="a",
            reply_to="",
            generation="g",
            market="futures",
            after="TXFA6",
        ),
        Request,
    ),
    (
        Answer(
            request_id="r",
            instruments=InstrumentPage(
                instruments=(OPTION,),
                next_after="TXO20000A6",
                taken_at_ms=1_795_410_000_000,
                total=2,
            ),
        ),
        Answer,
    ),
    (
        Claim(
            claim_id="c",
            worker_id="w",
            user_id="42",
            epoch=1,
            generation="g",
            connect_timeout=1.0,
            accounts=[ACCOUNT],
            sealed_keys=b"k",
        ),
        InboxMessage,
    ),
    (Connect(claim_id="c", worker_id="w", attempt=2, connect_timeout=1.0), InboxMessage),
    (ReleaseClaim(claim_id="c", worker_id="w", reason="r"), InboxMessage),
    (Shutdown(user_id="42", epoch=1, reason="r"), ControlMessage),
    (
        ReloadCredentials(
            reload_id="l",
            user_id="42",
            epoch=1,
            worker_id="w",
            accounts=[ACCOUNT],
            sealed_keys=b"k",
        ),
        ControlMessage,
    ),
    (BooksCompared(user_id="42", epoch=1, account_id="a", at_ms=1, blocks=True), ControlMessage),
    (ClaimReply(claim_id="c", worker_id="w", epoch=1, attempt=1), ClaimReply),
    (
        WorkerEvent(
            worker_id="w",
            user_id="42",
            epoch=1,
            sequence=1,
            kind=WorkerEventKind.CONNECTED,
            at_ms=1_795_410_000_000,
        ),
        Event,
    ),
    (
        OrderEvent(
            event_id="6a3f3c1e-0b0c-4f6e-9f5e-1d2c3b4a5968:e",
            order_id="6a3f3c1e-0b0c-4f6e-9f5e-1d2c3b4a5968",
            user_id="42",
            epoch=1,
            state=OrderState.FILLED,
            at_ms=1_795_410_000_000,
            fill=FILL,
            average_price=Decimal("1.1"),
        ),
        Event,
    ),
]


@pytest.mark.parametrize(("message", "message_type"), EVERY, ids=lambda value: type(value).__name__)
def test_every_message_is_read_back_as_it_was_written(
    message: msgspec.Struct, message_type: type
) -> None:
    assert decode(encode(message), message_type) == message


@given(st.one_of(st.binary(max_size=400), st.text(max_size=200).map(str.encode)))
def test_garbage_is_malformed_and_nothing_else(garbage: bytes) -> None:
    for message_type in (Request, InboxMessage, ControlMessage, Event, Answer):
        with pytest.raises(MalformedMessage):
            decode(garbage, message_type)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(field=st.sampled_from(sorted(PlaceOrder.__struct_fields__)), value=json_values)
def test_a_wrong_field_never_gives_an_order_that_is_not_typed(field: str, value: object) -> None:
    raw = msgspec.json.decode(encode(ORDER))
    raw[field] = value
    try:
        order: PlaceOrder = decode(msgspec.json.encode(raw), Request)
    except MalformedMessage:
        return
    assert decode(encode(order), Request) == order


@pytest.mark.parametrize(
    "changes",
    [
        {"code": ""},
        {"code": "A\n"},
        {"code": "X" * 33},
        {"name": "a\x00b"},
        {"name": "x" * 121},
        {"underlying": "\x85"},
        {"market": "Futures"},
        {"market": "futures\n"},
        {"lot_units": 0},
        {"lot_value": "0"},
        {"lot_value": "1E-999999"},
        {"ticks": [{"tick": "0"}]},
        {"ticks": [{"tick": "NaN"}]},
        {"ticks": [{"tick": "1"}] * 17},
        {"limit_up": "-1"},
        {"reference": "Infinity"},
        {"expires_on": "tomorrow"},
    ],
)
def test_an_instrument_that_makes_no_sense_is_malformed(changes: dict[str, Any]) -> None:
    page = {"instruments": [msgspec.to_builtins(OPTION) | changes]}
    raw = msgspec.json.decode(encode(Answer(request_id="r"))) | {"instruments": page}
    with pytest.raises(MalformedMessage):
        decode(msgspec.json.encode(raw), Answer)


def test_half_of_a_surrogate_pair_in_a_name_is_malformed() -> None:
    raw = encode(Answer(request_id="r", instruments=InstrumentPage(instruments=(OPTION,))))
    assert OPTION.name.encode() in raw
    with pytest.raises(MalformedMessage):
        decode(raw.replace(OPTION.name.encode(), b"\\ud800"), Answer)


@pytest.mark.parametrize(
    ("codes", "next_after"), [("ba", ""), ("aa", ""), ("ab", "a"), ("", "a"), ("a" * 201, "")]
)
def test_a_page_whose_codes_do_not_rise_or_that_points_elsewhere_is_malformed(
    codes: str, next_after: str
) -> None:
    instruments = [msgspec.to_builtins(OPTION) | {"code": code} for code in codes]
    page = {"instruments": instruments, "next_after": next_after}
    with pytest.raises(MalformedMessage):
        decode(
            msgspec.json.encode({"type": "answer", "request_id": "r", "instruments": page}), Answer
        )


@pytest.mark.parametrize(
    "changes", [{"limit": 0}, {"limit": 201}, {"after": "\x00"}, {"market": "?"}]
)
def test_a_page_of_instruments_is_asked_for_within_bounds(changes: dict[str, Any]) -> None:
    fields = {
        "request_id": "r",
        "user_id": "u",
        "account_id": "a",
        "reply_to": "",
        "generation": "g",
    }
    with pytest.raises(MalformedMessage):
        decode(msgspec.json.encode({"type": "list_instruments", **fields, **changes}), Request)


def test_an_unknown_type_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        decode(b'{"type": "format_disk", "v": 1}', ControlMessage)


def test_a_later_schema_version_is_refused_by_name() -> None:
    later = msgspec.json.decode(encode(ORDER)) | {"v": messages.SCHEMA_VERSION + 1}
    with pytest.raises(UnsupportedSchema):
        decode(msgspec.json.encode(later), Request)


def test_an_odd_lot_is_refused_by_a_reader_that_would_take_shares_for_lots() -> None:
    """Release 0.1.0 read version 1 only, and passes over fields that it does not know."""
    row = SimpleNamespace(
        **{name: getattr(ORDER, name) for name in PlaceOrder.__struct_fields__},
        id=ORDER.order_id,
        deadline_at=datetime(2026, 11, 20, 10, 0, 5),
        created_at=datetime(2026, 11, 20, 10),
    )
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({"lot": "odd"}, 2),
        ({"condition": "short_selling"}, 2),
        ({"open_close": "day_trade"}, 2),
    ]
    for changes, version in cases:
        request = place_request(cast(Order, SimpleNamespace(**(vars(row) | changes))), "")
        assert request.v == version
        assert decode(encode(request), Request) == request


def test_unknown_fields_are_ignored_so_that_an_older_worker_understands_a_newer_api() -> None:
    newer = msgspec.json.decode(encode(ORDER)) | {"colour": "blue"}
    assert decode(msgspec.json.encode(newer), Request) == ORDER


def test_an_oversized_message_is_refused_unread() -> None:
    with pytest.raises(MalformedMessage, match="bytes"):
        decode(b" " * (messages.MAX_MESSAGE_BYTES + 1), Request)


def test_credentials_do_not_show_themselves() -> None:
    assert "canary" not in repr(Credentials(api_key="canary", secret_key="canary"))


def test_an_error_travels_by_its_code_and_an_unknown_code_still_is_an_error() -> None:
    assert isinstance(from_code("FENCED", "x"), Fenced)
    assert "FROM_THE_FUTURE" in from_code("FROM_THE_FUTURE", "x").detail


def test_every_error_has_a_code_of_its_own_and_a_sentence() -> None:
    def family(cls: type[BerthError]) -> list[type[BerthError]]:
        return [cls, *(kind for sub in cls.__subclasses__() for kind in family(sub))]

    # Only the protocol's own: other rooms' errors are checked where they are.
    errors = [cls for cls in family(BerthError) if cls.__module__ == BerthError.__module__]
    codes = [cls.code for cls in errors]
    assert len(codes) == len(set(codes))
    assert all(cls.title().endswith(".") or ":" in cls.title() for cls in errors)


@given(st.binary(max_size=100))
def test_a_frame_is_parsed_or_malformed(raw: bytes) -> None:
    try:
        frame = requests.parse_frame(raw)
    except MalformedMessage:
        return
    parts = (frame.deadline_ms, frame.request_id.encode(), frame.mac.encode(), frame.payload)
    assert b"%d|%s|%s|%s" % parts == raw or raw[:1] == b"0"


def test_all_keys_of_one_user_share_a_cluster_slot() -> None:
    mine = [
        keys.requests("42"),
        keys.processing("42"),
        keys.doorbell("42"),
        keys.seen("42", "r"),
        keys.response("42", "r"),
        keys.mark("42"),
        keys.metadata("42"),
        keys.owner("42"),
        keys.pop("42"),
        keys.control("42"),
    ]
    tags = {key[key.index("{") : key.index("}") + 1] for key in mine}
    assert tags == {"{42}"}
    assert len(set(mine)) == len(mine)
