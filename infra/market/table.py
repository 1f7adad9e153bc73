"""`python -m infra.market.table`: makes `xtai.json` anew, with `exchange_calendars` installed beside us.

To be run once a year, when the exchange has published its holidays and the library has a new release.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

FIRST = date(2026, 1, 1)


def table(library: Any) -> dict[str, Any]:
    """What the library knows: weekdays from `FIRST` on to its last session that are none of its sessions."""
    calendar = library.get_calendar("XTAI", start=FIRST.isoformat())
    sessions = {session.date() for session in calendar.sessions}
    last = max(sessions)
    days = [FIRST + timedelta(days=number) for number in range((last - FIRST).days + 1)]
    closed = [day.isoformat() for day in days if day.weekday() < 5 and day not in sessions]
    source = f"exchange_calendars {library.__version__}, XTAI"
    return {"source": source, "first": FIRST.isoformat(), "last": last.isoformat(), "holidays": closed}


def main() -> None:
    found = table(importlib.import_module("exchange_calendars"))
    path = Path(__file__).with_name("xtai.json")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path}: {len(found['holidays'])} holidays until {found['last']}\n")


if __name__ == "__main__":
    main()
