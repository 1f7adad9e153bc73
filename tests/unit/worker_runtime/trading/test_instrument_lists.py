"""A broker's list in the session: read once, in a thread of its own, and answered in pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from worker_runtime.process.log import Log
from worker_runtime.protocol.errors import (
    BerthError,
    BrokerMaintenance,
    BrokerUnreachable,
    InstrumentsLoading,
    InstrumentsTooMany,
    InstrumentsUnavailable,
    InstrumentsUnsupported,
    RateLimited,
)
from worker_runtime.protocol.instruments import (
    MAX_INSTRUMENTS_PER_PAGE,
    MAX_PAGE_BYTES,
    Instrument,
    InstrumentKind,
    InstrumentPage,
    PriceStep,
)
from worker_runtime.protocol.messages import Answer, decode, encode
from worker_runtime.protocol.requests import ListInstruments
from worker_runtime.trading.instrument_lists import HeldList, InstrumentReader, ListBounds

pytestmark = pytest.mark.timeout(30)
ITEM: Any = None
LOG = Log()


def instrument(code: str, market: str = "stock", **changes: Any) -> Instrument:
    fields: dict[str, Any] = {
        "code": code,
        "market": market,
        "kind": InstrumentKind.STOCK,
        "lot_units": 1000,
        "lot_value": Decimal(1000),
    }
    return Instrument(**fields | changes)


def request(**changes: Any) -> ListInstruments:
    fields = {"request_id": "r", "user_id": "u", "account_id": "a", "reply_to": ""}
    return ListInstruments(**fields | {"generation": "g"} | changes)


class ListingBroker:
    """Lists what its test says."""

    def __init__(self, listed: Callable[[], Iterable[Instrument]]) -> None:
        self.listed = listed
        self.asked = 0

    def instruments(self, timeout: float) -> Iterable[Instrument]:
        self.asked += 1
        return self.listed()


class Calls:
    """Replaces `BrokerCalls`."""

    def __init__(self, broker: object) -> None:
        self.broker = broker
        self.spent = 0
        self.limited = False
        self.state = SimpleNamespace(suspect=False)
        #: Errors whose pauses were taken.
        self.noted: list[BerthError] = []

    def note_pause(self, account_id: str, error: BerthError) -> None:
        self.noted.append(error)

    def ensure_session(self, account_id: str, item: Any, *, listed: bool) -> object:
        return self.broker

    def call_timeout(self, item: Any) -> float:
        return 5.0

    def spend_budget_now(self, account_id: str, kind: object) -> None:
        if self.limited:
            raise RateLimited(retry_after=1.0)
        self.spent += 1

    def session(self, account_id: str) -> Any:
        return self.state


def lists_of(
    listed: Callable[[], Iterable[Instrument]], **bounds: Any
) -> tuple[InstrumentReader, Calls, ListingBroker]:
    broker = ListingBroker(listed)
    calls = Calls(broker)
    known: Any = calls
    return InstrumentReader(known, LOG, ListBounds(**bounds)), calls, broker


def page_of(lists: InstrumentReader, **changes: Any) -> InstrumentPage:
    """Asks until the list was read, as a loader does."""
    until = time.monotonic() + 20
    while True:
        try:
            encoded: Any = lists.read_page(request(**changes), ITEM)
            answer: Answer = decode(encode(Answer(request_id="r", instruments=encoded)), Answer)
            assert answer.instruments is not None
            return answer.instruments
        except InstrumentsLoading as loading:
            if not loading.retry_after or time.monotonic() > until:
                raise
            time.sleep(0.002)


def all_pages(lists: InstrumentReader, **changes: Any) -> list[InstrumentPage]:
    pages = [page_of(lists, **changes)]
    while pages[-1].next_after:
        pages.append(page_of(lists, **changes, after=pages[-1].next_after))
    return pages


def codes(*pages: InstrumentPage) -> list[str]:
    return [instrument.code for page in pages for instrument in page.instruments]


def test_all_pages_together_are_the_list_by_rising_code_and_cost_one_query() -> None:
    listed = [instrument(f"{number:04}") for number in (*range(999, 500, -2), *range(500, 1000, 2))]
    lists, calls, broker = lists_of(lambda: iter(listed))
    pages = all_pages(lists)
    assert codes(*pages) == sorted(instrument.code for instrument in listed)
    assert [len(page.instruments) for page in pages] == [200, 200, 100]
    assert {page.total for page in pages} == {500}
    assert len({page.taken_at_ms for page in pages}) == 1
    assert (calls.spent, broker.asked) == (1, 1)


def test_a_page_has_what_was_asked_for_and_fits_into_a_message() -> None:
    def longest(number: int) -> Instrument:
        steps = tuple(PriceStep(below=Decimal(f"{n}.000001"), tick=Decimal("1")) for n in range(16))
        return instrument(f"{number:032}", name="權" * 120, ticks=steps)

    lists, _, _ = lists_of(lambda: [longest(number) for number in range(250)])
    pages = all_pages(lists)
    assert len(codes(*pages)) == 250
    for page in pages:
        assert len(page.instruments) < MAX_INSTRUMENTS_PER_PAGE
        assert len(encode(page)) < MAX_PAGE_BYTES + 1024
        answer = encode(Answer(request_id="r", instruments=page))
        assert decode(answer, Answer).instruments == page
    assert codes(page_of(lists, limit=3)) == [f"{number:032}" for number in range(3)]


def test_a_market_has_pages_and_a_total_of_its_own() -> None:
    listed = [instrument(f"S{n:03}") for n in range(300)] + [
        instrument(f"F{n:03}", "futures") for n in range(5)
    ]
    lists, _, _ = lists_of(lambda: listed)
    [page] = all_pages(lists, market="futures")
    assert (codes(page), page.total) == ([f"F{n:03}" for n in range(5)], 5)
    assert [len(page.instruments) for page in all_pages(lists, market="stock")] == [200, 100]
    assert all_pages(lists, market="bonds")[0] == InstrumentPage(taken_at_ms=page.taken_at_ms)


def test_what_makes_no_sense_or_comes_twice_is_left_out() -> None:
    listed = [
        instrument("GOOD"),
        instrument("GOOD", name="again"),
        instrument("BAD", name="a\x00b"),
        instrument("BADDER", name="\ud800"),
        instrument("WORST", lot_units=0),
    ]
    lists, _, _ = lists_of(lambda: listed)
    [page] = all_pages(lists)
    assert [(listed.code, listed.name) for listed in page.instruments] == [("GOOD", "")]


def test_a_request_is_answered_at_once_while_the_broker_takes_its_time() -> None:
    goes_on = threading.Event()

    def slow() -> Iterable[Instrument]:
        yield instrument("A")
        goes_on.wait(20)
        yield instrument("B")

    lists, calls, _ = lists_of(slow)
    for _ in range(3):
        with pytest.raises(InstrumentsLoading):
            lists.read_page(request(), ITEM)
    goes_on.set()
    assert codes(page_of(lists)) == ["A", "B"]
    assert calls.spent == 1


@pytest.mark.parametrize("listed", [[], [instrument("BAD", name="\x00")]])
def test_an_empty_list_is_an_error_and_the_next_request_reads_it_again(
    listed: list[Instrument],
) -> None:
    now = [listed]
    lists, calls, _ = lists_of(lambda: now[0])
    with pytest.raises(InstrumentsUnavailable):
        page_of(lists)
    now[0] = [instrument("A")]
    assert codes(page_of(lists)) == ["A"]
    assert calls.spent == 2
    assert not calls.state.suspect


def test_a_list_that_breaks_off_gives_no_page_and_its_session_is_pinged() -> None:
    def broken() -> Iterable[Instrument]:
        yield instrument("A")
        raise BrokerUnreachable("the line was cut")

    lists, calls, _ = lists_of(broken)
    with pytest.raises(BrokerUnreachable, match="cut"):
        page_of(lists)
    assert calls.state.suspect


def test_e_a_503_of_a_list_that_is_read_asks_for_a_pause() -> None:
    def refused() -> Iterable[Instrument]:
        yield instrument("A")
        raise BrokerMaintenance("503", retry_after=60.0)

    lists, calls, _ = lists_of(refused)
    with pytest.raises(BrokerMaintenance):
        page_of(lists)
    assert [error.retry_after for error in calls.noted] == [60.0]


def test_a_fault_in_an_adapter_is_reported_as_a_broker_that_did_not_answer() -> None:
    def faulty() -> Iterable[Instrument]:
        yield instrument({"A": "B"}["C"])

    lists, _, _ = lists_of(faulty)
    with pytest.raises(BrokerUnreachable, match="KeyError"):
        page_of(lists)


@pytest.mark.parametrize("bounds", [{"max_instruments": 10}, {"max_bytes": 1000}])
def test_a_list_above_the_bound_is_refused_as_a_whole(bounds: dict[str, int]) -> None:
    lists, _, _ = lists_of(lambda: (instrument(f"{n:03}") for n in range(11)), **bounds)
    with pytest.raises(InstrumentsTooMany):
        page_of(lists)


def test_a_held_list_counts_its_bytes() -> None:
    held = HeldList(1, ListBounds())
    added = [instrument(f"{n:03}") for n in range(5)]
    assert all(held.add(entry) for entry in added)
    assert held.size_bytes == sum(len(msgspec.json.encode(entry)) for entry in added)


def test_a_broker_without_a_list_says_so() -> None:
    known: Any = Calls(object())
    with pytest.raises(InstrumentsUnsupported):
        InstrumentReader(known, LOG).read_page(request(), ITEM)


def test_a_query_that_the_limits_have_no_room_for_is_refused_and_does_not_wait() -> None:
    lists, calls, broker = lists_of(lambda: [instrument("A")])
    calls.limited = True
    with pytest.raises(RateLimited):
        lists.read_page(request(), ITEM)
    assert broker.asked == 0


def test_a_first_page_soon_after_takes_the_list_in_memory_and_later_a_new_one() -> None:
    for fresh_s, queries in ((60.0, 1), (0.0, 2)):
        lists, calls, _ = lists_of(lambda: [instrument("A"), instrument("B")], fresh_s=fresh_s)
        page_of(lists, after="A")
        try:
            lists.read_page(request(), ITEM)
        except InstrumentsLoading:
            assert queries == 2
        assert calls.spent == queries


def test_pages_continue_after_the_broker_session_was_replaced() -> None:
    lists, calls, _ = lists_of(lambda: [instrument("A"), instrument("B")])
    first = page_of(lists, limit=1)
    calls.broker = ListingBroker(lambda: [])
    assert codes(page_of(lists, after=first.next_after)) == ["B"]


def test_a_list_that_nobody_asks_for_is_forgotten() -> None:
    for kept_s, queries in ((60.0, 1), (0.0, 2)):
        lists, calls, _ = lists_of(lambda: [instrument("A")], kept_s=kept_s)
        page_of(lists)
        lists.forget_if_idle()
        page_of(lists)
        assert calls.spent == queries


def test_a_list_that_takes_too_long_is_given_up() -> None:
    lists, _, _ = lists_of(lambda: map(instrument, map(str, range(10_000))), load_timeout_s=0.05)
    with pytest.raises(BrokerUnreachable, match="took more than"):
        page_of(lists, after="A")


def test_reading_a_long_list_lets_other_threads_run() -> None:
    """Another thread places orders: it waits for a few milliseconds at most."""
    lists, _, _ = lists_of(lambda: (instrument(f"{n:06}") for n in range(20_000)))
    with pytest.raises(InstrumentsLoading):
        lists.read_page(request(), ITEM)
    gaps = []
    last = time.perf_counter()
    while lists._load is not None and not lists._load.done:
        time.sleep(0.0005)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    assert len(gaps) > 100
    gaps.sort()
    assert gaps[len(gaps) * 9 // 10] < 0.02
    assert page_of(lists).total == 20_000


def test_a_broker_that_does_not_answer_holds_one_thread_however_often_a_list_is_asked_for() -> None:
    answering = threading.Event()

    def listed() -> Iterator[Instrument]:
        yield instrument("A")
        answering.wait(20)

    lists, calls, broker = lists_of(listed, load_timeout_s=0.02)
    try:
        for _ in range(5):
            with pytest.raises((InstrumentsLoading, BrokerUnreachable)):
                lists.read_page(request(), ITEM)
            time.sleep(0.03)
        assert broker.asked == 1
        assert calls.state.suspect
    finally:
        answering.set()
    for thread in threading.enumerate():
        if thread.name == "instruments":
            thread.join()
    assert page_of(lists).total == 1
