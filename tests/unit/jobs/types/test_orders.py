"""Statements and exports: pure functions of the orders that a job brings along."""

from __future__ import annotations

import csv
import io
import zlib
from decimal import Decimal

import msgspec
import pytest

from tests.support.jobs.order_rows import CONTEXT, make_statement_of, row
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import messages as job_messages
from worker_runtime.jobs.protocol.catalog import (
    DeliverWebhook,
    ExportOrders,
    MakeStatement,
    SendEmail,
    TooManyOrders,
    decompress,
    pack_orders,
    unpack_orders,
)
from worker_runtime.jobs.types.statements import export_orders
from worker_runtime.protocol.errors import MalformedMessage

#: `tests/integration` imports these from here.


def test_make_statement_of_sums_up_what_was_bought_and_sold_by_account_and_symbol() -> None:
    made = make_statement_of(
        row(1),
        row(2, quantity=1, filled_quantity=1, average_price=Decimal("1005")),
        row(
            3, side="sell", state="part_filled", filled_quantity=2, average_price=Decimal("1010.5")
        ),
        row(4, symbol="2317", state="rejected", filled_quantity=0, average_price=None),
        row(5, account_id="second", state="cancelled", filled_quantity=0, average_price=None),
    )
    assert (made.user_id, made.day, made.orders, made.open_orders) == ("alice", "2026-11-20", 5, 1)
    assert [(line.account_id, line.symbol) for line in made.lines] == [
        ("main", "2317"),
        ("main", "2330"),
        ("second", "2330"),
    ]
    line = made.lines[1]
    assert (line.bought, line.bought_average) == (4, Decimal("1002"))
    assert (line.sold, line.sold_average) == (2, Decimal("1010.5"))
    assert line.orders == {"filled": 2, "part_filled": 1}
    assert (made.lines[0].bought, made.lines[0].bought_average) == (0, None)


def test_a_round_average_is_written_without_an_exponent() -> None:
    [line] = make_statement_of(row(1, average_price=Decimal("20000"))).lines
    assert msgspec.to_builtins(line)["bought_average"] == "20000"


def test_an_average_is_not_made_up_when_a_price_is_unknown() -> None:
    line = make_statement_of(row(1), row(2, average_price=None)).lines[0]
    assert (line.bought, line.bought_average) == (6, None)


def test_an_export_is_a_file_that_no_spreadsheet_runs() -> None:
    rows = [
        row(1, reason='=cmd|"/c calc"!A0', price=Decimal("1E+3")),
        row(2, reduce_only=True, price=None),
    ]
    made = export_orders(ExportOrders(user_id="alice", orders=pack_orders(rows)), CONTEXT)
    lines = list(csv.DictReader(io.StringIO(decompress(made.csv).decode(), newline="")))
    assert made.orders == len(lines) == 2
    assert lines[0]["reason"] == '\'=cmd|"/c calc"!A0'
    assert (lines[0]["price"], lines[1]["price"]) == ("1000", "")
    assert [line["reduce_only"] for line in lines] == ["false", "true"]


def test_as_many_orders_as_fit_come_back_as_a_result_that_fits() -> None:
    rows = [row(n, id=f"{n * 7919**8 % 16**32:032x}") for n in range(700)]
    assert unpack_orders(pack_orders(rows)) == rows
    made = export_orders(ExportOrders(user_id="alice", orders=pack_orders(rows)), CONTEXT)
    assert len(msgspec.json.encode(made)) < job_messages.MAX_RESULT_BYTES - 4096
    job = catalog.make_job("j", ExportOrders(user_id="alice", orders=pack_orders(rows)))
    assert len(job_messages.encode_job(job)) <= job_messages.MAX_JOB_BYTES
    with pytest.raises(TooManyOrders):
        pack_orders([row(n, id=f"{n * 7919**8 % 16**32:032x}") for n in range(3000)])


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"nonsense",
        zlib.compress(b"[]")[:-1],
        zlib.compress(b" " * 5_000_000),
        zlib.compress(b"[[1]]"),
    ],
    ids=["empty", "not-packed", "cut-off", "bomb", "other-rows"],
)
def test_orders_that_cannot_be_read_are_refused(packed: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_orders(packed)


@pytest.mark.parametrize(
    "work",
    [
        SendEmail(to="a@example.com\r\nBcc: b@example.com", subject="s", text="t"),
        SendEmail(to="a@example.com", subject="s\r\nBcc: b@example.com", text="t"),
        SendEmail(to="a@example.com", subject="s", text="t" * 16_001),
        DeliverWebhook(
            url="https://example.com/\n", recipient="alice", event="e", body=msgspec.Raw(b"1")
        ),
        DeliverWebhook(
            url="https://example.com/", recipient="{a}", event="e", body=msgspec.Raw(b"1")
        ),
        MakeStatement(user_id="alice", day="today", orders=b""),
    ],
    ids=["to", "subject", "text", "url", "recipient", "day"],
)
def test_a_job_outside_of_its_bounds_is_refused_by_its_producer(work: msgspec.Struct) -> None:
    with pytest.raises(MalformedMessage):
        catalog.make_job("j", work)
