"""The exchange's trading days (in Taipei) and maintenance windows. Times are Unix milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, time, timedelta

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from infra.exchange.ledger import ExchangeLedger
from infra.market.calendar import HOME_ZONE
from worker_runtime.protocol.errors import BrokerMaintenance

_MAINTENANCE_SETTING = "maintenance"
_log = structlog.get_logger()


class ExchangeMaintenance(BaseModel):
    """A window in which logins, orders and queries are refused, and pings are answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    begin_ms: int = Field(ge=0)
    end_ms: int = Field(ge=0)
    #: True if all sessions end when it begins.
    ends_sessions: bool = True


_WINDOWS = TypeAdapter(tuple[ExchangeMaintenance, ...])


def day_begins_ms(at_ms: int, begins: time = time()) -> int:
    """Returns the begin of this moment's day,
    which begins at the time of day `begins` in Taipei."""
    return last_close_ms(at_ms, begins)


def time_half_a_day_away(at_ms: int) -> time:
    """Returns the time of day in Taipei 12 hours from this moment, so that no day begins soon."""
    at = datetime.fromtimestamp(at_ms / 1000, HOME_ZONE) + timedelta(hours=12)
    return at.time().replace(second=0, microsecond=0)


def last_close_ms(at_ms: int, close: time) -> int:
    """Returns the last `close` (time of day in Taipei) that is not after this moment."""
    at = datetime.fromtimestamp(at_ms / 1000, HOME_ZONE)
    closed = datetime.combine(at.date(), close, HOME_ZONE)
    return int((closed if closed <= at else closed - timedelta(days=1)).timestamp() * 1000)


def next_close_ms(at_ms: int, close: time) -> int:
    """Returns the first `close` after this moment. Taipei has no daylight saving time."""
    return last_close_ms(at_ms, close) + 24 * 3600 * 1000


class MaintenancePlan:
    """The announced windows. Calls `begins` when a window that ends the sessions begins."""

    def __init__(
        self,
        ledger: ExchangeLedger,
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], int],
        begins: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._later = later
        self._now = now
        self._begins = begins
        self.windows = _WINDOWS.validate_json(ledger.setting(_MAINTENANCE_SETTING) or "[]")
        for window in self.windows:
            if window.begin_ms > now():
                self._wait_for(window)

    def announce(self, window: ExchangeMaintenance) -> None:
        """Adds a window; it begins at its time, or now if that has passed."""
        self._save(
            (*(announced for announced in self.windows if announced.end_ms > self._now()), window)
        )
        self._wait_for(window)

    def cancel_all(self) -> None:
        """Ends the open window and cancels those to come."""
        self._save(())

    def check(self) -> None:
        """Raises `BrokerMaintenance` inside a window."""
        if not self.windows:
            return
        now = self._now()
        for window in self.windows:
            if window.begin_ms <= now < window.end_ms:
                raise BrokerMaintenance(
                    f"maintenance for {(window.end_ms - now) / 1000:.0f} s more"
                )

    def _wait_for(self, window: ExchangeMaintenance) -> None:
        if not window.ends_sessions:
            return

        def begin() -> None:
            if window in self.windows and self._now() < window.end_ms:
                _log.info("exchange.maintenance", until_ms=window.end_ms)
                self._begins()

        if (wait_ms := window.begin_ms - self._now()) > 0:
            self._later(wait_ms / 1000, begin)
        else:
            begin()

    def _save(self, windows: Sequence[ExchangeMaintenance]) -> None:
        self.windows = tuple(windows)
        self._ledger.save_setting(_MAINTENANCE_SETTING, _WINDOWS.dump_json(self.windows).decode())
