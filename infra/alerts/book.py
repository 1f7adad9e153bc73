"""Knows which alerts were sent, and decides which to send next: a state with pure steps, kept in
Valkey.

An error alerts when it first occurs; repeats are counted, and reported once a window. A condition
alerts when it has held for a while, again once a window if it grows, and when it is over. All that
is due at a time is one message. The number of messages an hour is limited: later alerts join the
next message. Times are Unix seconds by Valkey's clock.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self

import msgspec

from worker_runtime.protocol.bounds import Counter

#: Seconds for which a condition must not hold until it is over: one that flaps is one alert.
QUIET_TIME_S = 60.0
#: Errors that are told apart; further ones are counted together.
MAX_ALERTS = 200
#: Lines of one message, and characters of a line.
MAX_LINES_PER_MESSAGE, MAX_LINE_LENGTH = 40, 300
_HOUR_S = 3600.0
_CURSOR = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?")


class OperatorAlert(msgspec.Struct, kw_only=True):
    """Describes an error or condition."""

    text: str
    first_at: float
    #: When an error came last, or when the condition was last known to hold.
    last_at: float
    #: The number of errors since `first_at`; of a condition, how large it is.
    value: float = 0.0
    #: Seconds until a condition is told; None: an error.
    wait: float | None = None
    #: The value in the last message, and when that was; 0: never.
    told: float = 0.0
    told_at: float = 0.0

    def has_ended(self, now: float, window: float) -> bool:
        return now - self.last_at >= (window if self.wait is None else QUIET_TIME_S)

    def is_due(self, now: float, window: float) -> bool:
        ended = self.has_ended(now, window)
        held = self.wait is None or self.last_at - self.first_at >= self.wait
        if ended and self.wait is not None:
            return held or bool(self.told_at)
        again = ended or not self.told_at or now - self.told_at >= window
        return held and again and self.value > self.told

    def line(self, ended: bool) -> str:
        text = "".join(character if character.isprintable() else " " for character in self.text)[
            :MAX_LINE_LENGTH
        ]
        first = _clock(self.first_at)
        if self.wait is None:
            return f"ERROR {text} ({self.value:.0f} since {first})"
        return (
            f"OVER {text} ({first} to {_clock(self.last_at)})"
            if ended
            else f"{text} (since {first})"
        )


class AlertMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message on its way. Its number, and when it was made, make the ids of its jobs."""

    number: int
    at: int
    subject: str
    lines: list[str]


class AlertBook(msgspec.Struct, kw_only=True):
    """All open alerts. `cursor`: the last entry of the stream that is counted here."""

    cursor: str = "0"
    alerts: dict[str, OperatorAlert] = {}
    #: When the messages of the last hour were made.
    sent: list[float] = []
    message: AlertMessage | None = None
    number: Counter = 0

    @classmethod
    def read(cls, stored: bytes | None, now: float) -> Self:
        """Reads the stored book. It is empty in place of what cannot be read, or counts with times
        to come: what is open is reported again."""
        try:
            book = msgspec.json.decode(stored or b"{}", type=cls)
        except ValueError:
            return cls()
        times = [
            at
            for alert in book.alerts.values()
            for at in (alert.first_at, alert.last_at, alert.told_at)
        ]
        if _CURSOR.fullmatch(book.cursor):
            times += [int(book.cursor.partition("-")[0]) / 1000, *book.sent]
            if min(times) >= 0 and max(times) < now + _HOUR_S:
                return book
        return cls()

    def count_error(self, key: str, text: str, count: int, now: float) -> None:
        if key not in self.alerts and len(self.alerts) >= MAX_ALERTS:
            key, text = "", "more kinds of errors than are told apart; the logs have them"
        alert = self.alerts.setdefault(key, OperatorAlert(text=text, first_at=now, last_at=now))
        alert.text, alert.last_at, alert.value = text, now, alert.value + count

    def observe(self, key: str, text: str, value: float, wait: float, now: float) -> None:
        """Records that the condition holds."""
        alert = self.alerts.setdefault(
            key, OperatorAlert(text=text, first_at=now, last_at=now, wait=wait)
        )
        alert.text, alert.last_at, alert.value = text, now, value
        alert.told = min(alert.told, value)  # one more than now is worth a message

    def keep(self, unknown: Callable[[str], bool], now: float) -> None:
        """Keeps alerts as they are while nobody knows whether their conditions hold."""
        for key, alert in self.alerts.items():
            if alert.wait is not None and unknown(key):
                alert.last_at = now

    def make_message(self, now: float, *, window: float, limit: int) -> None:
        """Makes a message of all that is due,
        unless the limit is reached, and forgets what has ended."""
        self.sent = [at for at in self.sent if now - at < _HOUR_S]
        due = {key: alert for key, alert in self.alerts.items() if alert.is_due(now, window)}
        ended = {key for key, alert in self.alerts.items() if alert.has_ended(now, window)}
        told = due if len(self.sent) < limit else {}
        for key in ended:
            if key in told or key not in due:
                del self.alerts[key]
        if not told:
            return
        lines = [alert.line(key in ended) for key, alert in told.items()]
        subject = f"Berth: {lines[0][:150]}" + (
            f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        )
        if len(lines) > MAX_LINES_PER_MESSAGE:
            lines[MAX_LINES_PER_MESSAGE:] = [
                f"… and {len(lines) - MAX_LINES_PER_MESSAGE} more: see the page and the logs"
            ]
        self.sent.append(now)
        if len(self.sent) == limit:
            lines.append(
                f"This is message {limit} in an hour: the next one after "
                f"{_clock(self.sent[0] + _HOUR_S)}"
            )
        self.number += 1
        self.message = AlertMessage(number=self.number, at=int(now), subject=subject, lines=lines)
        for alert in told.values():
            alert.told, alert.told_at = alert.value, now


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M UTC")
