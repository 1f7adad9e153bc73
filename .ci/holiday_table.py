"""Makes `worker_runtime/brokers/taiwan_holidays.json` from the library `exchange_calendars`.

Run `.venv/bin/python .ci/holiday_table.py` once a year, when the library has a release with the
exchange's new holidays.
"""

import importlib
import json
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

FIRST = date(2026, 1, 1)


def holiday_table(library: Any) -> dict[str, Any]:
    """Returns the weekdays from `FIRST` to the library's last session that are no sessions."""
    calendar = library.get_calendar("XTAI", start=FIRST.isoformat())
    sessions = {session.date() for session in calendar.sessions}
    last = max(sessions)
    days = [FIRST + timedelta(days=number) for number in range((last - FIRST).days + 1)]
    closed = [day.isoformat() for day in days if day.weekday() < 5 and day not in sessions]
    source = f"exchange_calendars {library.__version__}, XTAI"
    return {
        "source": source,
        "first": FIRST.isoformat(),
        "last": last.isoformat(),
        "holidays": closed,
    }


def main() -> None:
    found = holiday_table(importlib.import_module("exchange_calendars"))
    path = (
        Path(__file__).resolve().parents[1] / "worker_runtime" / "brokers" / "taiwan_holidays.json"
    )
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path}: {len(found['holidays'])} holidays until {found['last']}\n")


if __name__ == "__main__":
    main()
