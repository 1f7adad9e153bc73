"""The alert book makes operators' messages: pure steps, with the test's clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.alerts.book import MAX_ALERTS, MAX_LINES_PER_MESSAGE, QUIET_TIME_S, AlertBook
from worker_runtime.jobs.protocol.catalog import SendEmail, make_job

WINDOW, LIMIT = 900.0, 4
START = 1_800_000_000.0


@dataclass
class BookHarness:
    """Holds a book and a clock; `holding` are the conditions that hold at each look."""

    book: AlertBook = field(default_factory=AlertBook)
    now: float = START
    holding: dict[str, float] = field(default_factory=dict)
    wait: float = 0.0
    down: set[str] = field(default_factory=set)

    def look(self, after: float = 10.0, limit: int = LIMIT) -> list[str]:
        """Moves the clock, and returns the lines of the message that goes out then."""
        self.now += after
        self.book.message = None
        for key, value in self.holding.items():
            self.book.observe(key, f"{value:.0f} of {key}", value, self.wait, self.now)
        self.book.keep(lambda key: key.partition("|")[0] in self.down, self.now)
        self.book.make_message(self.now, window=WINDOW, limit=limit)
        return self.book.message.lines if self.book.message else []

    def error(self, key: str = "e", count: int = 1) -> None:
        self.book.count_error(key, f"text of {key}", count, self.now)


def test_an_error_alerts_at_once_and_then_once_a_window_with_its_count() -> None:
    harness = BookHarness()
    harness.error()
    assert [line.split(" (")[0] for line in harness.look()] == ["ERROR text of e"]
    for _ in range(50):
        harness.error(count=2)
        assert harness.look() == []
    [line] = harness.look(after=WINDOW)
    assert "(101 since " in line
    assert harness.look(after=2 * WINDOW) == []
    assert harness.book.alerts == {}, "it came no more, so it is forgotten"
    harness.error()
    assert len(harness.look()) == 1, "and new when it comes again"


def test_errors_that_differ_are_one_message() -> None:
    harness = BookHarness()
    for number in range(MAX_LINES_PER_MESSAGE + 5):
        harness.error(f"e{number}")
    lines = harness.look()
    assert len(lines) == MAX_LINES_PER_MESSAGE + 1
    assert "5 more" in lines[-1]
    assert harness.book.message is not None
    assert harness.book.message.subject.endswith(f"(and {MAX_LINES_PER_MESSAGE + 4} more)")


def test_a_condition_alerts_when_it_has_held_and_when_it_is_over() -> None:
    harness = BookHarness(wait=25.0, holding={"x|a": 3})
    assert harness.look() == []
    assert harness.look() == []
    assert harness.look() == []
    assert "3 of x|a (since " in harness.look()[0]
    assert harness.look() == []
    harness.holding.clear()
    assert harness.look(after=QUIET_TIME_S - 1) == []
    assert [line.split()[0] for line in harness.look(after=1)] == ["OVER"]
    assert harness.book.alerts == {}


def test_a_condition_that_held_for_a_moment_does_not_alert() -> None:
    harness = BookHarness(wait=25.0, holding={"x|a": 3})
    harness.look()
    harness.holding.clear()
    assert harness.look(after=QUIET_TIME_S - 1) == [], (
        "nobody has seen it for as long as it must hold"
    )
    assert harness.look(after=1) == []
    assert harness.book.alerts == {}


def test_a_condition_that_flaps_is_one_alert() -> None:
    harness = BookHarness()
    lines = []
    for number in range(100):
        harness.holding = {"x|a": 1} if number % 3 else {}
        lines += harness.look()
    assert len(lines) == 1


def test_a_condition_that_grows_alerts_again_once_a_window() -> None:
    harness = BookHarness(holding={"x|a": 5})
    assert len(harness.look()) == 1
    harness.holding = {"x|a": 2}
    assert harness.look(after=WINDOW) == [], "it shrank"
    harness.holding = {"x|a": 3}
    assert "3 of x|a" in harness.look()[0], "one more than there were"
    harness.holding = {"x|a": 4}
    assert harness.look() == [], "within the window"
    assert "4 of x|a" in harness.look(after=WINDOW)[0]


def test_a_condition_that_nobody_can_read_is_not_over() -> None:
    harness = BookHarness(holding={"postgresql|a": 1})
    assert len(harness.look()) == 1
    harness.holding, harness.down = {}, {"postgresql"}
    assert harness.look(after=10 * QUIET_TIME_S) == []
    harness.down = set()
    assert harness.look() == []
    assert harness.look(after=QUIET_TIME_S)[0].startswith("OVER ")


def test_beyond_the_limit_everything_waits_for_one_message() -> None:
    harness = BookHarness()
    for number in range(LIMIT):
        harness.error(f"e{number}")
        lines = harness.look()
    assert lines[-1].startswith(f"This is message {LIMIT} in an hour")
    harness.holding = {"x|a": 1}
    for number in range(10):
        harness.error(f"more{number}", count=3)
        assert harness.look() == []
    harness.holding.clear()
    assert harness.look(after=QUIET_TIME_S) == []
    lines = harness.look(after=3600.0)
    assert sum("(3 since" in line for line in lines) == 10
    assert [line for line in lines if line.startswith("OVER ")], (
        "it came and went while all had to wait"
    )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.text(max_size=80), st.floats(1, 2000)), max_size=60)
)
def test_whatever_comes_the_book_stays_small_and_its_messages_can_be_sent(
    rounds: list[tuple[int, str, float]],
) -> None:
    harness = BookHarness()
    sent = []
    for number, text, after in rounds:
        harness.book.count_error(f"e{number}", text, 1, harness.now)
        harness.holding = {f"x|{text}": number}
        if lines := harness.look(after):
            sent.append(harness.now)
            assert harness.book.message is not None
            make_job(
                "j",
                SendEmail(to="a@b", subject=harness.book.message.subject, text="\n".join(lines)),
            )
    assert len(harness.book.alerts) <= MAX_ALERTS + 70
    assert all(sum(0 <= at - window_start < 3600 for at in sent) <= LIMIT for window_start in sent)


def test_too_many_kinds_of_errors_are_counted_together() -> None:
    harness = BookHarness()
    for number in range(MAX_ALERTS + 50):
        harness.error(f"e{number}")
    assert len(harness.book.alerts) == MAX_ALERTS + 1
    assert harness.book.alerts[""].value == 50


@pytest.mark.parametrize("field", ["first_at", "last_at", "told_at"])
@pytest.mark.parametrize("at", [-1.0, 1e12, 1e300, START + 86_400.0])
def test_a_stored_book_with_absurd_times_begins_anew(field: str, at: float) -> None:
    harness = BookHarness()
    harness.error()
    assert harness.look() != []
    harness.error()
    stored = msgspec.json.encode(harness.book)
    assert AlertBook.read(stored, harness.now) == harness.book
    setattr(harness.book.alerts["e"], field, at)
    harness.book = AlertBook.read(msgspec.json.encode(harness.book), harness.now)
    harness.error()
    assert [line.split(" (")[0] for line in harness.look(after=2 * WINDOW)] == ["ERROR text of e"]


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"[]",
        b'{"sent":[1e300,1e300,1e300,1e300]}',
        b'{"number":18446744073709551615}',
        b'{"cursor":"never"}',
        b'{"cursor":"1-x"}',
        b'{"cursor":"99999999999999"}',
        b'{"cursor":""}',
    ],
)
def test_a_stored_book_that_nobody_wrote_begins_anew(stored: bytes) -> None:
    assert AlertBook.read(stored, START) == AlertBook()
    assert AlertBook.read(None, START) == AlertBook()
